"""Every sampling option of the command line reaches the request's parameters."""

from __future__ import annotations

import dataclasses
import math

import pytest
from click.testing import CliRunner

from core_runner import SamplingParams
from core_runner.cli import main
from core_runner.cli.options import SAMPLING_OPTIONS

# Arguments -> the field they set and its value.
REACHES = [
    ("--max-tokens 5", "max_tokens", 5),
    ("--temperature 0.25", "temperature", 0.25),
    ("--top-k 3", "top_k", 3),
    ("--top-p 0.75", "top_p", 0.75),
    ("--min-p 0.125", "min_p", 0.125),
    ("--seed -3", "seed", -3),
    ("--stop x --stop y", "stop", ("x", "y")),
    ("--ignore-eos", "ignore_eos", True),
    ("--logprobs 2", "logprobs", 2),
    ("--prompt-logprobs 0", "prompt_logprobs", 0),
    ("-n 2", "n", 2),
    ("--repetition-penalty 1.5", "repetition_penalty", 1.5),
    ("--frequency-penalty -0.5", "frequency_penalty", -0.5),
    ("--presence-penalty 2", "presence_penalty", 2.0),
    ("--min-tokens 4", "min_tokens", 4),
    ("--stop-token-id 7 --stop-token-id 0", "stop_token_ids", (7, 0)),
    ("--logit-bias 5=-2.5 --logit-bias 0=-inf", "logit_bias", {5: -2.5, 0: -math.inf}),
    ("--allowed-token-id 1 --allowed-token-id 2", "allowed_token_ids", (1, 2)),
    ("--bad-word a --bad-word b", "bad_words", ("a", "b")),
    ("--logprobs-mode processed", "logprobs_mode", "processed"),
    ("--logprobs-mode adjusted", "logprobs_mode", "adjusted"),
    ("--priority -1 --policy priority", "priority", -1),
    ("--cache-salt s", "cache_salt", "s"),
    ("--keep-special-tokens", "skip_special_tokens", False),
]


@pytest.mark.parametrize(
    ("arguments", "name", "value"), REACHES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_option_reaches_its_field_and_no_other(run, llm_class, arguments, name, value):
    result = run("a", *arguments.split())
    assert result.exit_code == 0, result.stderr
    (params,) = llm_class.last.params
    expected = SamplingParams(**{"temperature": 0.5, "top_p": 0.9, "max_tokens": 256, name: value})
    assert params == expected
    assert params != SamplingParams(temperature=0.5, top_p=0.9, max_tokens=256)


def test_every_field_has_an_option():
    elsewhere = {"logits_processors", "structured_output"}  # of rows, and options of their own
    assert {name for _, name, _ in REACHES} == set(SAMPLING_OPTIONS)
    assert set(SAMPLING_OPTIONS) == {field.name for field in dataclasses.fields(SamplingParams)} - elsewhere


def test_help_groups_them_as_sampling_options():
    text = CliRunner().invoke(main, ["generate", "--help"]).stdout
    section = text.split("Sampling (default", 1)[1].split("Form of the output", 1)[0]
    assert [arguments for arguments, _, _ in REACHES if arguments.split()[0] not in section.split()] == [
        "-n 2"
    ]
    assert "-n, --num-completions" in section


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--logit-bias", "5"), "'5' is not ID=VALUE"),
        (("--logit-bias", "x=1"), "'x=1' is not ID=VALUE"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "token id 5 is given twice"),
        (("--logit-bias", "5=nan"), "must be -inf or a number"),
        (("--stop-token-id", "-1"), "stop_token_ids=(-1,)"),
        (("--bad-word", ""), "bad_words=('',)"),
        (("--logprobs-mode", "cooked"), "'cooked' is not one of"),
        (("--min-tokens", 9, "--max-tokens", 3), "min_tokens=9 is more than max_tokens=3"),
    ],
)
def test_bad_values_are_refused_before_a_model_is_loaded(run, llm_class, arguments, says):
    result = run("a", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert llm_class.last is None
