"""`gumbel_argmax`: the Triton kernel against its torch twin, ties, and rows that fail alone."""

import pytest
import torch
from sampling_reference import GARBAGE, make_rows

from core_runner.sampling.kernels import gumbel_argmax as op
from core_runner.sampling.kernels import ladder as ladder_module
from core_runner.sampling.kernels.group_maxima import group_maxima_torch
from core_runner.sampling.kernels.groups import PART, new_groups
from core_runner.sampling.kernels.ladder import new_ladder
from core_runner.sampling.kernels.noise import (
    DRAFT,
    TARGET,
    exponential_torch,
    group_noise_torch,
    noise_words_torch,
)
from core_runner.sampling_params import SamplingParams

TEMPERATURES = [0.0, 0.7, 1.0, 5.0, 0.0, 1e30]
SEEDS = [1, 42, -5, 2**63 - 1, 3, -(2**63)]
POSITIONS = [1, 2**16 + 9, 12, 2**20, 4, 1]


def rows_on(device, **filters):
    return make_rows(
        [SamplingParams(temperature=t, **filters) for t in TEMPERATURES], POSITIONS, device, SEEDS
    )


def padded_logits(vocab_size, dtype, device, generator_seed=0):
    """Six strided rows whose columns beyond the vocabulary would win, between rows of NaN."""
    generator = torch.Generator().manual_seed(generator_seed)
    storage = torch.full((6, 2, vocab_size + 5), float("nan"))
    storage[:, 0, :vocab_size] = 3 * torch.randn(6, vocab_size, generator=generator)
    storage[:, 0, vocab_size:] = 1e4
    return storage.to(dtype).to(device)[:, 0]


def run(kernel, logits, vocab_size, rows, purpose=TARGET, ladder=None):
    n = len(logits)
    token_ids = torch.full((n,), GARBAGE, device=logits.device)
    failed = torch.ones(n, dtype=torch.bool, device=logits.device)
    if kernel is op.gumbel_argmax_torch:
        kernel(logits, vocab_size, rows, purpose, token_ids, failed, ladder)
    else:
        groups = new_groups(logits, vocab_size, filters=ladder is not None)
        group_maxima_torch(logits, vocab_size, rows, purpose, groups)
        chosen = torch.full_like(groups.other_bounds, GARBAGE, dtype=torch.int32)
        kernel(logits, vocab_size, rows, purpose, groups, token_ids, failed, chosen, ladder)
    return token_ids, failed


def both(logits, *args, **kwargs):
    given = logits.clone()
    expected = run(op.gumbel_argmax_torch, logits, *args, **kwargs)
    got = run(op.gumbel_argmax_triton, logits, *args, **kwargs)
    torch.testing.assert_close(logits, given, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 1000, 1025])
def test_twins_agree(device, vocab_size, dtype):
    logits = padded_logits(vocab_size, dtype, device)
    token_ids, failed = both(logits, vocab_size, rows_on(device))
    assert not failed.any()
    assert int(token_ids.max()) < vocab_size
    greedy = logits[:, :vocab_size].float().argmax(dim=1)
    assert token_ids[0] == greedy[0]
    assert token_ids[4] == greedy[4]


def test_twins_agree_under_filters_and_for_another_purpose(device):
    logits = padded_logits(1025, torch.float32, device)
    fifth = logits[:, :1025].topk(5, dim=1).values[:, -1]
    ladder, rows = new_ladder(6, device), rows_on(device, top_k=5)
    target, _ = both(logits, 1025, rows, ladder=ladder)
    draft, _ = both(logits, 1025, rows, purpose=DRAFT, ladder=ladder)
    num_kept = (logits[:, :1025] >= ladder.thresholds[:, None]).sum(dim=1)
    assert num_kept[[1, 2, 3, 5]].tolist() == [5] * 4
    for row in range(6):
        assert logits[row, target[row]] >= fifth[row]
    assert (target != draft).any()


