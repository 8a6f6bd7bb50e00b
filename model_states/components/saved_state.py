"""Recurrent state outside of an engine: kept when a request ends, saved to a file, brought along by another request.

    keeper = StateKeeper()
    output = llm.generate({"prompt_token_ids": ids, "model_inputs": {"keep_state": keeper}}, params)[0]
    tokens = [*ids, *output.outputs[0].token_ids]
    keeper.take(tokens).save("conversation.safetensors")
    saved = SavedState.load("conversation.safetensors")
    other.generate(saved.prompt([*tokens[saved.num_restored_tokens :], *next_ids]), params)

The state ends before the last token that was given out, of which nothing has been computed: it comes with the next
ones. Only what is behind the state is computed. Components keep a state in rows of pools (`SavedRows`);
`components.state_transfer` takes it from there and brings it back.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_states.interface import Component

_TOKENS = "token_ids"


@dataclass(frozen=True, slots=True, eq=False)
class SavedRows:
    """Where the state of a request is, in one cache group: nothing in it depends on sizes of blocks but the place.

    Entry e is row table[slot, e // entries_per_block] * entries_per_block + e % entries_per_block of each pool.
    group_index: of the group's table. pools: "layer.tensor" -> [num_rows, *shape].
    """

    group_index: int
    entries: range
    entries_per_block: int
    pools: Mapping[str, torch.Tensor]

    def indices(self, table: torch.Tensor, slot: int) -> torch.Tensor:
        """Rows of a slot's entries, int64 [num_entries]; they are found on the device, so that nobody waits."""
        entries = torch.arange(self.entries.start, self.entries.stop, device=table.device)
        blocks = table[slot].index_select(0, entries // self.entries_per_block).long()
        return blocks * self.entries_per_block + entries % self.entries_per_block


class StatePart(Component, ABC):
    """A component whose part of a request's state can be taken out, and written to another request's blocks."""

    @abstractmethod
    def saved_rows(self, num_tokens: int) -> list[SavedRows]:
        """What the tokens from `num_tokens` on need of a request that has computed so many, at least one."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The state after `token_ids`. tensors: "layer.tensor" -> its entries [num_entries, *shape], on the CPU.

    Raises `ValueError` for what is none. Both are copied, so that a list that grows changes no request.
    """

    token_ids: Sequence[int]
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        """Take copies."""
        try:
            token_ids, tensors = tuple(map(operator.index, self.token_ids)), dict(self.tensors)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a saved state is token ids and tensors by name ({error})") from error
        if not all(isinstance(name, str) for name in tensors):
            raise ValueError("a saved state is token ids and tensors by name; a name is no string")
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "tensors", tensors)

    @property
    def num_restored_tokens(self) -> int:
        """Tokens that a request with this state need not compute."""
        return len(self.token_ids)

    def prompt(self, next_token_ids: Sequence[int]) -> dict[str, Any]:
        """A prompt for `LLM.generate`: the state's tokens and at least one more, the first of which follows them."""
        return {
            "prompt_token_ids": [*self.token_ids, *next_token_ids],
            "model_inputs": {"saved_state": self},
        }

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        save_file({_TOKENS: torch.tensor(self.token_ids), **self.tensors}, path)

    @classmethod
    def load(cls, path: str | Path) -> SavedState:
        """Read what `save` wrote. Raises `ValueError` for a file of something else."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no safetensors file ({error}); give one that `save` wrote"
            ) from error
        if _TOKENS not in tensors:
            raise ValueError(f"{path} holds no saved state; give a file that `save` wrote")
        return cls(tensors.pop(_TOKENS).tolist(), tensors)


class StateKeeper:
    """Takes the state of a request when it ends; a request names it as model input "keep_state".

    It serves one request after another, each of which is taken before the next; completions of one prompt (`n`) are
    several.
    """

    def __init__(self) -> None:
        self._kept: tuple[int, dict[str, torch.Tensor], torch.cuda.Event | None] | None = None
        self._left_by: set[str] = set()

    def keep(self, req_id: str, num_tokens: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """For the component: a request's state after so many tokens, in tensors that nobody else writes.

        They begin to move to pinned memory at once: on the device they would be as much as a request's own blocks.
        """
        copied, on_host = None, {}
        for name, tensor in tensors:
            on_host[name] = tensor.to("cpu", non_blocking=True)
            if tensor.is_cuda:
                copied = copied or torch.cuda.Event()
        if copied is not None:
            copied.record()
        self._kept = num_tokens, on_host, copied
        self._left_by.add(req_id)

    def take(self, token_ids: Sequence[int]) -> SavedState:
        """The state, given all tokens of the request, prompt and output; nothing is kept any more.

        Raises `ValueError` where none was kept, where several requests left one, where it covers more tokens than
        these, and where the request failed.
        """
        if self._kept is None:
            raise ValueError("no state was kept: the request has not ended, or its model keeps none")
        num_tokens, tensors, copied = self._kept
        if num_tokens > len(token_ids):
            raise ValueError(
                f"the state covers {num_tokens} tokens, and {len(token_ids)} are given; give all tokens of the "
                "request, prompt and output"
            )
        self._kept, left_by = None, self._left_by
        self._left_by = set()
        if len(left_by) > 1:
            raise ValueError(
                f"{len(left_by)} requests left their state here, and nobody can tell them apart; give each a "
                "StateKeeper of its own, and keep_state to prompts of one completion alone"
            )
        if copied is not None:
            copied.synchronize()
            # Pinned memory is scarce, and whoever takes a state may keep it for long.
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise ValueError("the state is not finite: the request failed, so there is nothing to go on from")
        return SavedState(list(token_ids[:num_tokens]), tensors)
