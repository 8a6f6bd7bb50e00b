"""`SamplingParams`: what one request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from core_runner.errors import RequestError

MAX_LOGPROBS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. Validated on construction; a bad value raises `RequestError`.

    temperature: 0 is greedy; any positive finite value scales the logits by its inverse.
    top_k: keep the k most likely ids (0 or -1: all). top_p: keep the smallest set whose mass reaches p, after
    top_k. min_p: keep ids of at least min_p times the largest probability. Ties at a threshold are kept.
    seed: the request's stream; None draws one at admission, which the request keeps through preemption.
    max_tokens: most tokens to generate; None is what `max_model_len` leaves.
    stop_token_ids: ids that end the request beside the model's own end ids. stop: strings that end it, cut
    from the text. ignore_eos: do not end at the model's end ids (stop_token_ids still do).
    logprobs: None for none; n gives the sampled id's and the n best ids' log-probabilities of the unscaled logits.
    priority: smaller runs earlier under the "priority" policy. cache_salt: prefix blocks are shared only among
    requests of one salt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Normalise `stop` and `stop_token_ids` to tuples and refuse values outside their range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", tuple(s for s in stop if s != "") if stop == ("",) else stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_number("temperature", 0.0, math.inf)
        self._check_number("top_p", 0.0, 1.0, open_low=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_int("top_k", -1, 2**31 - 1)
        self._check_int("priority", -(2**31), 2**31 - 1)
        self._check_int("seed", -(2**63), 2**63 - 1, optional=True)
        self._check_int("max_tokens", 1, 2**31 - 1, optional=True)
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(f"stop={self.stop!r} must be a non-empty string or several")
        if any(not isinstance(t, Integral) or isinstance(t, bool) or t < 0 for t in self.stop_token_ids):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} must be token ids (integers, 0 or more)")

    def _check_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < low or value > high or (open_low and value == low):
            bracket = "(" if open_low else "["
            raise RequestError(f"{name}={value!r} must be a finite number in {bracket}{low}, {high}]")

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
            raise RequestError(f"{name}={value!r} must be an integer in [{low}, {high}]")
