"""EXACT: every option and every pair of options against the slow sampler, for small and large vocabularies.

All combinations run in one batch, so that each row also has neighbours with every other option. Small vocabularies
run here on both implementations of the kernels, one of 32,001 ids on one of them; the largest is `slow`, and `gpu`
marks those that run compiled.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from option_cases import Case, World
from row_reference import adjusted_row, logprobs_row, processed_row, scores_row
from sampling_reference import adjusted_logits, processed_logprobs, reference_scores

from core_runner.sampling import kernels
from core_runner.sampling.slot_processors import SlotProcessors
from core_runner.sampling_params import SamplingParams as Params
from core_runner.scheduling.output import NewRequest
from model_states import LogitsProcessor
from model_states.batch import GrammarMask

EOS = (4, 9)
PROMPT, OUTPUT, DRAFTS = [1, 3, 3, 28, 12], [7, 11, 5, 6], [28]
# "grammar" is not a parameter: the step brings its masks.
OPTIONS = {
    "temperature": {"temperature": 0.7},
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
    "processor": {"logits_processors": {"halve": {}}},
    "grammar": {"grammar": True},
    "processed": {"logprobs": 4, "logprobs_mode": "processed"},
    "adjusted": {"logprobs": 4, "logprobs_mode": "adjusted"},
    "raw": {"logprobs": 2},
}
SINGLES = [{}, *OPTIONS.values()]
PAIRS = [a | b for a, b in itertools.combinations(OPTIONS.values(), 2)]
EVERYTHING = {name: value for options in OPTIONS.values() for name, value in options.items()}
MODULES = [
    "bad_words", "best_ids", "grammar_mask", "group_maxima", "gumbel_argmax", "logit_entries", "logprobs", "nucleus",
    "penalties", "processed_logits", "top_k_top_p", "working_logits",
]  # fmt: skip


class Halve(LogitsProcessor):
    name = "halve"

    def validate(self, options):
        assert not options

    def add_request(self, slot, request, options):
        assert slot >= 0

    def process(self, logits, rows):
        logits[:, 1::2] *= 0.5


def halve(x):
    x[1::2] *= 0.5


def grammar_allows(vocab_size):
    return [i for i in range(vocab_size) if i % 3 != 1]


def packed(ids, vocab_size):
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[ids] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


class Matrix(World):
    """A step of requests with these options; greedy and sampled ones take turns."""

    def __init__(self, combinations, vocab_size, device):
        self.in_grammar, cases = [], []
        for seed, options in enumerate(combinations):
            options = {"temperature": 0.0 if seed % 3 == 0 else 1.0, **options}
            self.in_grammar.append(options.pop("grammar", False))
            drafts = DRAFTS if seed % 2 else ()
            cases.append(Case(Params(**options), PROMPT, OUTPUT, drafts, seed=seed * 1_000_003 - 2**40))
        super().__init__(cases, vocab_size, device, EOS)
        processors = SlotProcessors([Halve()], len(cases) + 2, vocab_size, device)
        for slot, case in zip(self.slots, cases, strict=False):
            processors.add(NewRequest("r", slot, case.tokens, len(case.prompt), case.params, case.seed))
        self.sampler.processors = processors

    def sample(self, logits):
        batch = self.batch()
        starts = batch.cu_num_logits_np
        rows = [r for i, g in enumerate(self.in_grammar) if g for r in range(starts[i], starts[i + 1])]
        if rows:
            words = packed(grammar_allows(self.vocab_size), self.vocab_size).repeat(len(rows), 1)
            mask_rows = torch.tensor(rows, dtype=torch.int32)
            batch.grammar_mask = GrammarMask(mask_rows.to(self.device), words.to(self.device))
        return self.sampler.sample(logits, batch)

    def adjusted(self, x, case, output):
        """The slow sampler's logits of one row."""
        is_in_grammar = self.in_grammar[next(i for i, c in enumerate(self.cases) if c is case)]
        allowed = grammar_allows(self.vocab_size) if is_in_grammar else None
        process = halve if case.params.logits_processors else None
        return adjusted_row(x, case.params, case.prompt, output, EOS, allowed, process)


