"""Train the embedded Whisper from nothing: tokenizer, speech, model; one GPU, a few minutes.

Worker processes speak (see clips.py) while the GPU trains on what there is: first short windows at any place of the
encoder's positions, then windows of 30 s. The schedule follows the clock.
"""

import argparse
import itertools
import json
import os
import queue as queues
import sys
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from clip_pool import CHUNK_BYTES, ClipPool, move
from clips import Chunk, chunks, clips, start_workers
from speech_model import IGNORED, Losses, Trainee, build_model, decode, encode
from transformers import GenerationConfig, WhisperForConditionalGeneration
from vocabulary import build_tokenizer, generation_config, read_tokenizer, save_tokenizer
from windows import WindowMaker, Windows, WindowShape

WARMUP_STEPS, DECAY_SHARE, SHORT_SHARE = 300, 0.5, 0.4
ATTENTION_WEIGHT, FRAME_WEIGHT = 0.3, 0.3
FIRST_CHUNK_SECONDS = 180


def parse_args() -> argparse.Namespace:
    """The command line; its defaults are the ones that trained the shipped checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=7.0, help="time from start to end")
    parser.add_argument("--steps", type=int, help="steps to train for, instead of --minutes")
    parser.add_argument("--short-rows", type=int, default=512, help="windows of 6 s in a batch")
    parser.add_argument("--whole-rows", type=int, default=96, help="windows of 30 s in a batch")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--init", type=Path, help="checkpoint to go on from, on windows of 30 s only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--pool-gb", type=float, default=12.0, help="device memory for speech")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


@dataclass
class Progress:
    """How far the training is, by steps if their number was given, else by the clock."""

    steps: int | None
    seconds: float
    step: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @property
    def share(self) -> float:
        """From 0 to 1, at which the training ends."""
        return self.step / self.steps if self.steps else self.elapsed / self.seconds

    def learning_rate(self, peak: float) -> float:
        """Warm up, hold, and fall to zero over the last part: the plateau needs no end known in advance."""
        warmup = min(1.0, (self.step + 1) / WARMUP_STEPS)
        return peak * min(warmup, max(0.0, 1.0 - self.share) / DECAY_SHARE)


class Feeder:
    """Brings chunks to the device in a thread, so that neither pickling nor copying holds up the training."""

    def __init__(self, seed: int, workers: int, tokenizer: transformers.WhisperTokenizer) -> None:
        self._queue, self._workers = start_workers(seed, workers, tokenizer.backend_tokenizer)
        self._ready: queues.Queue[Chunk] = queues.Queue(maxsize=2)

    def start(self, pool: ClipPool, count: int) -> None:
        """Bring chunks to the pool from now on; returns when it has so many."""
        self._pool = pool
        threading.Thread(target=self._bring, daemon=True).start()
        for _ in range(count):
            try:
                self._pool.add(self._ready.get(timeout=FIRST_CHUNK_SECONDS))
            except queues.Empty:
                raise RuntimeError(
                    f"no speech after {FIRST_CHUNK_SECONDS} s; see what the workers wrote"
                ) from None

    def poll(self) -> None:
        """Take in a chunk if there is one."""
        if not self._ready.empty():
            self._pool.add(self._ready.get())

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()

    def _bring(self) -> None:
        device = self._pool.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        while True:
            chunk = self._queue.get()
            with torch.cuda.stream(stream):
                moved = move(chunk, device)
            if stream is not None:
                stream.synchronize()
                for tensor in moved[:-1]:  # made on this stream, and used on the other
                    tensor.record_stream(torch.cuda.default_stream(device))
            self._ready.put(moved)


def build_optimizer(trainee: Trainee, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms, biases and embeddings alone."""
    named = [(name, p) for name, p in trainee.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.dim() >= 2 and "embed" not in name]
    others = [p for name, p in named if p.dim() < 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=others[0].is_cuda)


@torch.no_grad()
def heldout_errors(model: WhisperForConditionalGeneration, batches: list[Windows]) -> str:
    """Share of wrong tokens, given the right ones before, in windows of held-out voices and sentences."""
    shares = []
    for windows in batches:
        with torch.autocast(windows.features.device.type, torch.bfloat16):
            encoded = encode(model, windows.features, windows.positions)
            hidden, _ = decode(model, windows.input_ids, encoded)
            logits = hidden @ model.model.decoder.embed_tokens.weight.T
        counted = windows.labels != IGNORED
        wrong = (logits.argmax(2) != windows.labels) & counted
        shares.append(wrong.sum() / counted.sum())
    return " ".join(f"{100 * share.item():.2f}%" for share in shares)


