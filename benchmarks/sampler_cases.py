"""What the sampler's benchmark runs: logits, a batch of requests with a history, and the options of each case."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from core_runner.sampling.logit_options import LogitOptions
from core_runner.sampling.option_rows import TokenHistory
from core_runner.sampling.sampler import DefaultSampler
from core_runner.sampling.states import SamplerStates
from core_runner.sampling_params import SamplingParams
from model_states.batch import InputBatch

PROMPT_LEN, OUTPUT_LEN = 256, 256


class Case(NamedTuple):
    """Options of every row, and how often the logits are read: by ids, in bf16 unless said otherwise."""

    options: dict[str, Any]
    reads: str


CASES = {
    "greedy": Case({"temperature": 0.0}, "1"),
    "temperature": Case({"temperature": 1.0}, "1"),
    "temperature 0.5": Case({"temperature": 0.5}, "1"),
    "top-p 0.9": Case({"top_p": 0.9}, "1, and groups above the sampled logit: up to 2"),
    "top-k 50, top-p 0.9": Case({"top_k": 50, "top_p": 0.9}, "1, and some 50 groups of 64"),
    "min-p 0.1": Case({"min_p": 0.1}, "1"),
    "penalties": Case(
        {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        "1, with a bit for each id; some 500 ids twice",
    ),
    "bias": Case(
        {"logit_bias": dict.fromkeys(range(0, 900, 3), 0.5)}, "1, with a bit for each id; 300 ids twice"
    ),
    "allowed": Case({"allowed_token_ids": range(0, 1000, 2)}, "1, with masks"),
    "logprobs 5": Case({"logprobs": 5}, "2"),
    "greedy, logprobs 5": Case({"temperature": 0.0, "logprobs": 5}, "2"),
}


def make_logits(
    kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """ "flat": standard normal, the worst case. "peaked": as of a language model, 30 ids above a wide tail."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num_rows, vocab_size, generator=generator, device=device)
    if kind == "peaked":
        x *= 2.5
        best = torch.randint(0, vocab_size, (num_rows, 30), generator=generator, device=device)
        lead = 14 + 6 * torch.exp(-torch.arange(30, device=device) / 6)
        x.scatter_(1, best, lead.expand(num_rows, -1) + x.gather(1, best) / 2.5)
    return x.to(dtype)


def make_batch(num_rows: int, device: torch.device) -> InputBatch:
    """One decode step of `num_rows` requests, each in the slot of its row."""
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    starts = np.arange(num_rows + 1, dtype=np.int32)
    length = PROMPT_LEN + OUTPUT_LEN
    return InputBatch(
        num_reqs=num_rows,
        num_tokens=num_rows,
        idx_mapping=slots,
        idx_mapping_np=starts[:-1],
        num_scheduled_tokens_np=np.ones(num_rows, dtype=np.int32),
        num_computed_tokens_np=np.full(num_rows, length - 1, dtype=np.int32),
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_np=starts,
        seq_lens=torch.full_like(slots, length),
        input_ids=torch.ones(num_rows, dtype=torch.int64, device=device),
        positions=torch.full((num_rows,), length - 1, dtype=torch.int64, device=device),
        block_tables=(),
        slot_mappings=(),
        logits_indices=torch.arange(num_rows, device=device),
        expanded_idx_mapping=slots,
        expanded_local_pos=torch.zeros_like(slots),
        cu_num_logits=torch.from_numpy(starts).to(device),
        cu_num_logits_np=starts,
        max_query_len=1,
        max_seq_len=length,
    )


def make_sampler(case: Case, num_rows: int, vocab_size: int, device: torch.device) -> DefaultSampler:
    """A sampler whose slots all ask for the case's options, each with a seed of its own."""
    generator = torch.Generator().manual_seed(1)
    length = PROMPT_LEN + OUTPUT_LEN
    tokens = torch.randint(0, vocab_size, (num_rows + 1, length), dtype=torch.int32, generator=generator)
    history = TokenHistory(
        tokens.to(device),
        torch.full((num_rows + 1,), length, dtype=torch.int32, device=device),
        torch.full((num_rows + 1,), PROMPT_LEN, dtype=torch.int32, device=device),
    )
    states = SamplerStates(num_rows, device, LogitOptions(num_rows, vocab_size, history, (), device))
    params = SamplingParams(**case.options)
    for slot in range(num_rows):
        states.add(slot, params, 7919 * slot)
    states.apply_staged_writes()
    return DefaultSampler(states, vocab_size)


def straightforward(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """The same case as one writes it in torch: a float32 copy, sort, softmax, multinomial. Ids [num_rows].

    Penalties and bias are one scatter each over prepared indices, so that only the vocabulary's work counts.
    """
    options, x = case.options, logits.float()
    if "allowed_token_ids" in options:
        ids = torch.arange(0, 1000, 2, device=x.device)
        x = torch.full_like(x, -math.inf).index_copy_(1, ids, x[:, ids])
    if "repetition_penalty" in options or "logit_bias" in options:
        ids = torch.arange(0, 900, 3, device=x.device).expand(len(x), -1)
        x = x.scatter_add(1, ids, torch.full(ids.shape, 0.5, device=x.device))
    if "logprobs" in options:
        torch.log_softmax(x, dim=1).topk(options["logprobs"], dim=1)
    temperature = options.get("temperature", 1.0)
    if temperature == 0:
        return x.argmax(dim=1)
    x = x / temperature
    if "top_k" in options or "top_p" in options:
        values, ids = x.sort(dim=1, descending=True)
        values[:, options.get("top_k", values.shape[1]) :] = -math.inf
        probs = values.softmax(dim=1)
        mass = probs.cumsum(dim=1) - probs
        probs = probs.masked_fill(mass >= options.get("top_p", 1.0), 0.0)
        return ids.gather(1, torch.multinomial(probs, 1))[:, 0]
    probs = x.softmax(dim=1)
    if "min_p" in options:
        probs = probs.masked_fill(probs < options["min_p"] * probs.amax(dim=1, keepdim=True), 0.0)
    return torch.multinomial(probs, 1)[:, 0]
