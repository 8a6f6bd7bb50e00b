"""Extensions beside a model state: the order of hooks, the slots they are told, and the sampler they may replace."""

from __future__ import annotations

from typing import Any

import torch
from support.drained import Drained
from support.toy_model import ToyTable

from core_runner import SamplingParams
from model_states import Component, InputBatch, SamplerOutput, hookimpl

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
STEP = [
    "apply_staged_writes",
    "run_encoder",
    "preprocess_state",
    "prepare_attn",
    "prepare_inputs",
    "after_forward",
    "postprocess_state",
]


class Recorder(Component):
    """Writes down every hot hook that it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @hookimpl
    def cache_groups(self):
        self.calls.append(("cache_groups",))

    @hookimpl
    def custom_sampler(self, sampler):
        self.calls.append(("custom_sampler", type(sampler).__name__))

    @hookimpl
    def init_caches(self, caches):
        self.calls.append(
            ("init_caches", {len(t) for g in caches.values() for c in g.values() for t in c.values()})
        )

    @hookimpl
    def add_request(self, slot, request):
        self.calls.append(
            ("add_request", slot, request.req_id, request.prompt_len, len(request.prefill_token_ids))
        )

    @hookimpl
    def remove_request(self, slot, reason):
        self.calls.append(("remove_request", slot, reason))

    @hookimpl
    def apply_staged_writes(self):
        self.calls.append(("apply_staged_writes",))

    @hookimpl
    def preprocess_state(self, batch):
        self.calls.append(("preprocess_state", batch.idx_mapping_np.tolist()))

    @hookimpl
    def run_encoder(self, batch):
        self.calls.append(("run_encoder", batch.idx_mapping_np.tolist()))

    @hookimpl
    def prepare_attn(self, batch):
        self.calls.append(("prepare_attn", batch.idx_mapping_np.tolist()))

    @hookimpl
    def prepare_inputs(self, batch):
        self.calls.append(("prepare_inputs", batch.idx_mapping_np.tolist()))

    @hookimpl
    def after_forward(self, batch, hidden_states):
        assert len(hidden_states) >= batch.num_tokens
        self.calls.append(("after_forward", batch.idx_mapping_np.tolist()))

    @hookimpl
    def postprocess_state(self, batch, num_sampled, num_rejected):
        assert num_sampled.dtype == num_rejected.dtype == torch.int32
        assert not num_rejected.any()
        self.calls.append(("postprocess_state", batch.idx_mapping_np.tolist(), num_sampled.tolist()))


def test_hooks_come_in_the_documented_order(toy_options: dict[str, Any], drained: Drained) -> None:
    recorder = Recorder()
    llm = drained(
        **toy_options, extensions=[recorder], max_num_reqs=2, max_num_batched_tokens=4, num_blocks=9
    )
    assert recorder.calls[:4] == [
        ("cache_groups",), ("custom_sampler", "DefaultSampler"), ("init_caches", {2}), ("init_caches", {9}),
    ]  # fmt: skip
    recorder.calls.clear()
    llm.generate([[1, 2, 3, 4, 5], [6]], GREEDY)
    llm.close()
    calls = recorder.calls
    # Five tokens in steps of four: the first step samples nothing, and the neighbour begins in the second.
    starts = [i for i, call in enumerate(calls) if call[0] == "apply_staged_writes"]
    changes = [calls[end + 7 : start] for end, start in zip([-7, *starts], [*starts, None], strict=False)]
    for start in starts[:-1]:
        assert [call[0] for call in calls[start : start + 7]] == STEP
        assert len({str(call[1]) for call in calls[start + 1 : start + 7]}) == 1, "one batch for all hooks"
    sampled = [call[1:] for call in calls if call[0] == "postprocess_state"]
    (_, a, _, *a_lens), (_, b, _, *b_lens) = changes[0][-1], changes[1][-1]
    assert (a_lens, b_lens) == ([5, 5], [1, 1])
    assert sampled[0] == ([a], [0])
    assert sampled[1] == ([a, b], [1, 1])
    removals = [call for call in calls if call[0] == "remove_request"]
    assert sorted(removals[-2:]) == sorted(
        [("remove_request", a, "finished"), ("remove_request", b, "finished")]
    )


def test_preempted_and_aborted_requests_say_so(
    toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    recorder = Recorder()
    llm = drained(**toy_options, extensions=[recorder], max_num_reqs=3, num_blocks=10)
    prompts = [[i] * 7 for i in (1, 2, 3)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert llm.stats().preemptions > 0
    stream = llm.stream([4, 5], GREEDY)
    next(stream)
    stream.close()
    llm.close()
    held: dict[int, str] = {}
    reasons = []
    for call in recorder.calls:
        if call[0] == "add_request":
            assert call[1] not in held, "a slot is given to one request at a time"
            held[call[1]] = call[2]
            if held[call[1]] in {name for name, _ in reasons}:
                assert call[4] > call[3], "a resumed request brings the tokens that it had made"
        elif call[0] == "remove_request":
            reasons.append((held.pop(call[1]), call[2]))
    assert not held
    assert [reason for _, reason in reasons].count("preempted") == llm.stats().preemptions
    assert reasons[-1][1] == "aborted"


class Worst(Component):
    """Replaces the sampler by one that takes the least likely id."""

    @hookimpl
    def custom_sampler(self, sampler):
        self.default = sampler
        return self

    def sample(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        failed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        return SamplerOutput(token_ids=logits.argmin(1), failed=failed)


class Banning(Component):
    """Wraps the sampler: id 11 is never sampled."""

    @hookimpl
    def custom_sampler(self, sampler):
        self.inner = sampler
        return self

    def sample(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        logits[:, 11] = -torch.inf
        return self.inner.sample(logits, batch)


def test_custom_sampler_replaces_the_default(
    toy_options: dict[str, Any], toy_table: ToyTable, drained: Drained
) -> None:
    llm = drained(**toy_options, extensions=[Worst()])
    upside_down = ToyTable(50, seed=3)
    upside_down.table = -toy_table.table
    upside_down._best = upside_down.table.argmax(1).tolist()
    prompts = [[1, 2, 3], [9] * 8]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    got = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert got == [upside_down.greedy(prompt, 9) for prompt in prompts]


def test_custom_samplers_chain_in_call_order(toy_options: dict[str, Any], drained: Drained) -> None:
    first, second = Banning(), Banning()
    llm = drained(**toy_options, extensions=[first, second])
    assert second.inner is first
    assert type(first.inner).__name__ == "DefaultSampler"
    hot = [SamplingParams(temperature=50.0, seed=s, max_tokens=100, ignore_eos=True) for s in range(8)]
    tokens = {t for o in llm.generate([[i] for i in range(1, 9)], hot) for t in o.outputs[0].token_ids}
    assert 11 not in tokens
    assert len(tokens) == 49, "at such a temperature every other id comes up"