class Trainer:
    """The loop and what it needs."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self._started = time.perf_counter()
        init = args.init
        self.tokenizer = read_tokenizer(init) if init else build_tokenizer(args.seed)
        self.feeder = Feeder(args.seed, args.workers, self.tokenizer)
        num_chunks = max(1, int(args.pool_gb * 1e9 / CHUNK_BYTES))
        self.pool = ClipPool(num_chunks, device)
        torch.manual_seed(args.seed)
        self.trainee = Trainee(build_model(args.init), args.compile).to(device)
        self.optimizer = build_optimizer(self.trainee, args.lr)
        short, whole = WindowShape(args.short_rows, 300, 4, 96), WindowShape(args.whole_rows, 1500, 14, 448)
        self.short, self.whole = WindowMaker(self.pool, short), WindowMaker(self.pool, whole)
        self.heldout = self._draw_heldout((short, whole))
        self.seconds_heard = 0.0
        # The head that names a tick's token is not kept, so who goes on from a checkpoint does without.
        self.short_share, self.frame_weight = (0.0, 0.0) if init else (SHORT_SHARE, FRAME_WEIGHT)

    def run(self) -> dict:
        """Train, and return what was done."""
        self.feeder.start(self.pool, min(self.args.workers, len(self.pool.num_clips)))
        self._warm_up()
        seconds = self.args.minutes * 60 - (time.perf_counter() - self._started)
        progress = Progress(self.args.steps, seconds)
        report = self._reporter(progress)
        for saved in itertools.count(1):
            while progress.share < min(1.0, saved / 5):
                report(self.step(progress))
                progress.step += 1
            if saved == 5:
                break
            self.save(self.args.out, {"unfinished": round(progress.share, 2)})
        self.feeder.close()
        return {
            "steps": progress.step,
            "loop_seconds": round(progress.elapsed, 1),
            "hours_heard": round(self.seconds_heard / 3600, 1),
            "hours_spoken": round(self.pool.num_added * CHUNK_BYTES / 32000 / 3600, 1),
        }

    def step(self, progress: Progress) -> Losses:
        """One batch: losses, gradients, update."""
        self.feeder.poll()
        maker = self.short if progress.share < self.short_share else self.whole
        for group in self.optimizer.param_groups:
            group["lr"] = progress.learning_rate(self.args.lr)
        windows = maker.draw()
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = self.trainee(windows)
        (losses.text + ATTENTION_WEIGHT * losses.attention + self.frame_weight * losses.frames).backward()
        torch.nn.utils.clip_grad_norm_(self.trainee.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds_heard += maker.shape.rows * maker.shape.ticks * 0.02
        return Losses(*(loss.detach() for loss in losses))

    def _warm_up(self) -> None:
        """Run each shape once, so that compiling it takes no time of the schedule."""
        for maker in (self.short, self.whole) if self.short_share else (self.whole,):
            started = time.perf_counter()
            with torch.autocast(self.device.type, torch.bfloat16):
                losses = self.trainee(maker.draw())
            sum(losses).backward()
            self.optimizer.zero_grad(set_to_none=True)
            print(f"warm after {time.perf_counter() - started:.1f}s", flush=True)

    def save(self, folder: Path, report: dict) -> None:
        """The checkpoint in bfloat16 with the tokenizer's files, beside the record of how it was made."""
        model = deepcopy(self.trainee.model).to(torch.bfloat16)
        model.generation_config = GenerationConfig.from_dict(generation_config())
        save_tokenizer(self.tokenizer, folder)
        model.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it its owner's alone
        (folder / "train.json").write_text(json.dumps(report, indent=1) + "\n")

    def _draw_heldout(self, shapes: tuple[WindowShape, ...]) -> list[Windows]:
        pool = ClipPool(1, self.device)
        source = clips(f"heldout:{self.args.seed}", self.tokenizer.backend_tokenizer, heldout=True)
        pool.add(move(next(chunks(source)), self.device))
        makers = (
            WindowMaker(pool, WindowShape(min(64, s.rows), s.ticks, s.max_clips, s.num_tokens))
            for s in shapes
        )
        return [maker.draw() for maker in makers]

    def _reporter(self, progress: Progress) -> Callable[[Losses], None]:
        """Prints means of the losses every few seconds."""
        sums, count, last = torch.zeros(3, device=self.device), 0, 0.0

        def report(losses: Losses) -> None:
            nonlocal count, last
            sums.add_(torch.stack(losses))
            count += 1
            if progress.step == 0 or progress.elapsed - last > 10:
                text, attention, frames = (sums / count).tolist()
                print(
                    f"{progress.step} {progress.elapsed:.0f}s text {text:.4f} attention {attention:.4f} frames "
                    f"{frames:.4f} held out {heldout_errors(self.trainee.model, self.heldout)} "
                    f"heard {self.seconds_heard / 3600:.0f}h spoken {self.pool.num_added} chunks",
                    flush=True,
                )
                sums.zero_()
                count, last = 0, progress.elapsed

        return report


def main() -> None:
    """Make everything from the seed and leave a transformers checkpoint in --out."""
    args = parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(args, device)
    print(f"ready after {time.perf_counter() - started:.1f}s", flush=True)
    report = trainer.run()
    report |= {
        "command": " ".join(["python train.py", *_without_paths(sys.argv[1:])]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in trainer.trainee.model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "workers": args.workers,
    }
    trainer.save(args.out, report)
    print(json.dumps(report, indent=1), flush=True)


def _without_paths(argv: list[str]) -> Iterator[str]:
    """The arguments without the folders' names, which are nobody's business."""
    for before, argument in itertools.pairwise(["", *argv]):
        yield {"--out": "OUT", "--init": "INIT"}.get(before, argument)


if __name__ == "__main__":
    main()
