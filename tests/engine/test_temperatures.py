"""Tiny temperatures through the engine: no overflow, no NaN, no id 0 by default (field report A-02)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.drained import Drained
from support.toy_model import ToyPlugin, save_toy

from core_runner import RequestError, SamplingParams

ROW = [2.875, 2.9551, 11.0625, -2.4473]
TEMPERATURES = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-12, 1e-38, 1e-40, 5e-324]
OPTIONS = [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"logprobs": 2}]
# The fixture's probe has ids up to 9; the ids beyond the report's row are out of reach.
VOCAB_SIZE = 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_take_the_best_id(dtype: torch.dtype, tmp_path: Path, drained: Drained) -> None:
    row = torch.tensor(ROW + [-60.0] * (VOCAB_SIZE - len(ROW)), dtype=dtype)
    plugin = ToyPlugin(lambda keys, positions: row.expand(len(keys), -1), cached=False)
    llm = drained(save_toy(tmp_path, VOCAB_SIZE), plugins=[plugin], device="cpu")
    params = [
        SamplingParams(temperature=t, max_tokens=2, ignore_eos=True, **options)
        for t in TEMPERATURES
        for options in OPTIONS
    ]
    want = torch.log_softmax(row.float(), 0)
    for param, output in zip(params, llm.generate([[1, 2]] * len(params), params), strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == [2, 2], f"{param}"
        assert completion.finish_reason == "length"
        for logprobs in completion.logprobs or ():
            values = {token: entry.logprob for token, entry in logprobs.items()}
            assert values == pytest.approx({2: float(want[2]), 1: float(want[1])}, abs=1e-4)
    llm.generate([3], SamplingParams(temperature=0.0, max_tokens=1))


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(RequestError, match=f"temperature={temperature}"):
        SamplingParams(temperature=temperature)
