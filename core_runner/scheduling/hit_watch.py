"""One warning when prompts repeat and the prefix cache never helps: caching that costs and brings nothing is silent."""

from __future__ import annotations

import logging

from core_runner.request import Request

logger = logging.getLogger(__name__)

_LEAD = 16  # tokens by which two prompts count as the same beginning
_MAX_LEADS = 4096
_PATIENCE = 32


class HitWatch:
    """Counts prompts that begin as an earlier one did, until the first hit. alignment: hits are multiples of it."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._leads: set[tuple[bytes, str, tuple[tuple[str, bytes], ...]]] = set()
        self._num_repeats = self._longest = 0
        self._is_done = False

    def note(self, request: Request, num_cached: int) -> None:
        """Take in a request's first admission and its hit."""
        if self._is_done:
            return
        if num_cached:
            self._is_done, self._leads = True, set()
            return
        if request.prompt_len < _LEAD or (request.model_inputs and not request.input_keys):
            return
        # Only what may share blocks can repeat: equal salts, and model inputs of equal content.
        inputs = tuple(sorted(request.input_keys.items()))
        lead = (request.prompt_token_ids[:_LEAD].tobytes(), request.cache_salt, inputs)
        if lead in self._leads:
            self._num_repeats += 1
            self._longest = max(self._longest, request.prompt_len)
        elif len(self._leads) < _MAX_LEADS:
            self._leads.add(lead)
        if self._num_repeats == _PATIENCE:
            self._is_done, self._leads = True, set()
            logger.warning(
                "prefix cache: %d prompts began with the same %d tokens as an earlier one, and none was hit. A hit is "
                "a multiple of %d tokens, by the block sizes of all cache groups, and shorter than the prompt; the "
                "longest of these had %d. Use smaller blocks (block_size, model_options), or more (num_blocks).",
                _PATIENCE,
                _LEAD,
                self._alignment,
                self._longest,
            )
