"""`DefaultSampler`: streams that depend on seed and position alone, tiny temperatures, failures, shapes."""

import numpy as np
import pytest
import torch
from sampling_reference import make_batch, make_states, reference_scores, sample

from core_runner.sampling.kernels import best_ids, group_maxima, gumbel_argmax, logprobs, nucleus, top_k_top_p
from core_runner.sampling.sampler import DefaultSampler
from core_runner.sampling_params import SamplingParams as Params

TINY_TEMPERATURES = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-12, 1e-38, 1e-40, 5e-324]
FEATURES = [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"logprobs": 2}]


@pytest.fixture(params=["torch", "triton"])
def twin(request, monkeypatch):
    """Both implementations of every kernel, whatever the device."""
    for module in (best_ids, group_maxima, gumbel_argmax, logprobs, nucleus, top_k_top_p):
        monkeypatch.setattr(module, "use_triton", lambda tensor: request.param == "triton")
    return request.param


def close_logits(num_rows, vocab_size, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator).to(device)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0),
        Params(temperature=0.8, seed=42),
        Params(temperature=1.5, seed=-1, top_k=8),
        Params(temperature=0.7, seed=2**63 - 1, top_p=0.7),
        Params(temperature=1.0, seed=-(2**63), min_p=0.2, top_p=0.95, top_k=40),
    ],
)
def test_samples_what_the_reference_samples(device, params):
    logits = close_logits(6, 150, device) * 2
    positions = [1, 2, 3, 2**16 + 1, 2**17, 2**30]
    got = sample(logits, [params], positions, slots=[0] * 6)
    for row, position in enumerate(positions):
        scores = reference_scores(logits[row].tolist(), params, params.seed or 0, position)
        best = max(scores, key=scores.__getitem__)
        others = [score for i, score in scores.items() if i != best]
        assert not others or scores[best] - max(others) > 1e-4, "pick other inputs: this one is a near tie"
        assert int(got.token_ids[row]) == best
    assert not got.failed.any()


def stream_in_company(device, neighbours, row, slot):
    """16 ids of a seeded request that has the given row and slot among neighbours."""
    seeded = Params(temperature=0.8, seed=42, ignore_eos=True)
    params = [*neighbours[:slot], seeded, *neighbours[slot:]]
    slots = [i for i in range(len(params)) if i != slot]
    slots.insert(row, slot)
    states = make_states(params, device)
    sampler, ids = DefaultSampler(states, 50), []
    for position in range(16):
        logits = close_logits(len(slots), 50, device, seed=1000 + position)
        logits[row] = close_logits(1, 50, device, seed=position)[0] * 0.3
        batch = make_batch(
            slots, [7 * i for i in range(row)] + [9 + position] + [5] * (len(slots) - row - 1), device
        )
        ids.append(int(sampler.sample(logits, batch).token_ids[row]))
    return ids


def test_neighbours_row_and_slot_do_not_change_a_seeded_row(device):
    alone = stream_in_company(device, [], 0, 0)
    assert len(set(alone)) > 5
    mixed = [
        Params(temperature=0),
        Params(temperature=1.1, seed=7),
        Params(temperature=0.9, top_k=3),
        Params(temperature=0),
        Params(temperature=1.0, top_p=0.5, logprobs=4),
        Params(temperature=2.0, min_p=0.1),
        Params(temperature=0.8, seed=42),
    ]
    for row, slot in [(0, 0), (7, 7), (3, 3), (0, 7), (7, 0), (2, 5)]:
        assert stream_in_company(device, mixed, row, slot) == alone
    for row in (0, 1):
        assert stream_in_company(device, [Params(temperature=1.0)], row, row) == alone


def test_other_seeds_give_other_streams(device):
    logits = torch.zeros(64, 50, device=device)
    streams = [
        tuple(sample(logits, [Params(seed=seed)], list(range(64)), [0] * 64).token_ids.tolist())
        for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63))
    ]
    assert len(set(streams)) == len(streams)
    # Equal by chance for one id in fifty.
    assert sum(a == b for a, b in zip(streams[0], streams[1], strict=True)) < 8


