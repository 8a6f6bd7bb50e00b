"""The likeliest token that the rules of transcription allow, and its log-probability under them.

Row i of logits belongs to slot s = slots[i] and to token t = indices[i] of the step, so what is chosen has position
p = positions[t] + 1, and the tokens since the prompt are y = past[s, prompt_len : p - 1] and input_ids[t], which is
written to past[s, p - 1]. Ids from `first_timestamp` on are times. Where timestamps are asked for, the allowed ids are

    text   [end_id if y ends in a single time, else 0 (none where y is empty), first_timestamp - 1)
    times  [the last time of y, plus 1 unless y ends in a single one, vocab_size), none where y ends in a pair of them,
           at most first_timestamp + most_initial where y is empty

and all ids otherwise, without those whose flags ask for it: bit 0 always, bit 1 where y is empty. With m and l the
maximum and the logarithm of the sum of the exponentials of each kind, in fp32, the times alone count where
l(times) > m(text); the lowest id of those with the largest logit is chosen, and

    values[i] = logit[i, token_ids[i]] - l(all that count)

A slot may name one id instead, which is chosen whatever the rules say, and all ids count then.

failed[i] is set, and token_ids[i] is 0, where what counts holds a NaN or nothing is left.

logits [n, >= vocab_size] (fp32, bf16 or fp16, any stride of rows); slots int32 [n], indices int64 [n]; positions and
input_ids int64 [num_tokens]; past int32 [num_slots, max_len]; rules int32 [num_slots, 4]: prompt_len, whether
suppressed ids are forbidden, whether timestamps are asked for, and the one id or -1; flags uint8 [vocab_size];
token_ids int64, failed bool and values fp32 [n]. Here y ends in a pair too where it has one token, which is a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_states.kernels.dispatch import use_triton
from model_states.kernels.sizes import next_power_of_2
from model_states.kernels.triton_import import tl, triton

ALWAYS, AT_FIRST = 1, 2  # bits of flags
_BLOCK = 4096  # ids that a row's program looks at together


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """Whose the rows are; see above."""

    slots: torch.Tensor
    indices: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What is allowed; see above. first_timestamp: vocab_size where there are no times. most_initial: None for any."""

    past: torch.Tensor
    rules: torch.Tensor
    flags: torch.Tensor
    vocab_size: int
    first_timestamp: int
    end_id: int
    most_initial: int | None

    @property
    def last_initial(self) -> int:
        """The last id that may begin a text."""
        return self.vocab_size if self.most_initial is None else self.first_timestamp + self.most_initial


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen; see above."""

    token_ids: torch.Tensor
    failed: torch.Tensor
    values: torch.Tensor


def allowed_torch(x: torch.Tensor, rules: ChoiceRules, rows: ChoiceRows) -> torch.Tensor:
    """Which ids may be chosen of logits x [n, vocab_size], bool of that shape; writes the last tokens to `past`."""
    first, ids = rules.first_timestamp, torch.arange(rules.vocab_size, device=x.device)
    slots, positions = rows.slots.to(torch.int64), rows.positions[rows.indices] + 1
    last = rows.input_ids[rows.indices]
    rules.past[slots, positions - 1] = last.to(torch.int32)
    tokens, places = rules.past[slots], torch.arange(rules.past.shape[1], device=x.device)
    prompt_len, suppress, wanted, only = rules.rules[slots].unsqueeze(-1).unbind(1)
    positions, last = positions[:, None], last[:, None]
    num_sampled = positions - prompt_len
    is_first = num_sampled == 0
    bits = torch.where(suppress > 0, ALWAYS + AT_FIRST * is_first.to(torch.int32), 0)
    is_free = (rules.flags & bits) == 0

    was_time = (tokens >= first) & (places >= prompt_len) & (places < positions)
    last_place = torch.where(was_time, places, -1).amax(1, keepdim=True)
    last_time = torch.where(last_place < 0, -1, tokens.gather(1, last_place.clamp(min=0)))
    ends_in_time = ~is_first & (last >= first)
    is_pair = (num_sampled < 2) | (tokens.gather(1, (positions - 2).clamp(min=0)) >= first)
    is_open, is_closed = ends_in_time & ~is_pair, ends_in_time & is_pair
    # A pair's second may equal its first; what comes later is later, so that 0.00 is not said again and again.
    earliest = torch.where(is_open, last_time, last_time + 1)
    times = (ids >= first) & (ids >= earliest) & ~is_closed & ~(is_first & (ids > rules.last_initial))
    text = (ids < first - 1) & ~is_first & ~(is_open & (ids < rules.end_id))
    times, text = is_free & times & (wanted > 0), is_free & (text | (wanted <= 0))
    time_mass = x.masked_fill(~times, -torch.inf).logsumexp(1, keepdim=True)
    best_text = x.masked_fill(~text, -torch.inf).amax(1, keepdim=True)
    allowed = torch.where(time_mass > best_text, times, text | times)
    return torch.where(only < 0, allowed, ids == only)


def choose_token_torch(logits: torch.Tensor, rules: ChoiceRules, rows: ChoiceRows, out: Choice) -> None:
    """The formula above."""
    x = logits[:, : rules.vocab_size].float()
    allowed = allowed_torch(x, rules, rows)
    is_fixed = rules.rules[rows.slots.to(torch.int64), 3:] >= 0
    counted = x.masked_fill(~(allowed | is_fixed), -torch.inf)
    x = x.masked_fill(~allowed, -torch.inf)
    best, top = x.amax(1, keepdim=True), counted.amax(1, keepdim=True)
    failed = top.isnan() | (best == -torch.inf)
    ids = torch.arange(rules.vocab_size, device=x.device)
    lowest = torch.where(x == best, ids, rules.vocab_size).amin(1, keepdim=True)
    # Differences of equal infinities are NaN, hence the tests for equality.
    shifted = torch.where(counted == top, 0.0, counted - top)
    values = torch.where(best == top, 0.0, best - top)[:, 0] - shifted.logsumexp(1)
    out.token_ids.copy_(torch.where(failed, 0, lowest)[:, 0])
    out.failed.copy_(failed[:, 0])
    out.values.copy_(values)


@triton.jit
def _take(
    best, best_id, total, logits, flags, bits, ids, inside, loads
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Largest logit, its id and the sum of exp(logit - largest) of each lane, with one more id where it is inside."""
    inside &= (tl.load(flags + ids, mask=loads, other=0).to(tl.int32) & bits) == 0
    x = tl.load(logits + ids, mask=loads, other=0.0).to(tl.float32)
    x = tl.where(inside, x, float("-inf"))
    # Differences of equal infinities are NaN, hence the test for equality.
    ratio = tl.exp(tl.where(x == best, 0.0, -tl.abs(x - best)))
    total = tl.where(x > best, total * ratio + 1.0, total + tl.where(inside, ratio, 0.0))
    return tl.maximum(best, x), tl.where(x > best, ids, best_id), total


