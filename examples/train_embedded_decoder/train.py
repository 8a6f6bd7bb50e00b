"""Train the embedded decoder from nothing: tokenizer, data, model; one GPU, a few minutes.

The schedule follows the clock (`--minutes`) or a number of steps (`--steps`, which repeats to the batch).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from data import training_loader
from model import batch_hidden, build_config, build_generation_config, weighted_loss
from tokenizer import save_tokenizer, train_tokenizer
from transformers import PreTrainedModel, Qwen3ForCausalLM

WARMUP_STEPS, DECAY_SHARE = 200, 0.55


@dataclass
class Progress:
    """How far the training is, by steps if their number was given, else by the clock."""

    steps: int | None
    seconds: float
    step: int = 0
    started: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the end of the first step."""
        return time.perf_counter() - self.started

    @property
    def share(self) -> float:
        """From 0 to 1, at which the training ends."""
        return self.step / self.steps if self.steps else self.elapsed / self.seconds

    def learning_rate(self, peak: float) -> float:
        """Warm up, hold, and fall to zero over the last part: the plateau needs no end known in advance."""
        warmup = min(1.0, (self.step + 1) / WARMUP_STEPS)
        decay = min(1.0, max(0.0, 1.0 - self.share) / DECAY_SHARE)
        return peak * min(warmup, decay)


def parse_args() -> argparse.Namespace:
    """The command line; its defaults are the ones that trained the shipped checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=4.2, help="time of the training loop")
    parser.add_argument("--steps", type=int, help="steps of the training loop, instead of --minutes")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--row-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def build_optimizer(model: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms and the embedding alone."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def train(
    model: PreTrainedModel,
    loader: torch.utils.data.DataLoader,
    args: argparse.Namespace,
    after_step: Callable[[Progress], None] = lambda _: None,
) -> dict:
    """Run the loop and return what it did; the clock starts after the first step, which compiles."""
    device = model.device
    loss_function = weighted_loss
    if args.compile:
        loss_function = torch.compile(weighted_loss, dynamic=False)
        for layer in model.model.layers:  # layer by layer: one compilation serves all of them
            layer.compile(dynamic=False)
    optimizer = build_optimizer(model, args.lr)
    progress, tokens, loss_sum = Progress(args.steps, args.minutes * 60), 0, torch.zeros((), device=device)
    for ids, weights in loader:
        ids, weights = ids.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True).float()
        for group in optimizer.param_groups:
            group["lr"] = progress.learning_rate(args.lr) if progress.step else args.lr / WARMUP_STEPS
        with torch.autocast(device.type, torch.bfloat16):
            hidden = batch_hidden(model, ids)
            loss = loss_function(hidden, model.model.embed_tokens.weight, ids[:, 1:], weights[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        tokens += ids.numel()
        if progress.step == 0:
            print(f"first step: loss {loss.item():.3f}", flush=True)
            progress.started = time.perf_counter()
        progress.step += 1
        after_step(progress)
        if progress.step % 250 == 0:
            rate = tokens / progress.elapsed / 1e6
            print(
                f"{progress.step} {progress.elapsed:.0f}s loss {loss_sum.item() / 250:.4f} {rate:.2f} Mtok/s",
                flush=True,
            )
            loss_sum.zero_()
        if progress.share >= 1.0:
            break
    return {"steps": progress.step, "tokens": tokens, "loop_seconds": round(progress.elapsed, 1)}


def save(model: Qwen3ForCausalLM, folder: Path, report: dict) -> None:
    """The checkpoint in bfloat16, beside the record of how it was made."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it its owner's alone
    (folder / "train.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Make everything from the seed and leave a transformers checkpoint in --out."""
    args = parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    started = time.perf_counter()
    tokenizer = train_tokenizer(args.seed)
    save_tokenizer(tokenizer, args.out)
    print(f"tokenizer: {time.perf_counter() - started:.1f}s", flush=True)
    loader = training_loader(tokenizer, args.seed, args.rows, args.row_len + 1, args.workers)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen3ForCausalLM._from_config(build_config(tokenizer), dtype=torch.float32).to(device)
    model.generation_config = build_generation_config(tokenizer)
    report = train(model.train(), loader, args)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    report |= {
        "command": command(),
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "workers": args.workers,
        "row_len": args.row_len,
    }
    save(model, args.out, report)
    print(json.dumps(report, indent=1), flush=True)


def command() -> str:
    """This process's command line, without the folders, whose names are nobody's business."""
    script, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    position = arguments.index("--out")
    return " ".join(["python", script, "--out OUT", *arguments[:position], *arguments[position + 2 :]])


if __name__ == "__main__":
    main()
