"""EXACT for models with recurrent state: prompts of many lengths, chunks of many sizes, against full recomputation."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.drained import Drained
from support.reference import LOGPROB_TOLERANCE, Reference, assert_exact
from support.tiny_recurrent import recomputed_reference, retraced_reference
from support.whole_steps import check_whole_steps

from core_runner import LLM, SamplingParams
from model_states.components import RecurrentState

LENGTHS = (1, 2, 3, 4, 5, 16, 63, 64, 65)
BUDGETS = (1, 2, 3, 4, 7, 64)
MAX_TOKENS = 4
_draw = random.Random(3)
PROMPTS = [[_draw.randrange(3, 211) for _ in range(length)] for length in (*LENGTHS, 300)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)


class TinyRecurrent:
    """A tiny checkpoint, made by `save(name, directory)`, and its oracle, which computes every reference once."""

    def __init__(self, name: str, directory: Path, save: Callable[[str, Path], Any]) -> None:
        self.name, self.directory = name, str(directory)
        self.model = save(name, directory)
        self._reference = cache(self._compute)

    def reference(self, prompt: Sequence[int], max_tokens: int) -> Reference:
        return self._reference(tuple(prompt), max_tokens)

    def _compute(self, prompt: tuple[int, ...], max_tokens: int) -> Reference:
        return recomputed_reference(self.model, prompt, max_tokens)


def make_llm(drained: Drained, model: TinyRecurrent, budget: int, **options: Any) -> LLM:
    """An engine whose states are saved every 16 tokens, unless the options say otherwise."""
    sizes = {"block_size": 4, "max_num_reqs": 4, "max_model_len": 320, "num_blocks": 400}
    options = {"model_options": {"state_block_size": 16}, **sizes, **options}
    return drained(model.directory, device="cpu", max_num_batched_tokens=budget, **options)


def check_exact(model: TinyRecurrent, llm: LLM, prompts: Sequence[list[int]]) -> None:
    """Serve the prompts together and compare each with its reference."""
    skipped = 0
    for prompt, output in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
        label = f"{model.name}, {len(prompt)} tokens"
        skipped += assert_exact(output.outputs[0], model.reference(prompt, MAX_TOKENS), label)
    assert skipped <= MAX_TOKENS


def check_fused_and_plain(model: TinyRecurrent, whole: bool, drained: Drained) -> None:
    """Fused layers and transformers' own give the reference's tokens; `whole`: all layers are one loop."""
    prompts = [[(7 * i + n) % 200 + 3 for i in range(n)] for n in (1, 9, 30)]
    for fused in (True, False):
        llm = make_llm(
            drained, model, 64, max_num_reqs=3, max_model_len=64, num_blocks=60, fused_layers=fused
        )
        assert (llm.engine.runner.model_state.model.fused is not None) == (fused and whole)
        check_exact(model, llm, prompts)


def check_state_dtype(
    model: TinyRecurrent,
    drained: Drained,
    dtype: torch.dtype,
    state: tuple[str, torch.dtype],
    tolerance: float,
) -> None:
    """States in a dtype other than the weights', read back after every chunk of 8 tokens and every decoded one.

    state: name of the scan's pools, and their dtype. tolerance: of log-probabilities against transformers in `dtype`.
    """
    name, state_dtype = state
    llm = make_llm(
        drained,
        model,
        8,
        dtype=str(dtype).removeprefix("torch."),
        model_options={"state_dtype": str(state_dtype).removeprefix("torch."), "state_block_size": 16},
    )
    [states] = [c for c in llm.engine.runner.model_state.components if isinstance(c, RecurrentState)]
    pools = states.layers[0].tensors
    assert {key: pool.dtype for key, pool in pools.items()} == {"conv": dtype, name: state_dtype}
    prompt = PROMPTS[-2][:40]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    (got,) = llm.generate([prompt], params)[0].outputs
    want = retraced_reference(copy.deepcopy(model.model).to(dtype), prompt, got.token_ids)
    error = max(
        abs(entries[token].logprob - float(row[token]))
        for token, entries, row in zip(got.token_ids, got.logprobs, want.logprobs, strict=True)
    )
    assert error < tolerance
    if dtype == torch.float32:
        assert error > LOGPROB_TOLERANCE, "the rounding of a stored state does not show: it was not read"
    else:
        # Blocks that were handed out and not written yet are poisoned with NaN.
        kept = pools[name][pools[name].isfinite()]
        assert (kept != kept.to(dtype)).any(), "states are rounded to the weights' dtype"


def check_on_gpu(
    name: str, directory: Path, save: Callable[..., Any], sizes: dict[str, Any], drained: Drained
) -> None:
    """Compiled kernels and recorded steps give the tokens of full recomputation, cold and with prefix hits.

    save: writes the checkpoint of `name` with other `sizes`, and gives the model.
    """
    max_tokens, draw = 8, random.Random(11)
    model = save(name, directory, **sizes).to("cuda")
    prompts = [[draw.randrange(3, 211) for _ in range(n)] for n in (1, 3, 17, 64, 80)]
    references = [recomputed_reference(model, prompt, max_tokens) for prompt in prompts]
    options = {"block_size": 16, "max_model_len": 128, "max_num_batched_tokens": 23, "num_blocks": 40}
    states = {"model_options": {"state_block_size": 16}}
    llm = drained(str(directory), device="cuda", dtype="float32", max_num_reqs=4, **options, **states)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    skipped = 0
    for _ in ("cold", "warm"):
        for output, reference in zip(llm.generate(prompts, params), references, strict=True):
            label = f"{name}, {len(output.prompt_token_ids)} tokens"
            skipped += assert_exact(output.outputs[0], reference, label)
    assert skipped <= max_tokens
    # Log-probabilities are computed behind a graph of the forward; without them a graph holds all of a step.
    assert llm.stats().step_ways["forward graph"] > 0
    check_whole_steps(llm, prompts, references, name)


def check_long_prompts(model: TinyRecurrent, drained: Drained, device: str) -> None:
    """Prompts one token longer than a step's budget, among short ones: cold, and with a prefix hit on the long ones.

    model: takes positions up to 2,200.
    """
    budget, max_tokens = 2048, 4
    draw = random.Random(13)
    prompts = [[draw.randrange(3, 211) for _ in range(n)] for n in (budget + 1, 3, 40, budget + 1, 9)]
    llm = drained(
        model.directory,
        device=device,
        dtype="float32",
        block_size=16,
        max_num_reqs=4,
        max_model_len=2200,
        max_num_batched_tokens=budget,
        num_blocks=500,
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    for hit in (0, budget):
        outputs, skipped = llm.generate(prompts, params), 0
        for prompt, output in zip(prompts, outputs, strict=True):
            (got,) = output.outputs
            want = retraced_reference(model.model, prompt, got.token_ids)
            skipped += assert_exact(got, want, f"{model.name}, {len(prompt)} tokens")
            assert output.num_cached_tokens == (hit if len(prompt) > budget else 0)
        assert skipped <= max_tokens, f"{skipped} positions had too small a margin to compare"