def test_batch_order_does_not_matter(device):
    logits = close_logits(8, 100, device)
    params = [Params(temperature=0.5 + 0.2 * i, seed=i, top_k=10 * (i % 3), logprobs=i % 2) for i in range(8)]
    positions = [3 * i for i in range(8)]
    base = sample(logits, params, positions)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    other = sample(logits[order], params, [positions[i] for i in order], slots=order)
    assert torch.equal(other.token_ids, base.token_ids[order])
    assert torch.equal(other.sampled_ranks, base.sampled_ranks[order])
    torch.testing.assert_close(other.logprob_values[:, 0], base.logprob_values[order, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_sample_the_best_id(device, dtype, twin):
    row = torch.tensor([2.875, 2.9551, 11.0625, -2.4473], dtype=dtype, device=device)
    # The interpreter takes a tenth of a second for a row with a filter.
    interpreted = twin == "triton" and device.type == "cpu"
    temperatures = TINY_TEMPERATURES[1::6] if interpreted else TINY_TEMPERATURES
    params = [Params(temperature=t, seed=i, **f) for i, t in enumerate(temperatures) for f in FEATURES]
    together = sample(row.repeat(len(params), 1), params)
    assert together.token_ids.tolist() == [2] * len(params)
    assert not together.failed.any()
    assert torch.isfinite(together.logprob_values).all()
    # One feature alone in the batch is a path of its own.
    for i, feature in enumerate(FEATURES if not interpreted else FEATURES[:1]):
        alone = sample(row.repeat(len(temperatures), 1), params[i :: len(FEATURES)])
        assert alone.token_ids.tolist() == [2] * len(temperatures)
        assert (alone.logprob_values is not None) == ("logprobs" in feature)


def test_huge_temperature_is_uniform_and_finite(device):
    logits = close_logits(400, 4, device) * 100
    got = sample(logits, [Params(temperature=1e300, seed=3)], list(range(400)), [0] * 400)
    assert not got.failed.any()
    assert min(torch.bincount(got.token_ids, minlength=4).tolist()) > 60


@pytest.mark.usefixtures("twin")
def test_bad_rows_fail_alone(device):
    logits = close_logits(5, 40, device)
    params = [Params(seed=i, temperature=0.9 * (i != 3), top_k=7 * (i < 2), logprobs=2) for i in range(5)]
    before = sample(logits, params)
    logits[1, 39], logits[3] = float("nan"), -float("inf")
    after = sample(logits, params)
    good = [0, 2, 4]
    assert after.failed.tolist() == [False, True, False, True, False]
    assert torch.equal(after.token_ids[good], before.token_ids[good])
    torch.testing.assert_close(after.logprob_values[good], before.logprob_values[good])
    assert after.token_ids[[1, 3]].tolist() == [0, 0]


@pytest.mark.usefixtures("twin")
def test_logprobs_are_of_the_unscaled_logits(device):
    logits = close_logits(3, 30, device)
    params = [
        Params(temperature=2.0, seed=5, top_k=3, logprobs=4),
        Params(seed=1),
        Params(temperature=0, logprobs=0),
    ]
    got = sample(logits, params)
    exact = logits.double().log_softmax(dim=1)
    best = exact.topk(4, dim=1)
    assert got.logprob_token_ids.dtype == got.sampled_ranks.dtype == torch.int32
    assert torch.equal(got.logprob_token_ids[:, 0].long(), got.token_ids)
    assert torch.equal(got.logprob_token_ids[:, 1:].long(), best.indices)
    expected = torch.cat([exact.gather(1, got.token_ids[:, None]), best.values], dim=1)
    torch.testing.assert_close(got.logprob_values.double(), expected, rtol=1e-5, atol=1e-5)
    sampled = logits.gather(1, got.token_ids[:, None])
    assert torch.equal(got.sampled_ranks.long(), (logits > sampled).sum(dim=1) + 1)
    assert got.sampled_ranks[2] == 1


def test_more_logprobs_than_ids(device):
    assert sample(close_logits(2, 3, device), [Params(logprobs=20)] * 2).logprob_values.shape == (2, 4)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_no_rows(device, logprobs):
    params = [Params(top_k=2, logprobs=logprobs)]
    got = sample(torch.empty(0, 20, device=device), params, [], [])
    assert got.token_ids.shape == got.failed.shape == (0,)
    assert got.logprob_values is None


def test_requests_without_logits_rows(device):
    """A batch whose requests are all in the middle of their prefill has requests and no rows."""
    states = make_states([Params(logprobs=2, top_p=0.5)], device)
    batch = make_batch([], [], device)
    batch.idx_mapping_np = np.zeros(1, dtype=np.int32)
    got = DefaultSampler(states, 20).sample(torch.empty(0, 20, device=device), batch)
    assert got.token_ids.shape == (0,)
    assert got.logprob_values.shape == got.logprob_token_ids.shape == (0, 3)


@pytest.mark.usefixtures("twin")
def test_padding_columns_and_strides_change_nothing(device):
    params = [Params(seed=0, top_k=5, logprobs=2), Params(seed=1, top_p=0.9), Params(temperature=0)]
    base = close_logits(3, 40, device)
    expected = sample(base, params)
    wide = torch.full((3, 64), 1e4, device=device)
    wide[:, :40] = base
    batch = make_batch([0, 1, 2], [5] * 3, device)
    column_major = wide.T.contiguous().T
    for logits in (wide, wide.repeat(1, 2)[:, :64], column_major):
        given = logits.clone()
        got = DefaultSampler(make_states(params, device), 40).sample(logits, batch)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert torch.equal(got.logprob_token_ids, expected.logprob_token_ids)
        assert torch.equal(logits, given)


@pytest.mark.usefixtures("twin")
def test_rows_of_one_request_and_padding_rows(device):
    """Verification has several rows for a request; a padded batch has garbage rows."""
    logits = close_logits(6, 40, device)
    params = [Params(seed=1, top_k=9), Params(seed=2, temperature=0.5)]
    expected = sample(logits[:4], params, [3, 4, 8, 9], slots=[0, 0, 1, 1])
    batch = make_batch([0, 0, 1, 1, 2, 2], [3, 4, 8, 9, 0, 0], device)
    batch.idx_mapping_np = batch.idx_mapping_np[[0, 2]]
    logits[4:] = float("nan")
    got = DefaultSampler(make_states(params, device), 40).sample(logits, batch)
    assert torch.equal(got.token_ids[:4], expected.token_ids)
    assert not got.failed[:4].any()


@pytest.mark.parametrize(
    ("params", "launched"),
    [
        ([Params(temperature=0, top_k=3), Params(temperature=1)], set()),
        ([Params(temperature=0), Params(top_p=0.9)], {"nucleus"}),
        ([Params(temperature=0, logprobs=0)], {"logprobs"}),
        ([Params(min_p=0.1, logprobs=1)], {"nucleus", "logprobs"}),
    ],
)
def test_unused_features_launch_nothing(device, monkeypatch, params, launched):
    calls = set()
    for name in ("nucleus", "logprobs"):
        monkeypatch.setattr(f"core_runner.sampling.sampler.{name}", lambda *args, name=name: calls.add(name))
    states = make_states([*params, Params(top_k=2, logprobs=5)], device)
    logits = close_logits(len(params), 20, device)
    DefaultSampler(states, 20).sample(logits, make_batch(range(len(params)), [1] * len(params), device))
    assert calls == launched


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    device = torch.device("cuda")
    params = [Params(seed=i, top_k=5, top_p=0.9, min_p=0.01, logprobs=2) for i in range(3)]
    states, batch = make_states(params, device), make_batch([0, 1, 2], [5] * 3, device)
    sampler, logits = DefaultSampler(states, 1000), close_logits(3, 1000, device)
    sampler.sample(logits, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        states.add(1, Params(temperature=0.5, top_p=0.5), 9)
        states.apply_staged_writes()
        sampler.sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
