"""Prompt log-probabilities within a memory figure, or refused with the estimate (field report G-02)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.drained import Drained
from support.toy_model import ToyPlugin, ToyTable, save_toy, weight
from torch.profiler import ProfilerActivity, profile

from core_runner import LLM, ConfigError, NewRequest, RunnerConfig, SamplingParams, SchedulerOutputError

VOCAB_SIZE, NUM_SMALL = 154_880, 50
# What the torch twin needs for one position; a step of 64 tokens would take eight times the figure.
ROW_BYTES = 20 * VOCAB_SIZE
FIGURE = 8 * ROW_BYTES
PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


class WideHead:
    """The logits of a small table, and far below them 154,830 ids that are never the best."""

    def __init__(self) -> None:
        self.table = ToyTable(NUM_SMALL, seed=3)
        self.rest = torch.randn(VOCAB_SIZE - NUM_SMALL, generator=torch.Generator().manual_seed(1)) - 20

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        small = self.table(keys, positions)
        logits = small.new_empty(len(keys), VOCAB_SIZE)
        logits[:, :NUM_SMALL], logits[:, NUM_SMALL:] = small, self.rest
        return logits


class PeakMeter:
    """Wraps a scorer's `score`: bytes of CPU memory at the height of each call that scored something."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks: list[int] = []
        self._score = llm.engine.runner.prompt_scorer.score
        monkeypatch.setattr(llm.engine.runner.prompt_scorer, "score", self._measured)

    def _measured(self, *arguments: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            scored = self._score(*arguments)
        if scored is not None:
            self.peaks.append(_peak(profiled))
        return scored


def _peak(profiled: Any) -> int:
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _prompt(length: int, seed: int) -> list[int]:
    return [(seed + 7 * place) % NUM_SMALL for place in range(length)]


def test_pieces_stay_within_the_figure(
    tmp_path: Path, drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = WideHead()
    llm = drained(
        save_toy(tmp_path / "wide", VOCAB_SIZE),
        plugins=[ToyPlugin(head)],
        device="cpu",
        block_size=8,
        max_num_batched_tokens=64,
        max_num_reqs=7,
        prompt_logprobs_bytes=FIGURE,
    )
    meter = PeakMeter(llm, monkeypatch)
    plain = [_prompt(5 + 3 * i, seed=i) for i in range(5)]
    asking = [_prompt(50, seed=20 + i) for i in range(2)]
    wide = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=20)
    outputs = llm.generate([*plain[:3], *asking, *plain[3:]], [PLAIN] * 3 + [wide] * 2 + [PLAIN] * 2)
    assert meter.peaks
    assert FIGURE / 2 < max(meter.peaks) <= FIGURE
    for prompt, output in zip(asking, outputs[3:5], strict=True):
        assert output.prompt_logprobs[0] is None
        for entry in output.prompt_logprobs[1:]:
            assert set(range(1, 21)) <= {got.rank for got in entry.values()}
        _check_values(head, prompt, output)
    for prompt, output in zip(plain, [*outputs[:3], *outputs[5:]], strict=True):
        assert output.outputs[0].token_ids == head.table.greedy(prompt, 6)
        assert len(output.outputs[0].logprobs) == 6


def _check_values(head: WideHead, prompt: list[int], output: Any) -> None:
    key = 0
    for place, token in enumerate(prompt[:-1]):
        key += token * weight(place)
        logits = head(torch.tensor([key]), torch.tensor([place]))[0]
        entry = output.prompt_logprobs[place + 1]
        for token_id, got in entry.items():
            assert abs(got.logprob - float(logits[token_id] - logits.logsumexp(0))) < 1e-4
        assert prompt[place + 1] in entry


def test_a_result_that_cannot_fit_is_refused_and_neighbours_go_on(tmp_path: Path, drained: Drained) -> None:
    llm = drained(
        save_toy(tmp_path / "long", NUM_SMALL, max_position_embeddings=120_000),
        plugins=[ToyPlugin(ToyTable(NUM_SMALL, seed=3), cached=False)],
        device="cpu",
        max_num_reqs=4,
        prompt_logprobs_result_bytes=512 << 20,
    )
    everything = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=256)
    prompts = [_prompt(6, seed=1), _prompt(100_000, seed=2), _prompt(9, seed=3)]
    alone = llm.generate([prompts[0], prompts[2]], PLAIN)
    outputs = llm.generate(prompts, [PLAIN, everything, PLAIN], on_bad_prompt="return")
    # 99,999 positions: a dict (250 bytes) with an entry (150 bytes) for each of 50 ids and the token itself.
    estimate = 99_999 * (250 + 51 * 150)
    assert "prompt_logprobs=256 for 100000 prompt tokens" in outputs[1].error
    assert f"about {estimate} bytes ({estimate / 2**30:.3g} GiB)" in outputs[1].error
    assert "prompt_logprobs_result_bytes=536870912" in outputs[1].error
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in outputs[::2]]


def test_a_figure_below_one_position_is_named(tmp_path: Path, drained: Drained) -> None:
    options = {"plugins": [ToyPlugin(ToyTable(NUM_SMALL, seed=3))], "device": "cpu"}
    llm = drained(save_toy(tmp_path / "toy", NUM_SMALL), **options, prompt_logprobs_bytes=999)
    asking = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    (refused,) = llm.generate([1, 2], asking, on_bad_prompt="return")
    assert "needs 1000 bytes for the logits of one position" in refused.error
    assert "prompt_logprobs_bytes=999" in refused.error
    # Nothing is scored of a single token.
    assert llm.generate([1], asking)[0].prompt_logprobs == [None]
    with pytest.raises(ConfigError, match="prompt_logprobs_bytes=-1"):
        RunnerConfig(prompt_logprobs_bytes=-1)


def test_a_schedulers_hit_must_not_skip_what_is_to_be_scored(toy_options: dict[str, Any]) -> None:
    runner = LLM(**toy_options).engine.runner
    asking = SamplingParams(prompt_logprobs=1)

    def admission(num_computed_tokens: int, num_scored_tokens: int) -> NewRequest:
        return NewRequest("a", 0, [1] * 9, 9, asking, 0, num_computed_tokens, num_scored_tokens)

    for computed, scored in ((0, 0), (4, 4), (4, 6), (8, 8)):
        runner.prompt_scorer.validate([admission(computed, scored)])
    with pytest.raises(SchedulerOutputError, match=r"num_computed_tokens=4 .* num_scored_tokens=3"):
        runner.prompt_scorer.validate([admission(4, 3)])
