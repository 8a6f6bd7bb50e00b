"""`SamplingParams`: what one request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from core_runner.allowed_ids import explain_nothing_left
from core_runner.errors import RequestError
from core_runner.structured.options import StructuredOutput

MAX_LOGPROBS = 256
MAX_COMPLETIONS = 4096
# Far past any logit, and far from the end of float32.
_MAX_BIAS = 1e30
_INT32_MAX = 2**31 - 1
LogprobsMode = Literal["raw", "adjusted", "processed"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. Validated on construction; a bad value raises `RequestError`.

    temperature: 0 is greedy; any positive finite value scales the logits by its inverse.
    top_k: keep the k most likely ids (0 or -1: all). top_p: keep the smallest set whose mass reaches p, after
    top_k. min_p: keep ids of at least min_p times the largest probability. Ties at a threshold are kept.
    seed: the request's stream; None draws one at admission, which the request keeps through preemption.
    max_tokens: most tokens to generate; None is what `max_model_len` leaves.
    stop_token_ids: ids that end the request beside the model's own end ids. stop: strings that end it, cut
    from the text. ignore_eos: do not end at the model's end ids (stop_token_ids still do).
    logprobs: None for none; n gives log-probabilities of the sampled id and of the n best ids. logprobs_mode:
    "raw" takes them from the model's logits, "adjusted" from those after every mask, bias, penalty and logits
    processor, "processed" from the distribution that is sampled from: after temperature and filters too.
    prompt_logprobs: the same for each prompt token, raw.
    repetition_penalty: a logit of an id that the prompt or the output holds is divided by it if positive, else
    multiplied. frequency_penalty, presence_penalty: subtracted for each time, and for the first time, that the
    output holds the id. logit_bias: added to the logit of an id; -inf forbids the id.
    allowed_token_ids: the only ids that may be sampled; None allows all. bad_words: token sequences, or words
    as text (`LLM` turns them into tokens, as at the start of a line and as after a space), that the output never
    completes; a sequence may begin in the prompt. min_tokens: until the output is that long, no id that ends a
    request (the model's end ids, also under ignore_eos, and stop_token_ids) is sampled; stop strings still end
    it.
    n: completions of the prompt, which is computed once. Each has a stream of its own: unseeded ones draw their
    seeds, and of a seeded request completion i has `completion_seed(seed, i)`, so 0 is what n=1 gives. Greedy
    ones are allowed, and equal.
    logits_processors: name of a plugin's logits processor -> its options; they run in the order of their loading,
    after the penalties.
    structured_output: the form that the output must have (a `StructuredOutput`, or a mapping of its fields).
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
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # A dictionary has no hash; equality still looks at it.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    n: int = 1
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    structured_output: StructuredOutput | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""

    if not TYPE_CHECKING:

        def __init__(self, **options: Any) -> None:
            """Turn values into plain Python ones and refuse those of a wrong type or outside their range."""
            if not options.keys() <= _CHECKS.keys():
                unknown = min(options.keys() - _CHECKS.keys())
                raise TypeError(f"SamplingParams.__init__() got an unexpected keyword argument {unknown!r}")
            # Most requests change three options of thirty: the others stay attributes of the class, and need no look.
            vars(self)["logits_processors"] = {}
            vars(self).update(options)
            self._check(sorted(options, key=_ORDER.__getitem__))

    def __post_init__(self) -> None:
        """For subclasses that are dataclasses, whose own constructor calls it."""
        self._check(_CHECKS)

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if getattr(self, name) is not _DEFAULTS[name]:
                _CHECKS[name](self)
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        number = _as_float(value)
        if number is None or not low <= number <= high or (open_low and number == low):
            allowed = f"{'(' if open_low else '['}{low}, {high}]" if high < math.inf else f"{low} or more"
            raise RequestError(f"{name}={value!r} must be a finite number, {allowed}")
        if number is not value:
            self._set(name, number)

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value) or not low <= int(value) <= high:
            none = "None or " if optional else ""
            raise RequestError(f"{name}={value!r} must be {none}an integer in [{low}, {high}]")
        if type(value) is not int:
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

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise RequestError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")

    def _check_token_ids(self, name: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        ids = _as_token_ids(value)
        if ids is None:
            raise RequestError(f"{name}={value!r} must be token ids (integers, 0 or more)")
        self._set(name, ids)

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping) or _as_token_ids(bias) is None:
            raise RequestError(f"logit_bias={bias!r} must map token ids (integers, 0 or more) to numbers")
        for token_id, value in bias.items():
            number = _as_float(value)
            # Minus infinity is how an id is forbidden.
            forbids = isinstance(value, Real) and value == -math.inf
            if not forbids and (number is None or abs(number) > _MAX_BIAS):
                raise RequestError(
                    f"logit_bias={{{token_id!r}: {value!r}}} must be -inf or a number in "
                    f"[{-_MAX_BIAS:g}, {_MAX_BIAS:g}]"
                )
        self._set("logit_bias", {int(token_id): float(value) for token_id, value in bias.items()})

    def _check_bad_words(self) -> None:
        """Words stay text until a tokenizer is at hand; token sequences become tuples."""
        words = None if isinstance(self.bad_words, str) else _as_tuple(self.bad_words)
        values = [word if isinstance(word, str) else _as_token_ids(word) for word in words or ()]
        if words is None or not all(values):
            raise RequestError(
                f"bad_words={self.bad_words!r} must be a sequence of non-empty strings or token sequences"
            )
        self._set("bad_words", tuple(values))

    def _check_structured_output(self) -> None:
        if self.structured_output is not None:
            self._set("structured_output", StructuredOutput.of(self.structured_output))

    def _check_logits_processors(self) -> None:
        """Names and options are checked by the processors, at admission."""
        wanted = self.logits_processors
        if not isinstance(wanted, Mapping) or not all(
            isinstance(name, str) and isinstance(options, Mapping) for name, options in wanted.items()
        ):
            raise RequestError(f"logits_processors={wanted!r} must map names to mappings of options")
        self._set("logits_processors", {name: dict(options) for name, options in wanted.items()})

    def _check_together(self) -> None:
        """Refuse options that contradict each other whatever the model is; admission knows the rest."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower one or raise the other"
            )
        if self.structured_output is not None and self.ignore_eos:
            raise RequestError(
                "structured_output ends with an end id, which ignore_eos=True would go past; leave one of them out"
            )
        problem = explain_nothing_left(self)
        if problem:
            raise RequestError(problem)


