"""n completions of a prompt: each as it is alone with its seed, and the prompt computed once for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from support.drained import Drained
from support.phases import pushing_out
from support.toy_model import Listener, ToyPlugin, ToyTable, save_toy, weight

from core_runner import LLM, SamplingParams, TextDelta, completion_seed

if TYPE_CHECKING:
    from core_runner import RequestOutput

BLOCK_SIZE, N, MAX_TOKENS = 4, 5, 9
PROMPT = [7, 3, 11, 20, 6, 41, 9, 2, 30, 31, 5]
OTHER = [4, 4, 19]


def _params(**options: Any) -> SamplingParams:
    base = {"temperature": 0.9, "seed": 42, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**base | options)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = save_toy(tmp_path_factory.mktemp("close"), 50)
    plugins = [ToyPlugin(ToyTable(50, scale=0.3, seed=1))]
    return {"model": directory, "plugins": plugins, "device": "cpu", "block_size": BLOCK_SIZE}


@pytest.fixture(scope="module")
def alone(toy: dict[str, Any]) -> list[list[int]]:
    """The completions of `PROMPT` as requests of their own, one after the other."""
    llm = LLM(**toy, enable_prefix_caching=False, async_scheduling=False)
    return [_tokens(llm.generate(PROMPT, _params(seed=completion_seed(42, i)))[0])[0] for i in range(N)]


def _tokens(output: RequestOutput) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


@contextmanager
def counting_tokens(llm: LLM) -> Iterator[list[int]]:
    """The tokens of each step that is scheduled."""
    schedule, counts = llm.engine.scheduler.schedule, []

    def counted() -> Any:
        step = schedule()
        counts.append(0 if step is None else step.output.total_num_tokens)
        return step

    with patch.object(llm.engine.scheduler, "schedule", counted):
        yield counts


def test_seeds_are_what_is_documented() -> None:
    assert [completion_seed(seed, 0) for seed in (0, 42, -7)] == [0, 42, -7]
    # The first outputs of SplitMix64 from state 0, as published with it, without their lowest bit.
    assert completion_seed(0, 1) == 0xE220A8397B1DCDAF >> 1
    assert completion_seed(0, 2) == 0x6E789E6AA1B965F4 >> 1
    assert completion_seed(-1, 3) == completion_seed(2**63 - 1, 3)
    assert len({completion_seed(seed, i) for seed in range(30) for i in range(30)}) == 900


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("budget", [3, 16, 2048])
@pytest.mark.parametrize("prefix", [False, True])
def test_each_is_as_alone_and_the_prompt_is_computed_once(
    prefix: bool, budget: int, is_async: bool, toy: dict[str, Any], alone: list[list[int]], drained: Drained
) -> None:
    llm = drained(
        **toy,
        max_num_batched_tokens=budget,
        max_num_reqs=8,
        enable_prefix_caching=prefix,
        async_scheduling=is_async,
    )
    with counting_tokens(llm) as counts:
        (output,) = llm.generate(PROMPT, _params(n=N))
    assert _tokens(output) == alone
    assert len({tuple(ids) for ids in alone}) == N
    assert all(len(completion.logprobs) == MAX_TOKENS for completion in output.outputs)
    shared = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    own = len(PROMPT) - shared + MAX_TOKENS - 1
    assert sum(counts) == shared + N * own
    assert output.num_cached_tokens == 0
    # Without prefix caching no other request gets the blocks, and no other group either.
    with counting_tokens(llm) as counts:
        repeated = llm.generate(PROMPT, [_params(n=2)])[0]
    assert _tokens(repeated) == alone[:2]
    assert repeated.num_cached_tokens == (shared if prefix else 0)
    assert sum(counts) == (0 if prefix else shared) + 2 * own


def test_several_prompts_and_more_completions_than_slots(
    toy: dict[str, Any], alone: list[list[int]], drained: Drained
) -> None:
    llm = drained(**toy, max_num_reqs=3, max_waiting=2)
    outputs = llm.generate([PROMPT, OTHER, PROMPT], [_params(n=N), _params(), _params(n=2)])
    assert [_tokens(output) for output in outputs[::2]] == [alone, alone[:2]]
    assert outputs[1].outputs[0].token_ids == llm.generate(OTHER, _params())[0].outputs[0].token_ids
    assert [output.request_id for output in outputs] == ["request-1", "request-2", "request-3"]


def test_unseeded_completions_draw_their_own_seeds(toy: dict[str, Any], drained: Drained) -> None:
    runs = []
    for _ in range(2):
        llm = drained(**toy, seed=5)
        runs += [_tokens(llm.generate(PROMPT, _params(seed=None, n=4))[0]) for _ in range(2)]
    assert runs[:2] == runs[2:], "RunnerConfig.seed decides them"
    assert len({tuple(ids) for run in runs[:2] for ids in run}) == 8


def test_greedy_completions_are_equal(toy: dict[str, Any], drained: Drained) -> None:
    first, second, third = _tokens(drained(**toy).generate(PROMPT, _params(temperature=0, n=3))[0])
    assert first == second == third


def _by_completion(deltas: list[TextDelta], index: int) -> list[TextDelta]:
    return [delta for delta in deltas if delta.index == index]


def test_streams_carry_the_index(toy: dict[str, Any], alone: list[list[int]], drained: Drained) -> None:
    llm = drained(**toy, max_num_reqs=3)
    deltas = list(llm.stream([OTHER, PROMPT], [_params(max_tokens=2), _params(n=N)]))
    of_prompt = [delta for delta in deltas if delta.request_index == 1]
    for index in range(N):
        own = _by_completion(of_prompt, index)
        assert [token for delta in own for token in delta.token_ids] == alone[index]
        assert [delta.finish_reason for delta in own] == [None] * (MAX_TOKENS - 1) + ["length"]
    assert [delta.output is not None for delta in of_prompt] == [False] * (len(of_prompt) - 1) + [True]
    assert _tokens(of_prompt[-1].output) == alone


def test_each_ends_at_its_own_stop(toy: dict[str, Any], alone: list[list[int]], drained: Drained) -> None:
    stops = {alone[1][3], alone[3][0]}
    (output,) = drained(**toy).generate(PROMPT, _params(n=N, stop_token_ids=sorted(stops)))
    for ids, completion in zip(alone, output.outputs, strict=True):
        cut = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        assert completion.token_ids == ids[:cut]
        assert completion.finish_reason == ("stop" if ids[cut - 1] in stops else "length")
    assert len({len(completion.token_ids) for completion in output.outputs}) > 1


def test_stop_strings_cut_each_text(drained: Drained) -> None:
    llm = drained(device="cpu")
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "ignore_eos": True}
    (whole,) = llm.generate("Once upon a time", SamplingParams(**params, n=3))
    stop = whole.outputs[1].text[7:10]
    deltas = list(llm.stream("Once upon a time", SamplingParams(**params, n=3, stop=stop)))
    (output,) = [delta.output for delta in deltas if delta.output is not None]
    for before, after in zip(whole.outputs, output.outputs, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert (after.stop_reason == stop) == (stop in before.text)
        assert "".join(delta.text for delta in _by_completion(deltas, after.index)) == after.text
    assert output.outputs[1].finish_reason == "stop"


@pytest.mark.parametrize("num_deltas", [1, 4, 12])
@pytest.mark.parametrize("is_async", [False, True])
def test_closing_the_stream_aborts_all(
    is_async: bool, num_deltas: int, toy: dict[str, Any], drained: Drained
) -> None:
    """After one delta the prompt of the group is not computed yet, and its completions wait."""
    llm = drained(**toy, max_num_batched_tokens=4, max_num_reqs=3, async_scheduling=is_async)
    stream = llm.stream([[5], PROMPT], [_params(), _params(n=N)])
    assert len([next(stream) for _ in range(num_deltas)]) == num_deltas
    assert llm.stats().running + llm.stats().waiting >= 3
    stream.close()
    assert llm.stats().running + llm.stats().waiting == 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("length", [1, len(PROMPT) + 1, len(PROMPT) + 4])
def test_preemption(
    length: int,
    prefix: bool,
    is_async: bool,
    toy: dict[str, Any],
    alone: list[list[int]],
    drained: Drained,
) -> None:
    """Each is pushed out once; with length 1 the first one is, before it has computed the prompt."""
    llm = drained(
        **toy,
        max_num_batched_tokens=6,
        enable_prefix_caching=prefix,
        async_scheduling=is_async,
        num_blocks=20,
    )
    with pushing_out(llm.engine, length) as pushed_out:
        (output,) = llm.generate(PROMPT, _params(n=N))
    assert len(pushed_out) >= N - 1
    assert _tokens(output) == alone


def test_pool_for_two_at_a_time(toy: dict[str, Any], alone: list[list[int]], drained: Drained) -> None:
    llm = drained(**toy, num_blocks=9)
    assert _tokens(llm.generate(PROMPT, _params(n=N))[0]) == alone
    assert llm.stats().preemptions > 0


def test_model_inputs_are_shared_within_the_group_alone(
    toy: dict[str, Any], alone: list[list[int]], drained: Drained
) -> None:
    llm = drained(**toy, extensions=[Listener()])
    prompt = {"prompt_token_ids": PROMPT, "model_inputs": {"audio": 1}}
    for _ in range(2):
        with counting_tokens(llm) as counts:
            assert _tokens(llm.generate(prompt, _params(n=N))[0]) == alone
        assert sum(counts) == 8 + N * (3 + MAX_TOKENS - 1)


def test_a_model_that_cannot_share_computes_each(
    toy: dict[str, Any], alone: list[list[int]], drained: Drained
) -> None:
    plugin = ToyPlugin(ToyTable(50, scale=0.3, seed=1))
    plugin.state.capabilities = frozenset({"chunked_prefill"})
    llm = drained(**toy | {"plugins": [plugin]})
    with counting_tokens(llm) as counts:
        assert _tokens(llm.generate(PROMPT, _params(n=N))[0]) == alone
    assert sum(counts) == N * (len(PROMPT) + MAX_TOKENS - 1)


def test_one_that_fails_leaves_the_others(tmp_path: Path, drained: Drained) -> None:
    """A completion that samples the poisoned id gets NaN and ends; the others do not."""
    table = ToyTable(50, scale=0.3, seed=1)
    options: dict[str, Any] = {"model": save_toy(tmp_path / "toy", 50), "device": "cpu", "block_size": 4}
    whole = _tokens(LLM(**options, plugins=[ToyPlugin(table)]).generate(PROMPT, _params(n=N))[0])
    bad = whole[2][1]

    class Poisoned(ToyTable):
        def __call__(self, keys: Any, positions: Any) -> Any:
            logits = super().__call__(keys, positions).clone()
            logits[keys == bad_key] = float("nan")
            return logits

    bad_key = sum(token * weight(place) for place, token in enumerate([*PROMPT, *whole[2][:2]]))
    llm = drained(**options, plugins=[ToyPlugin(Poisoned(50, scale=0.3, seed=1))])
    (output,) = llm.generate(PROMPT, _params(n=N))
    reasons = [completion.finish_reason for completion in output.outputs]
    assert reasons == ["length", "length", "error", "length", "length"]
    assert output.outputs[2].token_ids == [whole[2][0], bad]
    assert "NaN" in output.error
    assert _tokens(output)[:2] == whole[:2]


def test_prompt_logprobs_are_computed_once_for_all(toy: dict[str, Any], drained: Drained) -> None:
    llm = drained(**toy, max_num_batched_tokens=5)
    with counting_tokens(llm) as counts:
        (output,) = llm.generate(PROMPT, _params(n=N, prompt_logprobs=2))
    (single,) = llm.generate(PROMPT, _params(prompt_logprobs=2))
    assert output.prompt_logprobs == single.prompt_logprobs
    assert [
        entry and token in entry for entry, token in zip(output.prompt_logprobs, PROMPT, strict=True)
    ] == [None] + [True] * (len(PROMPT) - 1)
    assert sum(counts) == 8 + N * (3 + MAX_TOKENS - 1)
