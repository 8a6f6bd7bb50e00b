"""Log-probabilities of prompt tokens, from the hidden states of prefill chunks, in pieces of bounded memory.

The logits after prompt token p score token p + 1. A chunk that nobody wants scored never runs the LM head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core_runner.errors import SchedulerOutputError
from core_runner.sampling.kernels.logprobs import logprobs
from core_runner.scheduling.output import IntArray, NewRequest, PromptLogprobs
from model_states import InputBatch, ModelState
from model_states.kernels.dispatch import use_triton
from model_states.staged import HostToDevice

# Per id of a row: fp32 logits and a temporary of the model's own; the torch twin adds two fp32 copies and a mask.
_KERNEL_ID_BYTES, _TWIN_ID_BYTES = 8, 20


class _Wish(NamedTuple):
    """A slot's prompt [prompt_len], how many best ids it wants, and its tokens that are scored already."""

    token_ids: IntArray
    num_best: int
    num_scored: int


class _Run(NamedTuple):
    """Tokens of one row that are scored in this step: where they lie in it, and the ids after them."""

    row: int
    num_best: int
    first: int
    next_ids: IntArray


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """What one step scored, on the device; m positions of several rows, one row after another."""

    runs: list[_Run]
    token_ids: torch.Tensor  # int32 [m, n + 1]
    values: torch.Tensor  # float32 [m, n + 1]
    ranks: torch.Tensor  # int32 [m]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What must be copied to the host, by name."""
        return {"prompt_ids": self.token_ids, "prompt_values": self.values, "prompt_ranks": self.ranks}

    def by_row(self, host: Mapping[str, npt.NDArray[Any]]) -> dict[int, PromptLogprobs]:
        """The host's copies of `tensors`, cut into what each batch row asked for."""
        result, start = {}, 0
        for run in self.runs:
            rows, width = slice(start, start + len(run.next_ids)), run.num_best + 1
            # The arrays are as wide as the widest wish, and views would keep all of them alive.
            result[run.row] = PromptLogprobs(
                host["prompt_ids"][rows, :width].copy(),
                host["prompt_values"][rows, :width].copy(),
                host["prompt_ranks"][rows].copy(),
            )
            start = rows.stop
        return result


class PromptScorer:
    """Scores the prompts of slots that ask for it. A step without such a slot costs nothing.

    piece_bytes: most memory for the logits of a piece and the work on them. row_bytes: that of one position,
    which is computed whatever it takes. max_num_tokens: tokens of a step.
    """

    def __init__(self, model_state: ModelState, piece_bytes: int, max_num_tokens: int) -> None:
        device = model_state.config.device
        self._model_state = model_state
        self._vocab_size = model_state.vocab_size
        self._packed = torch.zeros(2 * max_num_tokens, dtype=torch.int64, device=device)
        self._transfer = HostToDevice(device)
        self._wishes: dict[int, _Wish] = {}
        id_bytes = _KERNEL_ID_BYTES if use_triton(self._packed) else _TWIN_ID_BYTES
        self.row_bytes = self._vocab_size * id_bytes
        max_rows = max(piece_bytes // self.row_bytes, 1)
        # Pieces then start at multiples of 16 bytes; Triton would compile its kernel anew for others.
        self._max_rows = max_rows - max_rows % 4 if max_rows > 4 else max_rows

    @property
    def has_wishes(self) -> bool:
        """Whether any slot has tokens left to be scored."""
        return bool(self._wishes)

    def validate(self, new_requests: Sequence[NewRequest]) -> None:
        """Raise `SchedulerOutputError` for an admission that skips a position which must be scored."""
        for new in new_requests:
            wants = new.sampling_params.prompt_logprobs is not None
            if wants and new.num_scored_tokens < min(new.num_computed_tokens, new.prompt_len - 1):
                raise SchedulerOutputError(
                    f"request {new.req_id!r} wants prompt_logprobs, and num_computed_tokens="
                    f"{new.num_computed_tokens} skips positions behind num_scored_tokens="
                    f"{new.num_scored_tokens}; shorten its prefix hit"
                )

    def add(self, new: NewRequest) -> None:
        """Note what an admitted request wants scored."""
        num_best = new.sampling_params.prompt_logprobs
        if num_best is not None and new.num_scored_tokens < new.prompt_len - 1:
            token_ids = np.asarray(new.prefill_token_ids[: new.prompt_len], dtype=np.int32)
            self._wishes[new.slot] = _Wish(token_ids, min(num_best, self._vocab_size), new.num_scored_tokens)

    def remove(self, slot: int) -> None:
        """Forget a slot."""
        self._wishes.pop(slot, None)

    def score(self, batch: InputBatch, hidden_states: torch.Tensor) -> ScoredTokens | None:
        """Score the step's prompt tokens from hidden_states [num_tokens_padded, hidden_size]; None if none ask.

        Nothing waits for the device.
        """
        runs = self._find_runs(batch) if self._wishes else []
        if not runs:
            return None
        tokens = np.concatenate([np.arange(run.first, run.first + len(run.next_ids)) for run in runs])
        next_ids = np.concatenate([run.next_ids for run in runs])
        count, num_best = len(tokens), max(run.num_best for run in runs)
        self._transfer.copy(np.concatenate([tokens, next_ids]).astype(np.int64, copy=False), self._packed)
        rows, chosen = self._packed[:count], self._packed[count : 2 * count]
        scored = ScoredTokens(
            runs,
            chosen.new_empty(count, num_best + 1, dtype=torch.int32),
            chosen.new_empty(count, num_best + 1, dtype=torch.float32),
            chosen.new_empty(count, dtype=torch.int32),
        )
        scored.token_ids[:, 0] = chosen
        for start in range(0, count, self._max_rows):
            piece = slice(start, start + self._max_rows)
            self._score_piece(hidden_states[rows[piece]], scored, piece)
        return scored

    def _find_runs(self, batch: InputBatch) -> list[_Run]:
        runs = []
        starts, computed = batch.query_start_loc_np, batch.num_computed_tokens_np
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            wish = self._wishes.get(slot)
            if wish is None:
                continue
            last = len(wish.token_ids) - 1
            end = int(computed[row] + batch.num_scheduled_tokens_np[row])
            begin = max(int(computed[row]), wish.num_scored)
            if begin < min(end, last):
                next_ids = wish.token_ids[begin + 1 : min(end, last) + 1]
                runs.append(_Run(row, wish.num_best, int(starts[row] - computed[row]) + begin, next_ids))
            if end >= last:
                del self._wishes[slot]
        return runs

    def _score_piece(self, hidden_states: torch.Tensor, scored: ScoredTokens, piece: slice) -> None:
        """A function of its own, so that the logits of one piece are gone before the next ones come."""
        logits = self._model_state.compute_logits(hidden_states)
        if logits.stride(-1) != 1:  # the kernel takes any stride of rows, but columns side by side
            logits = logits.contiguous()
        ids, values, ranks = (t[piece] for t in (scored.token_ids, scored.values, scored.ranks))
        num_best = ids.shape[1] - 1
        if num_best:
            ids[:, 1:] = logits[:, : self._vocab_size].topk(num_best, dim=1).indices
        logprobs(logits, self._vocab_size, ids, values, ranks)
