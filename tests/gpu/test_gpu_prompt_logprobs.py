"""Prompt log-probabilities of long prompts stay within a memory figure on a GPU (field report G-02)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drained import Drained
from support.tiny_models import save_tiny

from core_runner import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu
VOCAB_SIZE, NUM_LONG, LONG = 154_880, 4, 6_000
# A tenth of what the fp32 logits of 1,024 positions would take.
FIGURE = 64 << 20
PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def _prompts(draw: random.Random, count: int, length: int) -> list[list[int]]:
    return [draw.choices(range(3, VOCAB_SIZE), k=length - i) for i in range(count)]


def test_four_long_prompts_stay_within_the_figure(tmp_path: Path, drained: Drained) -> None:
    model = save_tiny("llama", tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=8192)
    options = {
        "max_num_reqs": 16,
        "max_model_len": 6_016,
        "max_num_batched_tokens": 1_024,
        "num_blocks": 3_000,
    }
    llm = drained(
        str(tmp_path), device="cuda", dtype="float32", block_size=16, prompt_logprobs_bytes=FIGURE, **options
    )
    draw = random.Random(5)
    ordinary = _prompts(draw, 5, 40)
    alone = [output.outputs[0].token_ids for output in llm.generate(ordinary, PLAIN)]
    peaks = {}
    for num_best in (None, 20):
        asking = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=num_best)
        params = [PLAIN] * 3 + [asking] * NUM_LONG + [PLAIN] * 2
        for _ in range(2):  # the second time, kernels are loaded and the shapes of these steps are recorded
            long = _prompts(draw, NUM_LONG, LONG)
            outputs, peaks[num_best] = _peak(llm, [*ordinary[:3], *long, *ordinary[3:]], params)
        assert [o.outputs[0].token_ids for o in (*outputs[:3], *outputs[3 + NUM_LONG :])] == alone
    extra = peaks[20] - peaks[None]
    # The logits of a piece alone take half of the figure: less would say that nothing was measured.
    assert FIGURE // 4 < extra <= FIGURE, f"{extra >> 20} MiB more than without prompt log-probabilities"
    for prompt, output in zip(long, outputs[3 : 3 + NUM_LONG], strict=True):
        _check(model.to("cuda"), prompt, output)


def _peak(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[RequestOutput], int]:
    """The outputs, and the most device memory that tensors took beyond what they took before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = llm.generate(prompts, params)
    return outputs, torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def _check(model: Any, prompt: list[int], output: RequestOutput) -> None:
    """One entry a token, with the token in it; the last ones are transformers'."""
    first, *entries = output.prompt_logprobs
    assert first is None
    assert len(entries) == len(prompt) - 1
    for token, entry in zip(prompt[1:], entries, strict=True):
        assert token in entry
        assert set(range(1, 21)) <= {got.rank for got in entry.values()}
    hidden_states = model.model(torch.tensor([prompt], device=model.device)).last_hidden_state[0, -9:-1]
    logprobs = torch.log_softmax(model.lm_head(hidden_states).float(), -1).cpu()
    for want, entry in zip(logprobs, entries[-8:], strict=True):
        for token, got in entry.items():
            assert abs(got.logprob - float(want[token])) < 1e-3
