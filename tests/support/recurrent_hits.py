"""Prefix hits of models with recurrent state: what every such model must show, whatever its states are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.test_pairwise import OPTIONS, PLAIN, Matrix
from support.drained import Drained
from support.phases import pushing_out
from support.recurrent_exact import TinyRecurrent
from support.reference import assert_exact
from support.replays import replayed_steps
from support.tiny_recurrent import retraced_reference
from support.whole_steps import mixed_replays, ways_since

from core_runner import LLM, SamplingParams
from model_states.components import RecurrentState

SIZES = {
    "device": "cpu",
    "block_size": 16,
    "max_num_reqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


def random_prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 211) for _ in range(length)]


def hits_llm(drained: Drained, model: TinyRecurrent, **options: Any) -> LLM:
    """An engine whose states are saved every 16 tokens, unless the options say otherwise."""
    return drained(model.directory, **{**SIZES, "model_options": {"state_block_size": 16}, **options})


def cached_tokens(llm: LLM, model: TinyRecurrent, *prompts: list[int]) -> list[int]:
    """Serve the prompts together, compare each with its reference, and say how much of each was a hit."""
    outputs = llm.generate(list(prompts), GREEDY)
    skipped = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        want = model.reference(prompt, GREEDY.max_tokens)
        skipped += assert_exact(output.outputs[0], want, f"{len(prompt)} tokens")
    assert skipped <= GREEDY.max_tokens, f"{skipped} positions had too small a margin to compare"
    return [output.num_cached_tokens for output in outputs]


def check_remainders(model: TinyRecurrent, drained: Drained, lengths: Sequence[tuple[int, int]]) -> None:
    """Prompts that share 16 n + t tokens hit 16 n of them, for every (n, t)."""
    llm = hits_llm(drained, model, num_blocks=120)
    for n, t in lengths:
        shared = random_prompt(16 * n + t, seed=17 * n + t)
        # A fork at every length, then the first again.
        prompts = [[*shared, *random_prompt(k, seed=k)] for k in (1, 2, 7)]
        hits = [cached_tokens(llm, model, prompt)[0] for prompt in [*prompts, prompts[0]]]
        assert hits == [0, 16 * n, 16 * n, (16 * n + t) // 16 * 16]


def check_tails(model: TinyRecurrent, llm: LLM) -> None:
    """Field report C-03: A's last chunk has t tokens behind 16 n others, in a step that may look like a decode step;
    B hits the state behind those 16 n. Both are exact, out of recorded steps, for every t.

    llm: takes 16 tokens a step, and saves a state every 16.
    """
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    before, mixed, skipped = llm.stats().step_ways, mixed_replays(llm), 0
    for n in (1, 3):
        for t in range(1, 13):
            a = random_prompt(16 * n + t, seed=100 * n + t)
            b = [*a[: 16 * n], *random_prompt(5, seed=7)]
            for prompt, hit in ((a, 0), (b, 16 * n)):
                (output,) = llm.generate(prompt, params)
                (got,) = output.outputs
                want = retraced_reference(model.model, prompt, got.token_ids)
                skipped += assert_exact(got, want, f"n = {n}, t = {t}, {hit} tokens from the cache")
                assert output.num_cached_tokens == hit
    assert skipped <= params.max_tokens, f"{skipped} positions had too small a margin to compare"
    ways = ways_since(llm, before)
    assert ways["step graph"] > 2 * 12 * 2 * 5, ways
    assert mixed_replays(llm) - mixed > 2 * 12, "tails of several tokens are replayed too"


def check_equal_bits(model: TinyRecurrent, drained: Drained) -> None:
    """Chunks end at the same places with a hit and without, so the same numbers are added in the same order."""
    llm = hits_llm(drained, model, num_blocks=60, max_num_batched_tokens=16)
    prompt = random_prompt(40, seed=9)
    miss, hit = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 32)
    assert miss.outputs[0].logprobs == hit.outputs[0].logprobs


def check_evictions(model: TinyRecurrent, drained: Drained, rounds: int) -> None:
    """With room for few states some prompts hit and some do not, and nothing else is lost; the null row stays zero."""
    llm = hits_llm(drained, model, num_blocks=14)
    draw, hits = random.Random(1), 0
    families = [random_prompt(50, seed=seed) for seed in range(4)]
    for _ in range(rounds):
        prompts = [
            [
                *draw.choice(families)[: draw.randrange(5, 50)],
                *random_prompt(draw.randrange(1, 9), draw.randrange(99)),
            ]
            for _ in range(3)
        ]
        hits += sum(cached > 0 for cached in cached_tokens(llm, model, *prompts))
    assert rounds // 3 < hits < 3 * rounds
    [states] = [c for c in llm.engine.runner.model_state.components if isinstance(c, RecurrentState)]
    assert not any(pool[0].any() for layer in states.layers for pool in layer.tensors.values())


def check_preempted(model: TinyRecurrent, drained: Drained) -> None:
    """Requests that were pushed out resume from the states that are left of them."""
    llm = hits_llm(drained, model, num_blocks=40)
    with pushing_out(llm.engine, 20) as pushed_out:
        cached_tokens(llm, model, *[random_prompt(length, seed=length) for length in (33, 18, 47)])
    assert len(pushed_out) == 3


class RecurrentMatrix(Matrix):
    """The pairs of features on a model with states, one saved every 4 tokens."""

    def _engine(self, *features: str) -> LLM:
        options = dict(PLAIN)
        for feature in features:
            options |= OPTIONS[feature]
        sizes = {"block_size": 4, "max_num_reqs": 6, "max_model_len": 64, "num_blocks": 100}
        states = {"model_options": {"state_block_size": 4}}
        with replayed_steps():
            return self.drained(self.model.directory, device="cpu", **{**sizes, **states, **options})
