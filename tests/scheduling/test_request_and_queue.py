"""Requests as given, and the order of those that wait."""

from __future__ import annotations

import numpy as np
import pytest

from core_runner.errors import QueueFullError, RequestError
from core_runner.request import Request, RequestStatus
from core_runner.sampling_params import SamplingParams
from core_runner.scheduling.queue import WaitingQueue


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int64), range(1, 4)])
def test_prompt_becomes_int32(ids):
    request = Request("r", ids, SamplingParams())
    assert request.prompt_token_ids.dtype == np.int32
    assert request.prompt_token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ids", [[1.5, 2], [[1, 2], [3, 4]], ["a"], [-1, 2], [2**31], [True, False]])
def test_bad_prompt_is_refused(ids):
    with pytest.raises(RequestError, match="'r'"):
        Request("r", ids, SamplingParams())


def test_token_ids_cross_the_end_of_the_prompt():
    request = Request("r", [1, 2, 3], SamplingParams())
    request.output_token_ids += [4, 5]
    whole = [1, 2, 3, 4, 5]
    for start in range(6):
        for stop in range(start, 6):
            assert request.token_ids(start, stop).tolist() == whole[start:stop]
            assert request.token_ids(start, stop).dtype == np.int32
    assert request.token_ids().tolist() == whole


def test_seed():
    assert Request("r", [1], SamplingParams(seed=5)).seed == 5
    assert Request("r", [1], SamplingParams(seed=5), seed=6).seed == 6
    drawn = {Request("r", [1], SamplingParams()).seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_status():
    request = Request("r", [1], SamplingParams())
    assert request.finish_reason is None
    assert not request.is_finished
    for status in RequestStatus:
        request.status = status
        assert request.is_finished == status.name.startswith("FINISHED")
        assert request.finish_reason == (status.value if request.is_finished else None)


def queued(arrival, priority=0):
    request = Request(f"r{arrival}", [1], SamplingParams(priority=priority))
    request.arrival, request.rank = arrival, (priority, arrival)
    return request


def test_queue_order_and_discard():
    rng = np.random.default_rng(0)
    queue = WaitingQueue(1000)
    requests = [queued(int(i), int(rng.integers(3))) for i in rng.permutation(300)]
    for request in requests:
        queue.push(request)
    dropped = requests[::3] + requests[1::3]
    for request in dropped:
        queue.discard(request)
    assert len(queue) == 100
    order = [queue.pop() for _ in range(100)]
    assert order == sorted(requests[2::3], key=lambda request: request.rank)
    assert queue.peek() is None


def test_preempted_request_is_never_refused_and_comes_first():
    queue = WaitingQueue(1)
    queue.push(queued(5))
    with pytest.raises(QueueFullError, match="1 requests wait"):
        queue.check_room("r9")
    queue.push(queued(2))
    assert queue.pop().arrival == 2
