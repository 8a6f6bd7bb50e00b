"""`SamplingParams`: what one request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from core_runner.errors import RequestError

MAX_LOGPROBS = 256
_INT32_MAX = 2**31 - 1


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
    logprobs: None for none; n gives log-probabilities of the sampled id and of the n best ids, of the logits
    before temperature and filters. priority: smaller runs earlier under the "priority" policy. cache_salt:
    prefix blocks are shared only among requests of one salt.
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
        """Turn values into plain Python ones and refuse those of a wrong type or outside their range."""
        self._check_number("temperature", 0.0, math.inf)
        self._check_number("top_p", 0.0, 1.0, open_low=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_int("top_k", -1, _INT32_MAX)
        self._check_int("priority", -(2**31), _INT32_MAX)
        self._check_int("seed", -(2**63), 2**63 - 1, optional=True)
        self._check_int("max_tokens", 1, _INT32_MAX, optional=True)
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_type("ignore_eos", bool)
        self._check_type("skip_special_tokens", bool)
        self._check_type("cache_salt", str)
        self._check_stop()
        self._check_stop_token_ids()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        number = _as_float(value)
        if number is None or not low <= number <= high or (open_low and number == low):
            allowed = f"{'(' if open_low else '['}{low}, {high}]" if high < math.inf else f"{low} or more"
            raise RequestError(f"{name}={value!r} must be a finite number, {allowed}")
        self._set(name, number)

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value) or not low <= int(value) <= high:
            none = "None or " if optional else ""
            raise RequestError(f"{name}={value!r} must be {none}an integer in [{low}, {high}]")
        self._set(name, int(value))

    def _check_type(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise RequestError(f"{name}={value!r} must be a {kind.__name__}")

    def _check_stop(self) -> None:
        """The empty string alone means no stop string; a list that holds it is a mistake."""
        stop = self.stop
        values = ((stop,) if stop else ()) if isinstance(stop, str) else _as_tuple(stop)
        if values is None or any(not isinstance(s, str) or not s for s in values):
            raise RequestError(f"stop={stop!r} must be a string or a sequence of non-empty strings")
        self._set("stop", values)

    def _check_stop_token_ids(self) -> None:
        values = _as_tuple(self.stop_token_ids)
        if values is None or any(not _is_int(t) or t < 0 for t in values):
            raise RequestError(
                f"stop_token_ids={self.stop_token_ids!r} must be token ids (integers, 0 or more)"
            )
        self._set("stop_token_ids", tuple(int(t) for t in values))


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_float(value: object) -> float | None:
    """The finite float of a real number; None for anything else, and for an integer too large for a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_tuple(value: object) -> tuple[Any, ...] | None:
    """The values of an iterable; None for what is not one."""
    return tuple(value) if isinstance(value, Iterable) else None
