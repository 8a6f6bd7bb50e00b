"""Train the embedded hybrid from nothing on the embedded decoder's text and tokenizer; one GPU, a few minutes.

The loop is the decoder's. The tokenizer's files are copied from the embedded decoder, so both speak the same ids.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import paths
import torch
import transformers
from data import TrainingStream
from distant import hybrid_documents
from hybrid_model import TRAINING_CHUNK, build_model
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from train import Progress, command, train
from transformers import BambaForCausalLM, PreTrainedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def parse_args() -> argparse.Namespace:
    """The command line; its defaults are the ones that trained the shipped checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=5.3, help="time of the training loop")
    parser.add_argument("--steps", type=int, help="steps of the training loop, instead of --minutes")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--row-len", type=int, default=2048, help=f"a multiple of {TRAINING_CHUNK}")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2 - 1))
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def training_loader(tokenizer: Tokenizer, args: argparse.Namespace) -> DataLoader:
    """Batches of the hybrid's documents, one token longer than a row; workers take turns in a fixed order."""
    stream = TrainingStream(tokenizer.to_str(), args.seed, args.rows, args.row_len + 1, hybrid_documents)
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=8 if args.workers else None,
        pin_memory=torch.cuda.is_available(),
    )


class Saver:
    """Writes the checkpoint in bfloat16, also while training goes on: a run that is cut short leaves the last one."""

    def __init__(self, model: PreTrainedModel, folder: Path, seconds: float) -> None:
        self.model, self.folder, self.seconds = model, folder, seconds
        self.saved = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        for file in TOKENIZER_FILES:
            shutil.copyfile(paths.DECODER_MODEL / file, folder / file)

    def after_step(self, _: Progress) -> None:
        """Save if it is time to."""
        if time.perf_counter() - self.saved > self.seconds:
            self.save()

    def save(self) -> None:
        """Save a copy, whose mixers are transformers' own."""
        copy = BambaForCausalLM(self.model.config).to(torch.bfloat16)
        copy.load_state_dict(self.model.state_dict())
        copy.generation_config = self.model.generation_config
        copy.save_pretrained(self.folder)
        (self.folder / "model.safetensors").chmod(0o644)  # safetensors makes it its owner's alone
        self.saved = time.perf_counter()


def main() -> None:
    """Make everything from the seed and leave a transformers checkpoint in --out."""
    args = parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(paths.DECODER_MODEL / "tokenizer.json"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(tokenizer, device)
    saver = Saver(model, args.out, args.save_every)
    report = train(model.train(), training_loader(tokenizer, args), args, saver.after_step)
    saver.save()
    report |= {
        "command": command(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "workers": args.workers,
        "row_len": args.row_len,
    }
    (args.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1), flush=True)


if __name__ == "__main__":
    main()