@triton.jit
def _best_of(logits, flags, bits, first, last, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Largest logit of the ids in [first, last) whose flags have none of `bits`, its lowest id, and the sum of
    exp(logit - largest); the sum is NaN where one of them is."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    # Masks that change at multiples of 16 let a thread load as many ids at once; the last few ids come one by one.
    whole = last // 16 * 16
    for start in range(first // BLOCK * BLOCK, whole, BLOCK):
        ids = start + lane
        inside = (ids >= first) & (ids < whole)
        best, best_id, total = _take(best, best_id, total, logits, flags, bits, ids, inside, ids < whole)
    ids = whole + lane
    inside = (ids >= first) & (ids < last)
    best, best_id, total = _take(best, best_id, total, logits, flags, bits, ids, inside, inside)
    largest = tl.max(best, 0)
    total = tl.sum(total * tl.where(best == largest, 1.0, tl.exp(best - largest)), 0)
    return largest, tl.min(tl.where(best == largest, best_id, 2147483647), 0), total


@triton.jit
def _choose_token_kernel(
    token_ids,
    failed,
    values,
    logits,
    logits_stride,
    slots,
    indices,
    positions,
    input_ids,
    past,
    max_len,
    rules,
    flags,
    vocab_size,
    first_timestamp,
    end_id,
    last_initial,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot, token = tl.load(slots + row), tl.load(indices + row)
    position = tl.load(positions + token).to(tl.int32) + 1
    last = tl.load(input_ids + token).to(tl.int32)
    prompt_len, only = tl.load(rules + slot * 4), tl.load(rules + slot * 4 + 3)
    is_free = only < 0
    suppress = (tl.load(rules + slot * 4 + 1) > 0) & is_free
    wanted = (tl.load(rules + slot * 4 + 2) > 0) & is_free
    own = past + slot.to(tl.int64) * max_len
    tl.store(own + position - 1, last)

    places = tl.arange(0, PLACES)
    tokens = tl.load(own + places, mask=(places >= prompt_len) & (places < position - 1), other=-1)
    is_time = tokens >= first_timestamp
    last_place = tl.max(tl.where(is_time, places, -1), 0)
    last_time = tl.max(tl.where(is_time & (places == last_place), tokens, -1), 0)
    before_is_time = tl.max((is_time & (places == position - 2)).to(tl.int32), 0) > 0
    is_first = position == prompt_len
    ends_in_time = (position > prompt_len) & (last >= first_timestamp)
    is_pair = (position < prompt_len + 2) | before_is_time
    is_open = ends_in_time & (is_pair == 0)
    last_time = tl.where(ends_in_time, last, last_time)
    bits = tl.where(suppress, tl.where(is_first, 3, 1), 0)

    text_from = tl.where(is_first & wanted, first_timestamp, tl.where(is_open & wanted, end_id, 0))
    text_to = tl.where(wanted, first_timestamp - 1, vocab_size)
    time_from = tl.maximum(first_timestamp, tl.where(is_open, last_time, last_time + 1))
    time_from = tl.where(wanted & ((ends_in_time & is_pair) == 0), time_from, vocab_size)
    time_to = tl.where(is_first, tl.minimum(last_initial + 1, vocab_size), vocab_size)
    x = logits + row.to(tl.int64) * logits_stride
    best_text, text_id, text_total = _best_of(x, flags, bits, text_from, text_to, BLOCK)
    best_time, time_id, time_total = _best_of(x, flags, bits, time_from, time_to, BLOCK)

    # Where no time is allowed the left side is -inf, which is larger than nothing.
    is_time = (best_time + tl.log(time_total) > best_text) & (text_total == text_total)
    apart = tl.where(best_time == best_text, 0.0, best_time - best_text)
    total = tl.where(is_time, time_total, text_total + time_total * tl.exp(apart))
    top = tl.where(is_time, best_time, best_text)
    chosen = tl.where(is_free, tl.where(is_time, time_id, text_id), only)
    best = tl.where(is_free, top, tl.load(x + only, mask=is_free == 0, other=0.0).to(tl.float32))
    is_bad = (total != total) | (best == float("-inf"))
    tl.store(token_ids + row, tl.where(is_bad, 0, chosen).to(tl.int64))
    tl.store(failed + row, is_bad)
    tl.store(values + row, tl.where(best == top, 0.0, best - top) - tl.log(total))


def choose_token_triton(logits: torch.Tensor, rules: ChoiceRules, rows: ChoiceRows, out: Choice) -> None:
    """Launch one program a row."""
    _choose_token_kernel[(len(logits),)](
        *(out.token_ids, out.failed, out.values, logits, logits.stride(0)),
        *(rows.slots, rows.indices, rows.positions, rows.input_ids),
        *(rules.past, rules.past.shape[1], rules.rules, rules.flags),
        *(rules.vocab_size, rules.first_timestamp, rules.end_id, rules.last_initial),
        PLACES=next_power_of_2(rules.past.shape[1]),
        BLOCK=min(_BLOCK, next_power_of_2(rules.vocab_size)),
        num_warps=8,
    )


def choose_token(logits: torch.Tensor, rules: ChoiceRules, rows: ChoiceRows, out: Choice) -> None:
    """Write `out`, and the rows' last tokens to `rules.past`."""
    op = choose_token_triton if use_triton(logits) else choose_token_torch
    op(logits, rules, rows, out)
