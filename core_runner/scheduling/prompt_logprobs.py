"""What prompt log-probabilities may cost, asked before a request is admitted. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from core_runner.errors import RequestError
from core_runner.request import Request

# What the results of `outputs.py` take in CPython, measured: a dict for each position, an entry for each id.
_POSITION_BYTES, _ENTRY_BYTES = 250, 150


@dataclass(frozen=True, slots=True)
class PromptLogprobsLimits:
    """Bounds on prompt log-probabilities, in bytes.

    row_bytes: working memory of one position on the device. piece_bytes, result_bytes: `prompt_logprobs_bytes`
    and `prompt_logprobs_result_bytes` of `RunnerConfig`. vocab_size: ids of the model.
    """

    row_bytes: int
    piece_bytes: int
    result_bytes: int
    vocab_size: int

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request whose prompt log-probabilities do not fit."""
        wanted = request.sampling_params.prompt_logprobs
        if wanted is None or request.prompt_len < 2:
            return
        name = f"request {request.req_id!r}: prompt_logprobs={wanted}"
        if self.row_bytes > self.piece_bytes:
            raise RequestError(
                f"{name} needs {self.row_bytes} bytes for the logits of one position, more than "
                f"prompt_logprobs_bytes={self.piece_bytes}; raise it"
            )
        entries = min(wanted, self.vocab_size) + 1
        estimate = (request.prompt_len - 1) * (_POSITION_BYTES + entries * _ENTRY_BYTES)
        if estimate > self.result_bytes:
            raise RequestError(
                f"{name} for {request.prompt_len} prompt tokens gives a result of about {estimate} bytes "
                f"({estimate / 2**30:.3g} GiB), more than prompt_logprobs_result_bytes={self.result_bytes}; "
                "ask for fewer, shorten the prompt or raise it"
            )