@pytest.mark.parametrize("vocab_size", [31, 1025])
def test_ties_take_the_lowest_id(device, vocab_size):
    logits = torch.zeros(6, vocab_size, device=device)
    logits[:, [vocab_size - 1, vocab_size - 4, vocab_size // 2]] = 2.0
    token_ids, _ = both(logits, vocab_size, rows_on(device))
    assert token_ids[0] == token_ids[4] == vocab_size // 2


def test_negative_zero_ties_with_zero(device):
    logits = torch.full((6, 31), -1.0, device=device)
    logits[:, 3], logits[:, 9] = -0.0, 0.0
    assert both(logits, 31, rows_on(device))[0][0] == 3


@pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
@pytest.mark.parametrize("column", [0, 1024])
def test_nan_fails_its_row_alone(device, bad, column):
    logits = padded_logits(1025, torch.float32, device).clone()
    before, _ = both(logits, 1025, rows_on(device))
    logits[1, column] = bad
    logits[4, column] = bad
    after, failed = both(logits, 1025, rows_on(device))
    assert failed.tolist() == [False, True, False, False, True, False]
    assert after[[1, 4]].tolist() == [0, 0]
    assert (after == before)[~failed].all()


def test_nothing_allowed_fails_its_row_alone(device):
    logits = padded_logits(1025, torch.float32, device).clone()
    logits[[0, 3], :1025] = -float("inf")
    logits[1, :1024] = -float("inf")
    token_ids, failed = both(logits, 1025, rows_on(device))
    assert failed.tolist() == [True, False, False, True, False, False]
    assert token_ids[[0, 1, 3]].tolist() == [0, 1024, 0]


def test_infinite_logit_wins(device):
    logits = padded_logits(31, torch.float32, device).clone()
    logits[:, 17] = float("inf")
    token_ids, failed = both(logits, 31, rows_on(device))
    assert token_ids.tolist() == [17] * 6
    assert not failed.any()


def hard_logits(device):
    """Rows of 500: peaked, flat, all equal, large and close, mostly -inf, and with an infinity."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 500, generator=generator)
    x[0] *= 20
    x[2] = 3.0
    x[3] = 1e4 + (x[3] * 4).round() / 1024
    x[4, torch.rand(500, generator=generator) < 0.97] = -torch.inf
    x[5, [300, 310, 420]] = torch.inf
    return x.to(device)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-5, 0.3, 40.0])
def test_bounds_leave_out_nothing(device, temperature):
    """Looking into few groups finds the very id that comparing all scores finds."""
    logits = hard_logits(device)
    if temperature == 1e-30:
        logits[2] = 0.0  # where even such a temperature tells scores apart
    params = [SamplingParams(temperature=temperature)] * 6
    for shift in range(5 if device.type == "cpu" else 50):
        rows = make_rows(params, [shift + p for p in POSITIONS], device, SEEDS)
        got, _ = both(logits, 500, rows)
    assert int(got[5]) == 300


def test_ids_below_the_largest_of_their_group_may_win(device):
    """Eight ids lead together, in one group or spread over many: any may win, by its noise alone."""
    num_rows = 24
    logits = torch.randn(num_rows, 64 * 20, generator=torch.Generator().manual_seed(9))
    leaders = torch.tensor([130 + 7 * i if row % 2 else 64 * 2 * i + 5 for row in range(2) for i in range(8)])
    leaders = leaders.reshape(2, 8)
    for row in range(num_rows):
        logits[row, leaders[row % 2]] = 30.0 + 0.25 * torch.arange(8)
    params = [SamplingParams(temperature=1.0)] * num_rows
    rows = make_rows(params, list(range(1, num_rows + 1)), device, list(range(num_rows)))
    ids = both(logits.to(device), 64 * 20, rows)[0].tolist()
    ranks = [leaders[row % 2].tolist().index(token_id) for row, token_id in enumerate(ids)]
    assert len(set(ranks[::2])) > 2
    assert len(set(ranks[1::2])) > 2


def test_the_word_of_a_holder_is_no_noise(device):
    """Id 0 has its group's largest noise here, and a word that is less than those of the other ids by far."""
    seeds = torch.arange(100_000)
    positions = torch.full_like(seeds, 8)
    least, gap, holder = (t[:, 0] for t in group_noise_torch(seeds, positions, TARGET, 1))
    e = exponential_torch(noise_words_torch(seeds, positions, TARGET, 0, 16))
    seeds = seeds[(holder == 0) & (least + gap + e[:, 0] < e[:, 1:].amin(dim=1))].tolist()
    logits = 2 * torch.randn(31, generator=torch.Generator().manual_seed(0))
    logits[0] = -5.0
    rows = make_rows([SamplingParams()] * len(seeds), [8] * len(seeds), device, seeds)
    ids, _ = both(logits.to(device).expand(len(seeds), -1), 31, rows)
    assert len(ids) > 2
    assert (ids > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_several_parts(device, temperature):
    """Rows of more groups than one program passes over."""
    vocab_size = 64 * 2 * PART + 77
    logits = 3 * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(3)).to(device)
    logits[1] = logits[1].round()
    logits[2, :: 64 * 40] += 20.0
    rows = make_rows([SamplingParams(temperature=temperature)] * 3, [5, 6, 7], device, [1, 2, 3])
    both(logits, vocab_size, rows)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 40.0])
@pytest.mark.parametrize("few", [0, 64])
def test_ladders_agree(device, monkeypatch, temperature, few):
    """Rows whose id is known to be the nucleus's have no rungs; the others have the twin's, but for those outside."""
    monkeypatch.setattr(ladder_module, "_FEW", few)
    logits = hard_logits(device)
    logits[1, 7] = torch.nan
    params = [SamplingParams(temperature=temperature, top_p=0.9, min_p=1e-3)] * 6
    good, num_climbing = [0, 2, 3, 4, 5], 0
    for shift in range(4):
        rows = make_rows(params, [shift + p for p in POSITIONS], device, SEEDS)
        expected, got = new_ladder(6, device), new_ladder(6, device)
        for tensor in (*expected, *got):
            tensor.fill_(GARBAGE)
        run(op.gumbel_argmax_torch, logits, 500, rows, ladder=expected)
        token_ids, failed = run(op.gumbel_argmax_triton, logits, 500, rows, ladder=got)
        assert failed.tolist() == [row == 1 for row in range(6)]
        assert got.ids[1, 0] == got.ids[5, 1] == -1
        torch.testing.assert_close(got.edge[good], expected.edge[good])
        torch.testing.assert_close(got.thresholds[good], expected.thresholds[good])
        for row in good:
            weight = ((logits[row] - logits[row].max()).nan_to_num(0.0) / temperature).exp()
            rungs = [int(i) for i in expected.ids[row] if i >= 0]
            inside = [bool(weight[logits[row] > logits[row, i]].sum() < got.edge[row, 1]) for i in rungs]
            mine = [int(i) for i in got.ids[row] if i >= 0]
            assert got.logits[row, : len(mine)].tolist() == logits[row, mine].tolist()
            assert (got.logits[row, len(mine) :] == float("inf")).all()
            if mine:
                common = [i for i in rungs if i in mine]
                assert common == mine[: len(common)]
                last = rungs.index(common[-1]) if common else 0
                assert not any(ok for i, ok in zip(rungs[:last], inside[:last], strict=True) if i not in mine)
            else:
                assert (
                    next((i for i, ok in zip(rungs, inside, strict=True) if ok), token_ids[row])
                    == token_ids[row]
                )
            num_climbing += bool(mine)
    assert (num_climbing > 0) == (few == 0)
