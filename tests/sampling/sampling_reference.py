"""A batch builder and a slow sampler, one row at a time, that the sampler is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from core_runner.sampling.rows import SamplingRows
from core_runner.sampling.sampler import DefaultSampler
from core_runner.sampling.states import SamplerStates
from core_runner.sampling_params import SamplingParams
from model_states.batch import InputBatch
from model_states.sampler import SamplerOutput

GARBAGE = -77


def make_batch(
    slots: Sequence[int], positions: Sequence[int], device: torch.device, logits_per_req: int = 1
) -> InputBatch:
    """A step in which row i of the logits belongs to slots[i] and samples the id of position positions[i].

    logits_per_req rows in turn belong to one request. Tokens without logits lie in between.
    """
    num_logits = len(slots)
    starts = np.arange(0, num_logits + 1, logits_per_req, dtype=np.int32)
    token_positions = torch.full((2 * num_logits + 1,), GARBAGE, dtype=torch.int64)
    logits_indices = 2 * torch.arange(num_logits) + 1
    token_positions[logits_indices] = torch.as_tensor(positions, dtype=torch.int64) - 1
    row_slots = torch.as_tensor(slots, dtype=torch.int32)
    unused = torch.empty(0, dtype=torch.int32)
    idx_mapping_np = np.asarray(slots, dtype=np.int32)[starts[:-1]]
    return InputBatch(
        num_reqs=len(starts) - 1,
        num_tokens=2 * num_logits,
        idx_mapping=torch.from_numpy(idx_mapping_np).to(device),
        idx_mapping_np=idx_mapping_np,
        num_scheduled_tokens_np=2 * np.diff(starts),
        num_computed_tokens_np=np.zeros(len(starts) - 1, dtype=np.int32),
        query_start_loc=unused,
        query_start_loc_np=2 * starts,
        seq_lens=unused,
        input_ids=unused,
        positions=token_positions.to(device),
        block_tables=(),
        slot_mappings=(),
        logits_indices=logits_indices.to(device),
        expanded_idx_mapping=row_slots.to(device),
        expanded_local_pos=torch.zeros(num_logits, dtype=torch.int32, device=device),
        cu_num_logits=torch.from_numpy(starts).to(device),
        cu_num_logits_np=starts,
        max_query_len=2 * logits_per_req,
        max_seq_len=1 << 20,
    )


def make_states(
    params: Sequence[SamplingParams], device: torch.device, seeds: Sequence[int] | None = None
) -> SamplerStates:
    """States in which slot i holds params[i]; the seed is seeds[i], else the params' own."""
    states = SamplerStates(len(params), device)
    for slot, param in enumerate(params):
        states.add(slot, param, seeds[slot] if seeds is not None else param.seed or 0)
    states.apply_staged_writes()
    return states


def make_rows(
    params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device, seeds: Sequence[int]
) -> SamplingRows:
    """Kernel arguments for len(params) rows, the last of them in the first slot."""
    slots = list(reversed(range(len(params))))
    states = make_states([params[s] for s in slots], device, [seeds[s] for s in slots])
    return states.rows(make_batch(slots, positions, device), len(slots))


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
) -> SamplerOutput:
    """Sample row i for slots[i] (i when left out), whose parameters are params[slots[i]]."""
    slots = range(len(logits)) if slots is None else slots
    positions = [5] * len(logits) if positions is None else positions
    sampler = DefaultSampler(make_states(params, logits.device), logits.shape[1])
    return sampler.sample(logits, make_batch(slots, positions, logits.device))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 in Python integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def exponential(word: int) -> float:
    """Exponential noise of a word, in double precision."""
    return -math.log1p(-min(max(word, 0.5) * 2.0**-32, 1 - 2.0**-24))


def gumbel(seed: int, position: int, token_id: int, purpose: int = 0) -> float:
    """The documented noise, in double precision."""
    return gumbels_of_group(seed, position, token_id // 64, purpose)[token_id % 64]


@cache
def gumbels_of_group(seed: int, position: int, group: int, purpose: int) -> list[float]:
    """The noise of the 64 ids of a group."""
    seed &= 2**64 - 1

    def words(index: int) -> tuple[int, int, int, int]:
        return philox((seed & 0xFFFFFFFF, seed >> 32), (index, position, purpose, 2))

    own = [exponential(word) for i in range(16) for word in words(16 * group + i)]
    a, b = words(2**31 + group // 2)[2 * (group % 2) :][:2]
    holder = b % 64
    least, gap = exponential(a) / 64, exponential(b - holder + 32) / 63
    lowest = min(e for i, e in enumerate(own) if i != holder)
    return [-math.log(least if i == holder else least + gap + e - lowest) for i, e in enumerate(own)]


def kept_ids(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that top-k, then top-p, then min-p leave, by sorting."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    best = logits[order[0]]
    if params.top_k > 0:
        kth = logits[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if logits[i] >= kth]
    weights = {i: math.exp((logits[i] - best) / params.temperature) for i in order}
    total, running = sum(weights.values()), 0.0
    for i in order:
        running += weights[i]
        if running >= params.top_p * total:
            order = [j for j in order if logits[j] >= logits[i]] if params.top_p < 1 else order
            break
    return sorted(i for i in order if weights[i] >= params.min_p)


def reference_scores(
    logits: Sequence[float], params: SamplingParams, seed: int, position: int
) -> dict[int, float]:
    """Score of every id that may be sampled; the best one is the sampled id."""
    if params.temperature == 0:
        return dict(enumerate(logits))
    return {
        i: logits[i] / params.temperature + gumbel(seed, position, i)
        for i in kept_ids(logits, params)
        if logits[i] > -math.inf
    }


def is_completed(word: Sequence[int], tokens: Sequence[int], token: int) -> bool:
    """Whether `token` after `tokens` completes the word."""
    return [*tokens, token][-len(word) :] == list(word)


def adjusted_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Sequence[int] = (),
) -> list[float]:
    """The logits after every option that changes them, one id at a time, in the order of the design."""
    adjusted = []
    for token, logit in enumerate(logits):
        x = logit
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x = -math.inf
        if any(is_completed(word, [*prompt, *output], token) for word in params.bad_words):
            x = -math.inf
        x += (params.logit_bias or {}).get(token, 0.0)
        if len(output) < params.min_tokens and token in (*params.stop_token_ids, *eos_token_ids):
            x = -math.inf
        count = list(output).count(token)
        if count or token in prompt:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        adjusted.append(x - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return adjusted


def log_softmax(logits: Sequence[float]) -> list[float]:
    """In double precision; an id that cannot come has minus infinity."""
    best = max(logits)
    log_sum = math.log(sum(math.exp(x - best) for x in logits))
    return [x - best - log_sum for x in logits]


def processed_logprobs(adjusted: Sequence[float], params: SamplingParams) -> list[float]:
    """Log-probabilities of the distribution that is sampled from: scaled, and filtered unless greedy."""
    if params.temperature == 0:
        return log_softmax(adjusted)
    kept = set(kept_ids(adjusted, params))
    return log_softmax([x / params.temperature if i in kept else -math.inf for i, x in enumerate(adjusted)])
