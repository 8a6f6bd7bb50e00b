"""The slow sampler for one row of a large vocabulary: double precision, whole rows at a time, numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from core_runner.sampling_params import SamplingParams

Row = npt.NDArray[np.float64]
_LOW = np.uint64(0xFFFFFFFF)


def words_row(seed: int, position: int, purpose: int, first: int, count: int) -> Row:
    """Philox 4x32-10 of `count` counters from `first` on, four words each."""
    key = seed & (2**64 - 1)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c0 = np.arange(first, first + count, dtype=np.uint64)
    c1, c2, c3 = (np.full_like(c0, value) for value in (position, purpose, 2))
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), b & _LOW
        c2, c3 = (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1), a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).reshape(-1).astype(np.float64)


def exponential_row(words: Row) -> Row:
    """Exponential noise of each word."""
    return -np.log1p(-np.minimum(np.maximum(words, 0.5) * 2.0**-32, 1 - 2.0**-24))


def gumbel_row(seed: int, position: int, vocab_size: int, purpose: int = 0) -> Row:
    """The documented noise of every id."""
    num_groups = (vocab_size + 63) // 64
    e = exponential_row(words_row(seed, position, purpose, 0, 16 * num_groups)).reshape(num_groups, 64)
    words = words_row(seed, position, purpose, 2**31, (num_groups + 1) // 2)[: 2 * num_groups]
    holder = words[1::2, None] % 64
    least = exponential_row(words[::2, None]) / 64
    gap = exponential_row(words[1::2, None] - holder + 32) / 63
    is_holder = np.arange(64) == holder
    lowest = np.where(is_holder, np.inf, e).min(axis=1, keepdims=True)
    return -np.log(least + np.where(is_holder, 0, gap + e - lowest)).reshape(-1)[:vocab_size]


def adjusted_row(
    logits: Row,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
    process: Callable[[Row], None] | None = None,
) -> Row:
    """The logits after everything that changes them. allowed: by a grammar; process: a logits processor."""
    x, tokens = logits.copy(), [*prompt, *output]
    for ids in (allowed, params.allowed_token_ids):
        if ids is not None:
            banned = np.ones(len(x), dtype=bool)
            banned[list(ids)] = False
            x[banned] = -math.inf
    for word in params.bad_words:
        before = list(word[:-1])
        if tokens[len(tokens) - len(before) :] == before:
            x[word[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        x[[token for token in (*params.stop_token_ids, *eos_token_ids) if token < len(x)]] = -math.inf
    for token in set(tokens):
        x[token] *= params.repetition_penalty if x[token] <= 0 else 1 / params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if process is not None:
        process(x)
    return x


def kept(x: Row, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Ids that top-k, then top-p, then min-p leave."""
    order = np.sort(x)[::-1]
    kth = order[min(params.top_k, len(x)) - 1] if params.top_k > 0 else -math.inf
    weight = np.where(x >= kth, np.exp((x - order[0]) / params.temperature), 0.0)
    keep = (x >= kth) & (weight >= params.min_p)
    if params.top_p < 1:
        mass = np.cumsum(np.where(order >= kth, np.exp((order - order[0]) / params.temperature), 0.0))
        keep &= x >= order[np.argmax(mass >= params.top_p * mass[-1])]
    return keep


def scores_row(x: Row, params: SamplingParams, seed: int, position: int) -> Row:
    """Scores; the best one is the sampled id. -inf for an id that cannot come."""
    if params.temperature == 0:
        return x
    scores = x / params.temperature + gumbel_row(seed, position, len(x))
    return np.where(kept(x, params), scores, -math.inf)


def logprobs_row(x: Row) -> Row:
    """Log-probabilities of logits."""
    best = x.max()
    return x - best - math.log(np.exp(x - best).sum())


def processed_row(x: Row, params: SamplingParams) -> Row:
    """Log-probabilities of the distribution that is sampled from."""
    if params.temperature == 0:
        return logprobs_row(x)
    return logprobs_row(np.where(kept(x, params), x / params.temperature, -math.inf))
