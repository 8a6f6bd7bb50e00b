"""What `SamplingParams` takes, what it turns it into, and what it refuses with which message."""

import dataclasses
import inspect
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from core_runner.errors import RequestError
from core_runner.sampling_params import MAX_LOGPROBS, SamplingParams

NUMBERS = ("temperature", "top_p", "min_p")
INTEGERS = ("top_k", "seed", "max_tokens", "logprobs", "priority")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -1, -1e-9, True, False, "0.5", None, [0.5], 1j, np.float32("nan")],
)
def test_numbers_refused(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0), ("top_p", 1.0001), ("min_p", 1.5), ("temperature", 10**400)]
)
def test_numbers_outside_their_range(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0, 1.5, True, False, "1", [1], 2**63, -(2**63) - 1])
def test_integers_refused(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -2),
        ("top_k", None),
        ("top_k", 2**31),
        ("max_tokens", 0),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("priority", 2**31),
        ("priority", None),
    ],
)
def test_integers_outside_their_range(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 5e-324),
        ("temperature", 1e300),
        ("temperature", np.float32(0.5)),
        ("temperature", Fraction(1, 2)),
        ("top_p", 1),
        ("top_p", np.float64(1e-9)),
        ("min_p", np.int64(1)),
    ],
)
def test_numbers_become_floats(name, value):
    taken = getattr(SamplingParams(**{name: value}), name)
    assert type(taken) is float
    assert taken == float(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1),
        ("top_k", np.int32(7)),
        ("top_k", 2**31 - 1),
        ("seed", np.uint8(200)),
        ("seed", np.int64(-(2**63))),
        ("seed", 2**63 - 1),
        ("max_tokens", np.int16(3)),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("priority", -(2**31)),
    ],
)
def test_integers_become_ints(name, value):
    taken = getattr(SamplingParams(**{name: value}), name)
    assert type(taken) is int
    assert taken == int(value)


@pytest.mark.parametrize("name", ["seed", "max_tokens", "logprobs"])
def test_none_is_a_value_of_optional_integers(name):
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("given", "taken"),
    [("", ()), ("end", ("end",)), (["a", "b"], ("a", "b")), ((), ()), (iter("ab"), ("a", "b"))],
)
def test_stop_becomes_a_tuple(given, taken):
    assert SamplingParams(stop=given).stop == taken


@pytest.mark.parametrize("value", [None, 3, [""], ["a", ""], [1], [None], b"end"])
def test_stop_refused(value):
    with pytest.raises(RequestError, match="stop="):
        SamplingParams(stop=value)


def test_stop_token_ids_become_a_tuple_of_ints():
    taken = SamplingParams(stop_token_ids=np.array([3, 2**31], dtype=np.int64)).stop_token_ids
    assert taken == (3, 2**31)
    assert [type(t) for t in taken] == [int, int]


@pytest.mark.parametrize("value", [None, 3, [-1], [True], [1.0], ["1"], "12"])
def test_stop_token_ids_refused(value):
    with pytest.raises(RequestError, match="stop_token_ids="):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("cache_salt", 5),
        ("cache_salt", None),
    ],
)
def test_flags_and_strings_refused(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_params_are_frozen_and_equal_by_value():
    assert SamplingParams(top_k=5, stop="x") == SamplingParams(top_k=np.int8(5), stop=["x"])
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -2.1),
        ("presence_penalty", "1"),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_tokens", None),
        ("n", 0),
        ("n", True),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("logprobs_mode", "both"),
        ("logprobs_mode", None),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", [1, -1]),
        ("allowed_token_ids", [1.0]),
        ("logit_bias", [1, 2]),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {"5": 0.5}),
        ("logit_bias", {True: 0.5}),
        ("bad_words", "word"),
        ("bad_words", None),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [5]),
        ("bad_words", [[1, -2]]),
    ],
)
def test_options_that_change_logits_refused(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("value", [math.inf, math.nan, 2e30, True, "1", None, 10**400])
def test_bias_refused_with_its_id(value):
    with pytest.raises(RequestError) as error:
        SamplingParams(logit_bias={4: 1.0, 5: value})
    assert f"logit_bias={{5: {value!r}}}" in str(error.value)


def test_options_that_change_logits_become_plain_values():
    given = SamplingParams(
        repetition_penalty=np.float32(1.5),
        frequency_penalty=-2,
        presence_penalty=Fraction(1, 2),
        logit_bias={np.int64(3): -math.inf, 4: 1},
        allowed_token_ids=np.array([3, 5]),
        bad_words=["a", np.array([1, 2])],
        min_tokens=np.int8(4),
    )
    assert given.logit_bias == {3: -math.inf, 4: 1.0}
    assert given.allowed_token_ids == (3, 5)
    assert given.bad_words == ("a", (1, 2))
    assert (given.repetition_penalty, given.frequency_penalty, given.presence_penalty) == (1.5, -2.0, 0.5)
    assert [type(v) for v in (*given.logit_bias, *given.logit_bias.values())] == [int, int, float, float]
    assert hash(given) == hash(given)
    assert given != SamplingParams()
    assert pickle.loads(pickle.dumps(given)) == given


def test_unknown_options_and_positions_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_q'"):
        SamplingParams(temperature=0.0, top_q=0.5)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)


def test_the_first_option_at_fault_is_named_whatever_the_order():
    for names in ("temperature", "top_k", "n"), ("n", "top_k", "temperature"):
        with pytest.raises(RequestError, match="temperature=-9"):
            SamplingParams(**dict.fromkeys(names, -9))


def test_the_constructor_names_every_option_with_its_default():
    parameters = inspect.signature(SamplingParams).parameters
    defaults = SamplingParams()
    assert {name: p.default for name, p in parameters.items()} == dataclasses.asdict(defaults)
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_no_object_shares_a_mapping_with_another_or_with_the_caller():
    given = {}
    made = [SamplingParams(), SamplingParams(), SamplingParams(logits_processors=given)]
    assert len({id(mapping) for mapping in (given, *(params.logits_processors for params in made))}) == 4
    assert made[0] == made[1] == made[2] == dataclasses.replace(made[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoreParams(SamplingParams):
    extra: int = 0


def test_subclasses_that_are_dataclasses_are_checked_too():
    params = MoreParams(stop="END", stop_token_ids=[np.int64(3)], extra=4)
    assert (params.stop, params.stop_token_ids, params.extra) == (("END",), (3,), 4)
    for options in ({"temperature": -1}, {"n": "3"}, {"min_tokens": 9, "max_tokens": 2}):
        with pytest.raises(RequestError, match=next(iter(options))):
            MoreParams(**options)
