"""Measure the hybrid on held-out examples: accuracy by task, recall by distance, held-out loss, samples.

core-runner answers, on a GPU or a CPU. `--references` adds what transformers says of the examples that are shipped.
Writes eval.json into the checkpoint's folder, or --out, which card_hybrid.py makes the card of.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import paths
import torch
import transformers
from distant import DISTANCES, distant_examples, measured_distance
from evaluate import SAMPLES, heldout_loss, reference_answers, score
from grammar import heldout_examples, shipped_examples, text_prompt
from hybrid_model import TRAINING_CHUNK
from ssd import train_in_chunks
from tasks import CHECKED, Example
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path += [str(paths.ROOT), str(paths.ROOT / "plugins")]  # where core-runner is not installed
from core_runner import LLM, SamplingParams


class Answers:
    """Greedy completions of many prompts by core-runner."""

    def __init__(self, checkpoint: Path, device: str, dtype: str) -> None:
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        sizes = (
            {"max_num_reqs": 128, "num_blocks": 16_385, "max_num_batched_tokens": 8192}
            if device == "cuda"
            else {"max_num_reqs": 16, "max_num_batched_tokens": 1024}
        )
        self.llm = LLM(str(checkpoint), device=device, dtype=dtype, max_model_len=2048, **sizes)

    def complete(self, prompts: list[str], budgets: list[int]) -> list[str]:
        """What is said after each prompt, at most `budgets` tokens of it, without special tokens."""
        ids = [{"prompt_token_ids": self.encode(prompt)} for prompt in prompts]
        params = [SamplingParams(temperature=0.0, max_tokens=budget) for budget in budgets]
        outputs = self.llm.generate(ids, params)
        return [self.tokenizer.decode(list(output.outputs[0].token_ids)) for output in outputs]

    def encode(self, text: str) -> list[int]:
        """Token ids; markup in the text becomes special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def scores(self, sets: dict[str, list[Example]]) -> dict[str, dict]:
        """Each set's shares of right answers; all sets are answered in one go."""
        examples = [example for group in sets.values() for example in group]
        budgets = [len(self.encode(example.answer)) + 6 for example in examples]
        said = iter(self.complete([text_prompt(example) for example in examples], budgets))
        return {name: score(group, [next(said) for _ in group]) for name, group in sets.items()}


def accuracy(answers: Answers, per_task: int, per_distance: int) -> dict:
    """Scores of the tasks by name and of recall by distance."""
    distant = {str(d): distant_examples(d, per_distance) for d in DISTANCES}
    scores = answers.scores({task: heldout_examples(task, per_task) for task in CHECKED} | distant)
    for name, group in distant.items():
        tokens = [measured_distance(answers.tokenizer, example) for example in group]
        scores[name]["tokens"] = [min(tokens), round(sum(tokens) / len(tokens)), max(tokens)]
    for name, result in scores.items():
        print(f"{name:14s} {result['accuracy']:.3f} text {result['text']:.3f} chat {result['chat']:.3f}")
        print("    " + "\n    ".join(map(str, result["wrong"][:2])), flush=True)
    return {
        "tasks": {task: scores[task] for task in CHECKED},
        "distances": {name: scores[name] for name in distant},
    }


def losses(checkpoint: Path, device: str, dtype: str, rows: int) -> dict:
    """Held-out losses through the training forward, which is several times faster than transformers' own."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device).eval()
    train_in_chunks([m.mamba for m in model.model.layers if hasattr(m, "mamba")], TRAINING_CHUNK)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return {kind: heldout_loss(model, tokenizer, kind, rows, 16) for kind in ("documents", "stories")}


def samples(answers: Answers) -> list[dict]:
    """Greedy completions of the decoder's fixed prompts."""
    rows = [{"prompt": prompt, "chat": chat} for prompt, chat in SAMPLES]
    prompts = [text_prompt(Example("", prompt, "", chat, None)) for prompt, chat in SAMPLES]
    said = answers.complete(prompts, [220] * len(rows))
    return [row | {"completion": completion} for row, completion in zip(rows, said, strict=True)]


def references(checkpoint: Path) -> list[dict]:
    """The rows of heldout.json, by transformers in float32: the tasks, and recall at every distance."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = reference_answers(model, tokenizer, shipped_examples())
    for distance in DISTANCES:
        rows += [
            row | {"distance": distance}
            for row in reference_answers(model, tokenizer, distant_examples(distance, 2, seed=1))
        ]
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--examples", type=int, default=200, help="held-out examples a task and a distance")
    parser.add_argument(
        "--loss-rows", type=int, default=128, help="rows of 1024 tokens for each held-out loss"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--references", action="store_true", help="ask transformers too, on a CPU")
    parser.add_argument("--out", type=Path, help="default: eval.json in the checkpoint's folder")
    return parser.parse_args()


def main() -> None:
    """Evaluate the checkpoint in a folder."""
    args = parse_args()
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
    }
    answers = Answers(args.checkpoint, device, args.dtype)
    print(f"loaded: {time.perf_counter() - started:.1f}s", flush=True)
    report |= accuracy(answers, args.examples, args.examples)
    report["samples"] = samples(answers)
    for row in report["samples"]:
        print(f"> {row['prompt']}\n{row['completion']}", flush=True)
    report["loss"] = losses(args.checkpoint, device, args.dtype, args.loss_rows)
    if args.references:
        report["heldout"] = references(args.checkpoint)
    report["seconds"] = round(time.perf_counter() - started, 1)
    (args.out or args.checkpoint / "eval.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report["loss"], f"{report['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
