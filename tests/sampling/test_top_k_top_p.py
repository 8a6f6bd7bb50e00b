"""`top_k_top_p`: both twins against a sort-based reference, ties, skipped rows and extreme temperatures."""

import pytest
import torch
from sampling_reference import kept_ids, make_rows

from core_runner.sampling.kernels import top_k_top_p as op
from core_runner.sampling.kernels.group_maxima import group_maxima_torch
from core_runner.sampling.kernels.groups import new_groups
from core_runner.sampling_params import SamplingParams as Params

INF = float("inf")
KERNELS = [op.top_k_top_p_torch, op.top_k_top_p_triton]
OPTIONS = [
    Params(temperature=1.0, top_k=1),
    Params(temperature=0.6, top_k=5),
    Params(temperature=1.4, top_p=0.9),
    Params(temperature=1.0, top_p=0.5, top_k=20),
    Params(temperature=0.8, min_p=0.05),
    Params(temperature=1.2, top_k=30, top_p=0.8, min_p=0.02),
    Params(temperature=3.0, top_p=0.999),
    Params(temperature=1.0, top_k=2**31 - 1, top_p=1e-6),
]


def run(kernel, logits, vocab_size, params, exact=True):
    thresholds = torch.full((len(params),), float("nan"), device=logits.device)
    rows = make_rows(params, [3] * len(params), logits.device, [0] * len(params))
    if kernel is op.top_k_top_p_torch:
        kernel(logits, vocab_size, rows, exact, thresholds)
    else:
        groups = new_groups(logits, vocab_size, filters=True)
        group_maxima_torch(logits, vocab_size, rows, 0, groups)
        chosen = torch.full_like(groups.other_bounds, -77, dtype=torch.int32)
        kernel(logits, vocab_size, rows, groups, exact, thresholds, chosen)
    return thresholds


def kept(kernel, logits, vocab_size, params, exact=True):
    thresholds = run(kernel, logits, vocab_size, params, exact)
    mask = logits[:, :vocab_size].float() >= thresholds[:, None]
    return [row.nonzero()[:, 0].tolist() for row in mask]


def random_logits(num_rows, vocab_size, dtype, device, scale=3.0):
    """Strided rows between rows of NaN; the padding columns would be the largest."""
    generator = torch.Generator().manual_seed(vocab_size)
    storage = torch.full((num_rows, 2, vocab_size + 5), float("nan"))
    storage[:, 0, :vocab_size] = scale * torch.randn(num_rows, vocab_size, generator=generator)
    storage[:, 0, vocab_size:] = 1e4
    return storage.to(dtype).to(device)[:, 0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, torch.float32),
        (31, torch.bfloat16),
        (31, torch.float32),
        (1000, torch.float16),
        (1025, torch.bfloat16),
        (1025, torch.float32),
    ],
)
def test_keeps_what_sorting_keeps(device, vocab_size, dtype, kernel):
    logits = random_logits(len(OPTIONS), vocab_size, dtype, device)
    got = kept(kernel, logits, vocab_size, OPTIONS)
    for row, params in enumerate(OPTIONS):
        assert got[row] == kept_ids(logits[row, :vocab_size].tolist(), params), params


def test_best_ids_of_one_group_and_of_many(device):
    """The k best may lie in one group, and be spread over more than are looked at together."""
    params = [Params(top_k=70, top_p=0.7)] * 3
    logits = random_logits(3, 64 * 90, torch.float32, device, 0.1)
    logits[0, 640:704] += 5.0
    logits[1, : 64 * 90 : 64] += 5.0
    got = kept(op.top_k_top_p_triton, logits, 64 * 90, params)
    for row in range(3):
        assert got[row] == kept_ids(logits[row, : 64 * 90].tolist(), params[row])


def test_top_p_alone_may_be_left_out(device):
    """Where the threshold need not be exact, only top-p without top-k is left out, and min-p is not."""
    options = [Params(top_p=0.5), Params(top_p=0.5, min_p=0.3), Params(top_p=0.5, top_k=9), Params(top_k=9)]
    logits = random_logits(4, 200, torch.float32, device)
    got = kept(op.top_k_top_p_triton, logits, 200, options, exact=False)
    assert got == kept(op.top_k_top_p_torch, logits, 200, options, exact=False)
    without = [Params(), Params(min_p=0.3), *options[2:]]
    assert got == [kept_ids(logits[i, :200].tolist(), params) for i, params in enumerate(without)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0, top_k=1),
        Params(temperature=1),
        Params(temperature=1, top_k=31),
        Params(top_k=99),
    ],
)
def test_rows_without_a_filter_keep_all(device, kernel, params):
    logits = random_logits(2, 31, torch.float32, device)
    got = kept(kernel, logits, 31, [params, Params(top_k=1)])
    assert got[0] == list(range(31))
    assert len(got[1]) == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_ties_at_a_threshold_are_kept(device, kernel):
    row = torch.tensor([0.0, 2.0, 1.0, 1.0, -1.0, 1.0, -0.0], device=device)
    options = [Params(top_k=2), Params(top_p=0.5), Params(min_p=0.3), Params(top_k=5)]
    got = kept(kernel, row.repeat(4, 1), 7, options)
    # exp(1 - 2) is 0.37 of the best: over 0.3. Zero and minus zero are equal, so top_k=5 keeps six.
    assert got == [[1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 3, 5], [0, 1, 2, 3, 5, 6]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("row", [[1.0, 0.0, -0.0, -1.0], [1.0, -0.0, 0.0, -1.0]])
def test_both_zeros_are_kept_together(device, kernel, row):
    logits = torch.tensor(row, device=device).repeat(3, 1)
    options = [Params(top_k=2), Params(top_k=3), Params(top_p=0.7)]
    assert kept(kernel, logits, 4, options) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_logits_are_all_kept(device, kernel):
    options = [Params(top_k=3), Params(top_p=0.01), Params(min_p=1.0)]
    assert kept(kernel, torch.full((3, 1025), -7.5, device=device), 1025, options) == [list(range(1025))] * 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_ids_are_kept_only_where_k_reaches_them(device, kernel):
    row = torch.tensor([-INF, 1.0, -INF, 0.5, -INF], device=device)
    got = kept(kernel, row.repeat(3, 1), 5, [Params(top_k=2), Params(top_k=3), Params(top_p=0.99)])
    assert got == [[1, 3], [0, 1, 2, 3, 4], [1, 3]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-38, 1e-40, 1e30, 1e300])
def test_extreme_temperatures(device, kernel, temperature):
    row = torch.tensor([-3e4, 5.0, 6e4, -INF, 0.0], device=device)
    options = [
        Params(temperature=temperature, top_p=0.5),
        Params(temperature=temperature, min_p=0.5),
        Params(temperature=temperature, top_k=2, top_p=0.9),
    ]
    # A huge temperature makes the four finite ids equal: half the mass is two of them, all are near the best.
    expected = [[1, 2], [0, 1, 2, 4], [1, 2]] if temperature > 1 else [[2], [2], [2]]
    assert kept(kernel, row.repeat(3, 1), 5, options) == expected


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_nan_and_infinities_harm_no_other(device, kernel):
    logits = random_logits(4, 300, torch.float32, device).clone()
    params = [Params(top_k=9, top_p=0.8)] * 4
    before = run(kernel, logits, 300, params)
    logits[0, 299], logits[1, :300], logits[2, 7] = float("nan"), -INF, INF
    after = run(kernel, logits, 300, params)
    assert (logits[2, :300] >= after[2]).nonzero().tolist() == [[7]]
    assert after[3] == before[3]