def _is_int(value: object) -> bool:
    # The usual type first: asking an abstract class takes many times as long.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _as_float(value: object) -> float | None:
    """The finite float of a real number; None for anything else, and for an integer too large for a float."""
    if type(value) is float:
        return value if math.isfinite(value) else None
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


def _as_token_ids(value: object) -> tuple[int, ...] | None:
    """Token ids as plain integers; None for anything else."""
    ids = None if isinstance(value, str) else _as_tuple(value)
    if ids is None or not all(_is_int(i) and i >= 0 for i in ids):
        return None
    return tuple(int(i) for i in ids)


def _checks() -> dict[str, Callable[[SamplingParams], None]]:
    """For each option its check, in the order in which they are looked at."""
    checks: dict[str, Callable[[SamplingParams], None]] = {
        "temperature": lambda p: p._check_number("temperature", 0.0, math.inf),
        "top_p": lambda p: p._check_number("top_p", 0.0, 1.0, open_low=True),
        "min_p": lambda p: p._check_number("min_p", 0.0, 1.0),
        "top_k": lambda p: p._check_int("top_k", -1, _INT32_MAX),
        "priority": lambda p: p._check_int("priority", -(2**31), _INT32_MAX),
        "seed": lambda p: p._check_int("seed", -(2**63), 2**63 - 1, optional=True),
        "max_tokens": lambda p: p._check_int("max_tokens", 1, _INT32_MAX, optional=True),
        "logprobs": lambda p: p._check_int("logprobs", 0, MAX_LOGPROBS, optional=True),
        "prompt_logprobs": lambda p: p._check_int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True),
        "min_tokens": lambda p: p._check_int("min_tokens", 0, _INT32_MAX),
        "n": lambda p: p._check_int("n", 1, MAX_COMPLETIONS),
        "repetition_penalty": lambda p: p._check_number("repetition_penalty", 0.0, math.inf, open_low=True),
        "frequency_penalty": lambda p: p._check_number("frequency_penalty", -2.0, 2.0),
        "presence_penalty": lambda p: p._check_number("presence_penalty", -2.0, 2.0),
        "logprobs_mode": lambda p: p._check_choice("logprobs_mode", get_args(LogprobsMode)),
        "ignore_eos": lambda p: p._check_type("ignore_eos", bool),
        "skip_special_tokens": lambda p: p._check_type("skip_special_tokens", bool),
        "cache_salt": lambda p: p._check_type("cache_salt", str),
        "stop": SamplingParams._check_stop,
        "stop_token_ids": lambda p: p._check_token_ids("stop_token_ids"),
        "allowed_token_ids": lambda p: p._check_token_ids("allowed_token_ids", optional=True),
        "logit_bias": SamplingParams._check_logit_bias,
        "bad_words": SamplingParams._check_bad_words,
        "logits_processors": SamplingParams._check_logits_processors,
        "structured_output": SamplingParams._check_structured_output,
    }
    assert checks.keys() == {option.name for option in fields(SamplingParams)}, "an option is not checked"
    return checks


_CHECKS = _checks()
_ORDER = {name: number for number, name in enumerate(_CHECKS)}
# `MISSING`, which no value is, where every object has a default of its own.
_DEFAULTS = {option.name: option.default for option in fields(SamplingParams)}
# What the constructor takes, for those who ask Python.
SamplingParams.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(name, Parameter.KEYWORD_ONLY, default={} if default is MISSING else default)
        for name, default in _DEFAULTS.items()
    ]
)
