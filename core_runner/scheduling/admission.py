"""What is refused before it waits: requests that could never run."""

from __future__ import annotations

from core_runner.errors import RequestError
from core_runner.request import Request
from core_runner.scheduling.cache_manager import CacheManager
from core_runner.scheduling.step import SchedulerConfig


class AdmissionRules:
    """Checks a new request against the limits of the configuration and of the block pools."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self._config = config
        self._cache = cache

    def max_total_len(self, request: Request) -> int:
        """Most tokens of prompt and output; raises `RequestError` if they could never run."""
        name, prompt_len = f"request {request.req_id!r}", request.prompt_len
        self._check_prompt(name, request)
        limit, max_tokens = self._config.max_model_len, request.sampling_params.max_tokens
        if max_tokens is None:
            limit = max(prompt_len + 1, self._roomy_len(limit))
        else:
            limit = min(prompt_len + max_tokens, limit)
        self._check_room(name, prompt_len, limit)
        return limit

    def _check_prompt(self, name: str, request: Request) -> None:
        prompt_len, limit, vocab_size = (
            request.prompt_len,
            self._config.max_model_len,
            self._config.vocab_size,
        )
        if prompt_len == 0:
            raise RequestError(f"{name}: the prompt is empty; give at least one token")
        if prompt_len + 1 > limit:
            raise RequestError(
                f"{name}: a prompt of {prompt_len} tokens and one output exceed max_model_len={limit}; "
                "shorten the prompt or raise max_model_len"
            )
        largest = int(request.prompt_token_ids.max())
        if vocab_size is not None and largest >= vocab_size:
            raise RequestError(
                f"{name}: prompt token id {largest} is outside the vocabulary of {vocab_size} ids"
            )

    def _roomy_len(self, limit: int) -> int:
        """Longest total that fits when nothing is asked for; the last token is never computed."""
        if not self._config.enable_chunked_prefill:
            limit = min(limit, self._config.max_num_batched_tokens + 1)
        return self._cache.max_tokens_alone(limit - 1) + 1

    def _check_room(self, name: str, prompt_len: int, limit: int) -> None:
        sizes = f"{name}: {prompt_len} prompt and {limit - prompt_len} output tokens"
        budget = self._config.max_num_batched_tokens
        if not self._config.enable_chunked_prefill and limit - 1 > budget:
            # After a preemption all of them may have to be computed again in one step.
            raise RequestError(
                f"{sizes} exceed max_num_batched_tokens={budget}, and this model cannot prefill in chunks; "
                "lower max_tokens or raise max_num_batched_tokens"
            )
        shortage = self._cache.find_shortage(limit - 1)
        if shortage is not None:
            group, needed, usable = shortage
            raise RequestError(
                f"{sizes} need {needed} blocks of cache group {group}, which has {usable}; "
                "lower max_tokens or raise num_blocks"
            )
