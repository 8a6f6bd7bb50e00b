"""How far the engine's greedy tokens are those of transformers, for the same weights.

    python benchmarks/agreement.py --json agreement.json

A token agrees where transformers, given the engine's tokens so far, would choose it too. A gap is how much more
probable its own choice is, in nat of its log-probabilities; rounding to bfloat16 allows some 0.1 with random weights,
whose best ids lie closer together than a trained model's. transformers itself runs in the engine's dtype and in
float32. The prompts are asked one at a time and all at once: few rows and many go through other kernels.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import MODELS, Report, greedy, make_parser, open_llm, run_script, show_table
from plots import barh_panels
from transformers import AutoConfig, AutoModelForCausalLM

from core_runner import LLM

# prompts, tokens of each, tokens that are generated, by --small
SIZES = {False: (64, 96, 64), True: (6, 9, 5)}


def oracle(llm: LLM, dtype: torch.dtype) -> Any:
    """transformers' model with the engine's weights and its own attention."""
    state = llm.engine.runner.model_state
    config = AutoConfig.from_pretrained(str(state.config.checkpoint.model))
    with torch.device(state.config.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(state.model.model.state_dict(), strict=False)  # type: ignore[attr-defined]
    return model.eval()


@torch.inference_mode()
def compare(model: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> dict[str, Any]:
    """Tokens that `model` would have chosen too, and the gaps of the others."""
    gaps: list[float] = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + tokens], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps += (logprobs.amax(-1) - chosen).tolist()
    return {"tokens": len(gaps), "same": sum(gap == 0.0 for gap in gaps), "largest_gap_nat": max(gaps)}


def measure(args: argparse.Namespace) -> Report:
    """Every way of asking, against every oracle."""
    count, length, num_tokens = SIZES[args.small]
    draw, vocab_size = random.Random(99), MODELS[args.model]["vocab_size"]
    prompts = [[draw.randrange(100, vocab_size - 1000) for _ in range(length)] for _ in range(count)]
    results = []
    with open_llm(args.model, args.small) as llm:
        outputs = {"all at once": llm.generate(prompts, greedy(num_tokens))}
        outputs["one at a time"] = [llm.generate(prompt, greedy(num_tokens))[0] for prompt in prompts]
        for dtype in dict.fromkeys([llm.engine.runner.model_state.config.dtype, torch.float32]):
            model = oracle(llm, dtype)
            for way, given in outputs.items():
                tokens = [output.outputs[0].token_ids for output in given]
                results.append({"asked": way, "oracle": str(dtype)[6:], **compare(model, prompts, tokens)})
            del model
    return {"results": results}


def show(report: Report) -> None:
    """Ways of asking down, figures across."""
    names = ("asked", "oracle", "tokens", "same", "largest_gap_nat")
    show_table("greedy tokens", names, [[r[name] for name in names] for r in report["results"]])


def plot(report: Report, path: Path) -> None:
    """The share of tokens that agree."""
    shares = {f"{r['asked']}, {r['oracle']}": 100 * r["same"] / r["tokens"] for r in report["results"]}
    barh_panels(path, "Greedy tokens that transformers chooses too", {"": shares}, "%")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    run_script(make_parser(__file__, __doc__), argv, measure, show, plot)


if __name__ == "__main__":
    main()
