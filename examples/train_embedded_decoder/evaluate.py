"""Measure a checkpoint on held-out examples with transformers: accuracy by task, held-out loss, samples.

Runs on a GPU or a CPU; writes eval.json into the checkpoint's folder, which card.py makes the card of.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import transformers
from data import batches
from grammar import documents, heldout_examples, shipped_examples, stories, text_prompt
from model import batch_hidden, token_losses
from tasks import CHECKED, Example
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from words import COMMON

SAMPLES = (
    ("Once upon a time", False),
    ("There was once a clever owl named Mira", False),
    ("12 + 30 =", False),
    ("reverse: apple ->", False),
    ("What day comes after Monday?", True),
    ("What is 27 + 48?", True),
    ("Sort these numbers: 41, 7, 23", True),
    ("Write this as JSON: name=Ana, age=31, city=Oslo", True),
    ("What is the capital of France?", True),
    ("Who are you?", True),
    ("Tell me a story about a fox.", True),
    ("Who wrote Hamlet?", True),
)
"""Prompts and whether they are chat; the first ones that a user tries, not chosen by their answers."""


@torch.inference_mode()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_new_tokens: int
) -> list[str]:
    """Greedy completions of one batch, padded on the left."""
    batch = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )
    batch = batch.to(model.device)
    out = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def is_right(example: Example, completion: str) -> bool:
    """Whether a completion is exactly the answer, up to the line's end in text and the turn's in chat."""
    said = completion if example.chat else completion.split("\n")[0]
    return said.strip() == example.answer


def group_of(example: Example) -> str:
    """A finer name where a task hides an easy and a hard half."""
    if example.task == "reverse":
        return "dictionary word" if example.answer[::-1] in COMMON else "made-up word"
    if example.task == "passage":
        question = example.prompt.removesuffix("\nAnswer:").replace("\n", " ").split(". ")[-1]
        return "what colour" if "colour" in question else "who" if "Who" in question else "what"
    return "all"


def task_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, count: int, batch_size: int
) -> dict:
    """Right answers of a task, in text and in chat, and the first few wrong ones."""
    examples = heldout_examples(task, count)
    budget = max(len(tokenizer(e.answer)["input_ids"]) for e in examples) + 6
    completions = [
        completion
        for chunk in _chunks(examples, batch_size)
        for completion in complete(model, tokenizer, [text_prompt(e) for e in chunk], budget)
    ]
    return score(examples, completions)


def score(examples: list[Example], completions: list[str]) -> dict:
    """Shares of right answers, in text and in chat, and the first few wrong ones."""
    right: dict[bool, list[bool]] = {False: [], True: []}
    groups: dict[str, list[bool]] = {}
    wrong = []
    for example, completion in zip(examples, completions, strict=True):
        right[example.chat].append(is_right(example, completion))
        groups.setdefault(group_of(example), []).append(right[example.chat][-1])
        if not right[example.chat][-1]:
            wrong.append([example.prompt[-80:], example.answer, completion.strip()[:80]])
    return {
        "examples": len(examples),
        "accuracy": _share(right[False] + right[True]),
        "text": _share(right[False]),
        "chat": _share(right[True]),
        "groups": {name: [len(values), _share(values)] for name, values in sorted(groups.items())},
        "wrong": wrong[:4],
    }


def _chunks(examples: list[Example], size: int) -> list[list[Example]]:
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def _share(values: list[bool]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, tokenizer: Tokenizer, kind: str, rows: int, batch_size: int) -> dict:
    """Mean cross entropy, nats a token, of the tokens that count in full: answers and stories, or stories."""
    source = stories(10_000, heldout=True) if kind == "stories" else documents(10_000, heldout=True)
    total, counted = 0.0, 0
    for ids, weights in itertools.islice(batches(tokenizer, source, batch_size, 1025), rows // batch_size):
        ids, full = ids.to(model.device).long(), weights.to(model.device)[:, 1:] == 1
        losses = token_losses(batch_hidden(model, ids), model.get_input_embeddings().weight, ids[:, 1:])
        total += losses[full].double().sum().item()
        counted += int(full.sum())
    return {"nats_per_token": round(total / counted, 4), "tokens": counted}


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Greedy completions of the fixed prompts, as a user would get them."""
    out = []
    for prompt, chat in SAMPLES:
        text = prompt
        if chat:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        out.append({"prompt": prompt, "chat": chat, "completion": complete(model, tokenizer, [text], 220)[0]})
    return out


def shipped_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """The rows of heldout.json: what to ask, what is right, and what this model says, one request at a time."""
    return reference_answers(model, tokenizer, shipped_examples())


def reference_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example]
) -> list[dict]:
    """What this model says to each example alone, up to the end of a text's line or a chat's turn."""
    rows = []
    for example in examples:
        budget = len(tokenizer(example.answer)["input_ids"]) + 6
        said = complete(model, tokenizer, [text_prompt(example)], budget)[0]
        said = (said if example.chat else said.split("\n")[0]).strip()
        row = {"task": example.task, "chat": example.chat, "prompt": example.prompt}
        rows.append(row | {"answer": example.answer, "reference": said})
    return rows


def main() -> None:
    """Evaluate the checkpoint in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--examples", type=int, default=200, help="held-out examples a task")
    parser.add_argument(
        "--loss-rows", type=int, default=128, help="rows of 1024 tokens for each held-out loss"
    )
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="default: eval.json in the checkpoint's folder")
    args = parser.parse_args()
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (
        AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype))
        .to(device)
        .eval()
    )
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    raw_tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    report: dict = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "tasks": {},
        "loss": {},
    }
    for kind in ("documents", "stories"):
        report["loss"][kind] = heldout_loss(model, raw_tokenizer, kind, args.loss_rows, 16)
    print(report["loss"], flush=True)
    for task in CHECKED:
        result = report["tasks"][task] = task_accuracy(model, tokenizer, task, args.examples, args.batch_size)
        print(
            f"{task:14s} {result['accuracy']:.3f} text {result['text']:.3f} chat {result['chat']:.3f}",
            flush=True,
        )
        print("    " + "\n    ".join(map(str, result["wrong"][:2])), flush=True)
    report["heldout"] = shipped_answers(model, tokenizer)
    report["samples"] = sample(model, tokenizer)
    report["seconds"] = round(time.perf_counter() - started, 1)
    (args.out or args.checkpoint / "eval.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in report["samples"]:
        print(f"> {row['prompt']}\n{row['completion']}", flush=True)


if __name__ == "__main__":
    main()
