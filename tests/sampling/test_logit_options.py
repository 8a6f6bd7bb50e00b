"""Masks, bias, bad words, minimum length and penalties against the slow sampler, alone, in pairs and with drafts."""

import inspect
import itertools
import math

import pytest
import torch
from option_cases import Case, World
from sampling_reference import log_softmax, processed_logprobs, reference_scores

from core_runner.sampling import sampler as sampler_module
from core_runner.sampling.kernels import (
    bad_words,
    gumbel_argmax,
    logit_entries,
    logprobs,
    penalties,
    processed_logits,
    top_k_top_p,
    working_logits,
)
from core_runner.sampling.kernels.overlay import overlaid_torch
from core_runner.sampling_params import SamplingParams as Params
from model_states.batch import GrammarMask

EOS = (4, 9)
KERNELS = (
    bad_words,
    gumbel_argmax,
    logit_entries,
    logprobs,
    penalties,
    processed_logits,
    top_k_top_p,
    working_logits,
)
OPTIONS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -0.8},
    "bias": {"logit_bias": {3: 2.5, 7: -math.inf, 11: -1.0, 4: 1.5, 30: 3.0}},
    "allowed": {"allowed_token_ids": [3, 4, 5, 7, 12, 13, 30, 28, 29]},
    "bad words": {"bad_words": [[12], [5, 6, 7], [6, 28], [3, 29], [5, 6, 13], [*[8] * 12, 30]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (13, 200000)},
    "processed": {"logprobs": 4, "logprobs_mode": "processed"},
    "adjusted": {"logprobs": 4, "logprobs_mode": "adjusted"},
    "raw": {"logprobs": 2},
}  # fmt: skip
SINGLES = [{}, *OPTIONS.values()]
PAIRS = [a | b for a, b in itertools.combinations(OPTIONS.values(), 2)]
PROMPT, OUTPUT, DRAFTS = [1, 3, 3, 28, 12], [7, 11, 5, 6], [28, 4, 7]


@pytest.fixture(params=["torch", "triton"])
def twin(request, monkeypatch):
    """Both implementations of every kernel, whatever the device."""
    for module in KERNELS:
        monkeypatch.setattr(module, "use_triton", lambda tensor: request.param == "triton")
    return request.param


def make_logits(world, dtype=torch.float32, seed=0):
    """Padding columns after the vocabulary hold what must never be read."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((world.num_logits, world.vocab_size + 3), math.nan)
    logits[:, : world.vocab_size] = 2 * torch.randn(world.num_logits, world.vocab_size, generator=generator)
    return logits.to(dtype).to(world.device)


def adjust(world, logits):
    batch = world.batch()
    options = world.options.rows(batch, world.num_logits)
    overlay = world.sampler._lay_over(logits, batch, options)
    before = overlaid_torch(logits, world.vocab_size, overlay).clone()
    copy = world.sampler._copy(logits, overlay)
    if options.words is None:
        assert torch.equal(copy.nan_to_num(5e30), before.nan_to_num(5e30))
    return copy


def check_samples(world, logits):
    """The sampled ids and the logprobs of every row are the slow sampler's; returns how many were near ties."""
    before = logits.clone()
    got = world.sampler.sample(logits, world.batch())
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert not got.failed.any()
    adjusted, near_ties = world.reference(logits).tolist(), 0
    for row, (case, output) in enumerate(world.rows()):
        position = len(case.prompt) + len(output)
        scores = reference_scores(adjusted[row], case.params, case.seed, position)
        best, second = sorted(scores.values())[-1], sorted(scores.values())[-2:][0]
        if best - second < 1e-4 and len(scores) > 1:
            near_ties += 1
            continue
        token = int(got.token_ids[row])
        assert token == max(scores, key=scores.__getitem__), f"{case.params}"
        if case.params.logprobs is not None:
            wants = {
                "raw": lambda row: log_softmax(logits[row, : world.vocab_size].tolist()),
                "adjusted": lambda row: log_softmax(adjusted[row]),
                "processed": lambda row, case=case: processed_logprobs(adjusted[row], case.params),
            }
            want = wants[case.params.logprobs_mode](row)
            check_logprobs(got, row, case.params.logprobs, token, torch.tensor(want))
    return near_ties


