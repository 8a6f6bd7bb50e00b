"""Several completions and prompt log-probabilities on the command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from fake_llm import FakeTokenizer

from core_runner.cli import main
from core_runner.cli.rows import Row, output_row
from core_runner.cli.text import print_logprobs, write_texts
from core_runner.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta


def test_options_reach_the_parameters(run, llm_class):
    assert run("a", "-n", 3, "--prompt-logprobs", 2).exit_code == 0
    (params,) = llm_class.last.params
    assert (params.n, params.prompt_logprobs, params.max_tokens) == (3, 2, 256)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("-n", 0), "n=0 must be"), (("--prompt-logprobs", -1), "prompt_logprobs=-1 must be")],
)
def test_bad_numbers_are_refused(arguments, says, run, llm_class):
    result = run("a", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert llm_class.last is None


def test_texts_come_by_prompt_and_then_by_completion(capsys):
    output = RequestOutput("r", None, [])
    deltas = [
        TextDelta(1, "e", [1], "stop", None, 1),
        TextDelta(0, "b", [1], None, None, 1),
        TextDelta(0, "a1 ", [1], None, None, 0),
        TextDelta(0, "a2", [1], "stop", None, 0),
        TextDelta(0, "b2\n", [1], "length", output, 1),
        TextDelta(1, "d", [1], "stop", output, 0),
        # A refused prompt ends all at once.
        TextDelta(2, "", [], "error", output, 0),
    ]
    seen = []
    for result in write_texts(deltas, 3, 2):
        seen.append((capsys.readouterr().out, result is output))
    assert [text for text, _ in seen] == ["", "", "a1 ", "a2\nb", "b2\n", "d\ne\n", "\n\n"]
    assert [last for _, last in seen] == [False] * 4 + [True] * 3


def _output(*reasons, error=None, prompt_logprobs=None):
    outputs = [CompletionOutput(i, f"t{i}", [i, 9], reason) for i, reason in enumerate(reasons)]
    return RequestOutput("r", "p", [1, 2], outputs, True, 0, error, prompt_logprobs)


def test_a_row_holds_all_completions():
    row = output_row(Row("a", 4), _output("stop", "length"))
    assert (row["text"], row["token_ids"], row["finish_reason"]) == ("t0", [0, 9], "stop")
    assert row["completions"] == [
        {"text": "t0", "token_ids": [0, 9], "finish_reason": "stop"},
        {"text": "t1", "token_ids": [1, 9], "finish_reason": "length"},
    ]
    assert row["usage"]["completion_tokens"] == 4
    assert "prompt_logprobs" not in row
    assert "completions" not in output_row(Row("a", 4), _output("stop"))


def test_a_row_has_failed_if_one_of_them_has():
    row = output_row(Row("a", 4), _output("stop", "error", error="request 'r': NaN"))
    assert (row["finish_reason"], row["error"]) == ("error", "line 4: NaN")
    assert [one["finish_reason"] for one in row["completions"]] == ["stop", "error"]


def test_prompt_logprobs_keep_the_place_of_the_first_token():
    scored = [None, {2: Logprob(-1.5, 2), 7: Logprob(float("-inf"), 1)}]
    row = output_row(Row("a", 4), _output("stop", prompt_logprobs=scored))
    assert row["prompt_logprobs"] == [
        None,
        [{"token_id": 2, "logprob": -1.5}, {"token_id": 7, "logprob": None}],
    ]


def test_embedded_model_end_to_end(tmp_path):
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"prompt": "Once upon", "n": 2, "prompt_logprobs": 1, "seed": 3}) + "\n")
    small = ["--device", "cpu", "--max-model-len", 256, "--max-num-reqs", 4, "--num-blocks", 65]
    options = ["--max-tokens", 5, "--temperature", 1, "--ignore-eos"]
    arguments = ["generate", *small, *options, "--input", rows, "--output", out]
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, out.read_text().splitlines())
    assert len(row["completions"]) == 2
    assert row["completions"][0]["token_ids"] != row["completions"][1]["token_ids"]
    assert row["usage"]["completion_tokens"] == 10
    assert len(row["prompt_logprobs"]) == row["usage"]["prompt_tokens"]


def test_tokens_of_the_prompt_are_listed_on_stderr(capsys):
    scored = [None, {2: Logprob(-1.5, 2), 7: Logprob(-0.25, 1)}]
    print_logprobs(_output("stop", "stop", prompt_logprobs=scored), FakeTokenizer())
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert lines == [[repr("\x01")], [repr("\x02"), "-1.500", repr("\x07"), "-0.250"]]