def make_logits(matrix, seed=0):
    """Padding columns after the vocabulary hold what must never be read."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((matrix.num_logits, matrix.vocab_size + 3), math.nan)
    logits[:, : matrix.vocab_size] = 2 * torch.randn(
        matrix.num_logits, matrix.vocab_size, generator=generator
    )
    return logits.to(matrix.device)


def check(matrix):
    """Ids, log-probabilities and ranks of every row; at most one row in fifty may be too near a tie to tell."""
    logits = make_logits(matrix)
    got, near_ties = matrix.sample(logits), 0
    assert not got.failed.any()
    raw_rows = logits[:, : matrix.vocab_size].double().cpu().numpy()
    for row, (case, output) in enumerate(matrix.rows()):
        x = matrix.adjusted(raw_rows[row], case, output)
        scores = scores_row(x, case.params, case.seed, len(case.prompt) + len(output))
        second, best = np.partition(scores, -2)[-2:]
        if best - second < 1e-4:
            near_ties += 1
            continue
        token = int(scores.argmax())
        assert int(got.token_ids[row]) == token, f"{case.params} of row {row}"
        if case.params.logprobs is not None:
            mode = case.params.logprobs_mode
            want = processed_row(x, case.params) if mode == "processed" else logprobs_row(x)
            if mode == "raw":
                want = logprobs_row(raw_rows[row])
            check_logprobs(got, row, case.params.logprobs, token, want)
    assert near_ties <= matrix.num_logits // 50


def check_logprobs(got, row, count, token, want):
    ids = got.logprob_token_ids[row, : count + 1].tolist()
    values = got.logprob_values[row, : count + 1].cpu().numpy()
    assert ids[0] == token
    np.testing.assert_allclose(values, want[ids], rtol=0, atol=1e-4)
    np.testing.assert_allclose(values[1:], np.sort(want)[::-1][:count], rtol=0, atol=1e-4)
    # Ids whose values differ by rounding alone may come in either order.
    rank = int(got.sampled_ranks[row])
    assert (want > want[token] + 1e-5).sum() < rank <= (want >= want[token] - 1e-5).sum()


LARGE = [
    (32_001, "cpu"),
    pytest.param(151_936, "cpu", marks=pytest.mark.slow),
    *(pytest.param(vocab_size, "cuda", marks=pytest.mark.gpu) for vocab_size in (32_001, 151_936)),
]


@pytest.mark.parametrize(("vocab_size", "where"), [(31, None), (1000, None), *LARGE])
def test_every_option_and_pair_is_exact(device, vocab_size, where):
    combinations = [*SINGLES, *PAIRS, EVERYTHING]
    check(Matrix(combinations, vocab_size, device if where is None else torch.device(where)))


@pytest.mark.parametrize("vocab_size", [31, 1000])
def test_some_of_them_are_exact_on_kernels(device, vocab_size, monkeypatch):
    """The same on Triton's interpreter, which takes a tenth of a second for a row; all of them on a GPU."""
    for name in MODULES:
        monkeypatch.setattr(f"{kernels.__name__}.{name}.use_triton", lambda tensor: True)
    combinations = [*SINGLES, *PAIRS, EVERYTHING]
    if device.type == "cpu":
        combinations = [*SINGLES[:: 2 if vocab_size == 31 else 6], EVERYTHING]
    check(Matrix(combinations, vocab_size, device))


def test_both_slow_samplers_agree():
    """The one that goes id by id in plain Python, and the one that takes whole rows."""
    x = make_logits(Matrix([{}], 131, torch.device("cpu")))[0, :131].double().numpy()
    for options in [*SINGLES, *PAIRS[::3]]:
        if not options.keys() & {"grammar", "logits_processors"}:
            params = Params(**options)
            one = adjusted_logits(x.tolist(), params, PROMPT, OUTPUT, EOS)
            other = adjusted_row(x, params, PROMPT, OUTPUT, EOS)
            np.testing.assert_allclose(other, one, rtol=1e-12)
            scores = scores_row(other, params, -5, 9)
            by_id = reference_scores(one, params, -5, 9)
            assert {i for i, score in enumerate(scores) if score > -math.inf} == set(by_id)
            np.testing.assert_allclose(scores[list(by_id)], list(by_id.values()), rtol=1e-9)
            np.testing.assert_allclose(
                processed_row(other, params), processed_logprobs(one, params), rtol=1e-9
            )


NUM_DRAWS = 1500
CHANGING = [name for name in OPTIONS if name not in ("processed", "adjusted", "raw")]


def chi_square_limit(degrees):
    """Upper 0.1 % quantile, by Wilson and Hilferty's approximation."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3


def test_frequencies_of_pairs_are_the_exact_probabilities(device):
    """One request for each draw, with the seeds of `Matrix`; cells that expect few draws count together."""
    pairs = list(itertools.combinations(CHANGING, 2))[::6]
    requests = [{"temperature": 1.0} | OPTIONS[a] | OPTIONS[b] for a, b in pairs for _ in range(NUM_DRAWS)]
    matrix = Matrix(requests, 31, device)
    rows = matrix.rows()
    first = [i for i, (case, output) in enumerate(rows) if len(output) == len(OUTPUT)]
    logits = make_logits(matrix)
    logits[:] = logits[0]
    token_ids = matrix.sample(logits).token_ids[first].cpu().numpy().reshape(len(pairs), NUM_DRAWS)
    row = logits[0, :31].double().cpu().numpy()
    for i, pair in enumerate(pairs):
        case = matrix.cases[i * NUM_DRAWS]
        expected = np.exp(processed_row(matrix.adjusted(row, case, OUTPUT), case.params)) * NUM_DRAWS
        counts = np.bincount(token_ids[i], minlength=31)
        assert counts[expected == 0].sum() == 0, pair
        few = expected < 5
        cells = [*zip(counts[~few], expected[~few], strict=True), (counts[few].sum(), expected[few].sum())]
        cells = [(count, mean) for count, mean in cells if mean >= 5]
        assert len(cells) > 2, pair
        chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
        assert chi_square < chi_square_limit(len(cells) - 1), pair


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    """Every option at once beside a plain row; the grammar's masks are the step's, so they are left out."""
    everything = {name: value for name, value in EVERYTHING.items() if name != "grammar"}
    matrix = Matrix([everything, {}, OPTIONS["raw"], OPTIONS["processor"]], 1000, torch.device("cuda"))
    logits, batch = make_logits(matrix), matrix.batch()
    first = matrix.sampler.sample(logits, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = matrix.sampler.sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first.token_ids, second.token_ids)