def check_logprobs(got, row, count, token, want):
    ids = got.logprob_token_ids[row, : count + 1].long().cpu()
    assert int(ids[0]) == token
    values = got.logprob_values[row, : count + 1].cpu()
    torch.testing.assert_close(values, want[ids].float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(values[1:], want.topk(count).values.float(), rtol=0, atol=1e-4)
    assert int(got.sampled_ranks[row]) == int((want > want[token] + 1e-9).sum()) + 1


@pytest.mark.parametrize("vocab_size", [31, 1000])
def test_options_alone_and_in_pairs(device, twin, vocab_size):
    """Greedy and sampled, all in one batch, so that each row also has neighbours with other options."""
    interpreted = twin == "triton" and device.type == "cpu"
    # The interpreter takes a tenth of a second for a row with a filter.
    combinations = SINGLES + (PAIRS[::4] if interpreted else PAIRS)
    if interpreted and vocab_size > 31:
        combinations = SINGLES[::2]
    cases = [
        Case(Params(**{"temperature": 0.0 if seed % 3 == 0 else 1.0} | options), PROMPT, OUTPUT, seed=seed)
        for seed, options in enumerate(combinations)
    ]
    world = World(cases, vocab_size, device, EOS)
    assert check_samples(world, make_logits(world)) <= len(cases) // 50


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjusted_logits_are_the_references(device, dtype):
    """Also at draft positions, whose history and length include the drafts before them."""
    everything = {name: value for options in OPTIONS.values() for name, value in options.items()}
    cases = [
        Case(Params(**options), PROMPT, OUTPUT, drafts)
        for options in (OPTIONS["repetition"] | OPTIONS["frequency"], OPTIONS["bad words"], {}, everything)
        for drafts in ((), DRAFTS)
    ]
    cases += [
        Case(Params(bad_words=[[1, 2], [7] * 14, [0, 1, 3], [0, 0, 1, 4]]), [1]),  # words longer than the history
        Case(Params(bad_words=[[1, 1, 2], [5, 5]]), [1], [], [1, 1, 5]),
        Case(Params(bad_words=[[2 * i, i, 3] for i in range(10)] + [[9, 9, i] for i in range(31)]), [9, 9], [12, 6]),
        Case(Params(min_tokens=3), [1, 2], [], [3, 3, 3]),
        Case(Params(logit_bias={i: i / 10 for i in range(31)}), [1]),
    ]  # fmt: skip
    world = World(cases, 31, device, EOS)
    logits = make_logits(world, dtype)
    adjusted = adjust(world, logits)
    assert adjusted.dtype == torch.float32
    torch.testing.assert_close(adjusted.double().cpu(), world.reference(logits), rtol=1e-5, atol=1e-5)
    plain = [row for row, (case, _) in enumerate(world.rows()) if case.params == Params()]
    assert torch.equal(adjusted[plain], logits[plain, :31].float()), "a row that asks for nothing is a copy"


@pytest.mark.usefixtures("twin")
def test_drafts_sample_with_the_tokens_before_them(device):
    everything = OPTIONS["frequency"] | OPTIONS["bad words"] | OPTIONS["min_tokens"]
    cases = [
        Case(Params(temperature=0.8, **everything), PROMPT, OUTPUT[:count], DRAFTS[: 3 - count], seed=count)
        for count in range(4)
    ]
    world = World(cases, 31, device, EOS)
    assert check_samples(world, make_logits(world)) == 0


@pytest.mark.usefixtures("twin")
def test_a_row_with_nothing_left_fails_alone(device):
    cases = [
        Case(Params(allowed_token_ids=[5], bad_words=[[5, 5]], top_p=0.9), [5], [5]),
        Case(Params(allowed_token_ids=[5], bad_words=[[5, 5]], top_p=0.9), [5], [5, 6]),
        Case(Params(logit_bias={5: 1.0}, logprobs=2, logprobs_mode="processed"), [5]),
        Case(Params(allowed_token_ids=[4, 9], min_tokens=2), [5], [1]),
        Case(Params(frequency_penalty=1.0), [5], [1]),
    ]
    world = World(cases, 31, device, EOS)
    logits = make_logits(world)
    # A NaN fails its row, also where the mask would hide it.
    logits[1, 6], logits[4, 1] = math.nan, math.nan
    got = world.sampler.sample(logits, world.batch())
    assert got.failed.tolist() == [True, True, False, True, True]
    assert torch.isfinite(got.logprob_values[2]).all()
    bias = torch.zeros(31, dtype=torch.float64, device=device)
    bias[5] = 1.0
    want = torch.log_softmax(logits[2, :31].double() + bias, 0)
    torch.testing.assert_close(got.logprob_values[2, 0].double(), want[got.token_ids[2]], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("twin")
def test_extreme_values_stay_finite_or_forbidden(device):
    cases = [
        Case(Params(temperature=0, repetition_penalty=value, logit_bias={3: bias}), [1, 2, 3], [4])
        for value in (5e-324, 1e-30, 1e30, 1.7e308)
        for bias in (-1e30, 1e30)
    ]
    world = World(cases, 31, device)
    logits = make_logits(world)
    logits[:, 7] = -math.inf
    got = world.sampler.sample(logits, world.batch())
    assert not got.failed.any()
    assert not adjust(world, logits).isnan().any()
    assert 7 not in got.token_ids.tolist()


def test_tables_grow_and_slots_change_hands(device):
    """Wider lists and more users than the tables had room for; what others hold stays as it was."""
    draw = torch.Generator().manual_seed(1)

    def params(width):
        ids = torch.randperm(200, generator=draw)[: width + 2].tolist()
        words = [[int(i), int(j)] for i, j in torch.randint(0, 200, (width, 2), generator=draw)]
        return Params(
            logit_bias={i: i / 50 for i in ids}, bad_words=words, allowed_token_ids=range(width, 200)
        )

    widths = [1, 3, 40, 2, 7, 90, 1, 5]
    cases = [Case(params(width), [1, 2], [5]) for width in widths]
    world = World(cases, 200, device)
    logits = make_logits(world)
    for turn in range(3):
        torch.testing.assert_close(
            adjust(world, logits).double().cpu(), world.reference(logits), rtol=1e-5, atol=1e-5
        )
        for index in range(turn, len(cases), 2):
            newcomer = Params() if index == 3 else params(widths[-index])
            world.states.remove(world.slots[index])
            world.states.add(world.slots[index], newcomer, 0)
            cases[index].params = newcomer
        world.states.apply_staged_writes()


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that the sampler calls: of all that it imports, but for what only makes room (`new_...`)."""
    called = []
    kernels = [
        (name, value)
        for name, value in vars(sampler_module).items()
        if inspect.isfunction(value)
        and ".sampling.kernels." in value.__module__
        and not name.startswith("new_")
    ]
    assert len(kernels) > 10
    for name, kernel in kernels:

        def tell(*args, kernel=kernel, name=name):
            called.append(name)
            return kernel(*args)

        monkeypatch.setattr(sampler_module, name, tell)
    return called


PLAIN = ["group_maxima", "gumbel_argmax"]
FILTERED = ["group_maxima", "gumbel_argmax", "nucleus"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PLAIN),
        ({"temperature": 0.0}, PLAIN),
        ({"logprobs": 0}, [*PLAIN, "logprobs"]),
        ({"logprobs": 1}, [*PLAIN, "best_ids", "logprobs"]),
        ({"top_k": 3}, FILTERED),
        ({"top_p": 0.9}, FILTERED),
        ({"min_p": 0.1}, FILTERED),
        ({"top_p": 0.9, "logprobs": 1}, [*FILTERED, "best_ids", "logprobs"]),
        ({"min_tokens": 2}, ["logit_entries", *PLAIN]),
        ({"logit_bias": {1: 1.0}}, ["logit_entries", *PLAIN]),
        # Groups of the logits as they were are not those of the draw.
        (
            {"logit_bias": {1: 1.0}, "logprobs": 1},
            ["logit_entries", *PLAIN, "group_maxima", "best_ids", "logprobs"],
        ),
        ({"bad_words": [[1]]}, ["logit_entries", *PLAIN]),
        ({"bad_words": [[1, 2]]}, ["working_logits", "bad_words", *PLAIN]),
        ({"allowed_token_ids": [1]}, PLAIN),
        ({"presence_penalty": 1}, ["count_tokens", "penalized_values", *PLAIN]),
        (
            OPTIONS["processed"],
            ["working_logits", *PLAIN, "processed_logits", "group_maxima", "best_ids", "logprobs"],
        ),
    ],
)
def test_an_option_that_nobody_uses_launches_nothing(device, launches, options, expected):
    """Neither in a first step, nor when a request that used everything has gone."""
    everything = {name: value for each in OPTIONS.values() for name, value in each.items()}
    world = World([Case(Params(**options), [1, 2])], 31, device, EOS, num_spare_slots=1)
    world.sampler.sample(make_logits(world), world.batch())
    assert launches == expected
    world.states.add(world.slots[1], Params(**everything), 0)
    world.states.apply_staged_writes()
    world.states.remove(world.slots[1])
    launches.clear()
    world.sampler.sample(make_logits(world), world.batch())
    assert launches == expected


def test_a_grammar_launches_its_mask_and_no_more(device, launches):
    world = World([Case(Params(), [1, 2])], 31, device, EOS)
    batch = world.batch()
    rows, words = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0], [[1 << 5]]))
    batch.grammar_mask = GrammarMask(rows, words)
    got = world.sampler.sample(make_logits(world), batch)
    assert got.token_ids.tolist() == [5]
    assert launches == ["grammar_mask", *PLAIN]
    launches.clear()
    world.sampler.sample(make_logits(world), world.batch())
    assert launches == PLAIN
