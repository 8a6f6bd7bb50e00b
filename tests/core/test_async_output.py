"""`AsyncOutput`: what each step sampled, whenever it is read, from memory that serves step after step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core_runner.async_output import AsyncOutput, OutputBuffers
from model_states import SamplerOutput

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _batch(*num_logits: int) -> SimpleNamespace:
    ends = np.cumsum([0, *num_logits]).astype(np.int32)
    return SimpleNamespace(num_reqs=len(num_logits), num_logits=int(ends[-1]), cu_num_logits_np=ends)


def _sampled(ids: list[int], failed: list[int], device: str) -> SamplerOutput:
    is_failed = torch.zeros(len(ids), dtype=torch.bool, device=device)
    is_failed[failed] = True
    return SamplerOutput(torch.tensor(ids, device=device), is_failed)


def _buffers(device: str) -> OutputBuffers | None:
    return OutputBuffers(torch.device(device), 8) if device == "cuda" else None


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_read_in_any_order_and_twice(device: str) -> None:
    buffers = _buffers(device)
    sampled = _sampled([0] * 5, [], device)  # two rows of padding; a graph's replays overwrite it
    for turn in range(3):
        outputs = []
        for step in range(4):
            if outputs:
                outputs[-1].release()
            sampled.token_ids.copy_(torch.arange(5) + 100 * turn + 10 * step)
            sampled.failed.copy_(torch.arange(5) == step)
            outputs.append(AsyncOutput(_batch(1, 1, 1), sampled, 1, buffers))  # type: ignore[arg-type]
        for step in (2, 0, 3, 1, 0, 2):
            output = outputs[step].get_output()
            want = [[100 * turn + 10 * step + row] for row in range(3)]
            assert output.sampled_token_ids.tolist() == want
            assert output.failed.tolist() == [row == step for row in range(3)]
            assert output.num_sampled.tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_several_tokens_and_of_none(device: str) -> None:
    sampled = _sampled([5, 6, 7, 8, 9], [1], device)
    output = AsyncOutput(_batch(2, 0, 1), sampled, 3, _buffers(device)).get_output()  # type: ignore[arg-type]
    assert output.sampled_token_ids.tolist() == [[5, 6, 0], [0, 0, 0], [7, 0, 0]]
    assert output.failed.tolist() == [True, False, False]
    assert output.num_sampled.tolist() == [2, 0, 1]


@pytest.mark.gpu
def test_a_buffer_serves_again_once_its_output_is_read() -> None:
    buffers = OutputBuffers(torch.device("cuda"), 8)
    sampled = _sampled([1, 2], [], "cuda")
    first, second = (AsyncOutput(_batch(1, 1), sampled, 1, buffers) for _ in range(2))  # type: ignore[arg-type]
    first.get_output()
    buffer = buffers.take()
    assert buffers.take() is not buffer, "nobody has read the second one"
    buffers.give_back(buffer)
    second.get_output()
    second.get_output()
    kept = buffers.take()
    assert {kept, buffers.take()} >= {buffer}
    assert buffers.take() not in (kept, buffer)
