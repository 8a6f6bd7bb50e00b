"""The grammar mask's kernel against its torch twin and against plain Python."""

import pytest
import torch

from core_runner.sampling.kernels import grammar_mask as op

INF = float("inf")


def masked_by_hand(logits, vocab_size, rows, words):
    want = [row[:] for row in logits]
    for row, mask in zip(rows, words, strict=True):
        for i in range(vocab_size):
            allowed = (mask[i // 32] & 0xFFFFFFFF) >> (i % 32) & 1
            if not allowed and want[row][i] == want[row][i]:
                want[row][i] = -INF
    return want


@pytest.mark.parametrize("kernel", [op.grammar_mask_torch, op.grammar_mask_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 65, 4099])
def test_masks_the_rows_that_have_a_mask_and_nothing_else(device, vocab_size, dtype, kernel):
    generator = torch.Generator().manual_seed(vocab_size)
    padded = torch.randn(7, vocab_size + 3, generator=generator).to(dtype).to(device)
    padded[2, vocab_size // 2] = float("nan")
    padded[0, 0], padded[5, vocab_size - 1] = INF, -INF
    rows = torch.tensor([5, 0, 2], dtype=torch.int32, device=device)
    num_words = -(-vocab_size // 32)
    # Rows of a wider table, and bits past the vocabulary that hold anything.
    table = torch.randint(-(2**31), 2**31, (3, num_words + 2), generator=generator, dtype=torch.int64)
    words = table.to(torch.int32).to(device)[:, :num_words]
    want = masked_by_hand(padded.float().tolist(), vocab_size, rows.tolist(), words.tolist())
    got = padded.clone()
    kernel(got[:, :vocab_size], vocab_size, rows, words)
    torch.testing.assert_close(got.float().cpu(), torch.tensor(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", [op.grammar_mask_torch, op.grammar_mask_triton])
def test_all_and_nothing(device, kernel):
    logits = torch.zeros(2, 40, device=device)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=device)
    words = torch.tensor([[-1, -1], [0, 0]], dtype=torch.int32, device=device)
    kernel(logits, 40, rows, words)
    assert (logits[0] == 0).all()
    assert (logits[1] == -INF).all()


def test_unused_masks_launch_nothing(device, monkeypatch):
    """A batch without a mask never comes near the kernel, whatever else its requests ask for."""
    from core_runner import LLM, SamplingParams
    from core_runner.sampling import sampler

    def refuse(*arguments):
        raise AssertionError("the grammar mask was launched")

    monkeypatch.setattr(sampler, "grammar_mask", refuse)
    llm = LLM(device=str(device), max_num_reqs=2, max_model_len=64, num_blocks=9)
    params = SamplingParams(max_tokens=3, logprobs=1, repetition_penalty=1.2, ignore_eos=True)
    assert len(llm.generate("Once", params)[0].outputs[0].token_ids) == 3
