"""The JSONL batch: every row once, bad rows as rows, nothing lost on the way."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading

import pytest

from core_runner import SamplingParams
from core_runner.cli.results import ResultsFile
from core_runner.cli.rows import parse_row, parse_rows


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_every_kind_run_with_their_own_options(run, jsonl, tmp_path, llm_class):
    rows = [
        {"id": "a", "prompt": "x y", "temperature": 0, "max_tokens": 3},
        {"prompt_token_ids": [104, 105]},
        {"id": 7, "messages": [{"role": "user", "content": "hi"}], "stop": "z"},
    ]
    result = run("--input", jsonl(rows), "--output", tmp_path / "out.jsonl", "--top-k", 4, "--max-tokens", 9)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    out = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert {i: row["text"] for i, row in out.items()} == {"a": "x y ", "line-2": "hi ", 7: "user=hi "}
    assert list(out["a"]) == ["id", "text", "token_ids", "finish_reason", "usage", "error"]
    assert out["a"]["token_ids"] == [120, 32, 121, 32]
    assert out["a"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0}
    assert (out["a"]["finish_reason"], out["a"]["error"]) == ("stop", None)
    params = llm_class.last.params
    assert [(p.temperature, p.max_tokens, p.top_k, p.stop) for p in params] == [
        (0, 3, 4, ()),
        (0.5, 9, 4, ()),
        (0.5, 9, 4, ("z",)),
    ]


BAD_ROWS = {
    "{": "not JSON",
    "[1]": "a row is a JSON object",
    '{"prompt": "a", "temprature": 0}': "did you mean 'temperature'?",
    '{"prompt": "a", "zzz": 0}': "known: id, prompt",
    '{"prompt": "a", "messages": []}': "exactly one of",
    '{"id": "b"}': "this one has none",
    '{"prompt": 3}': "prompt must be a text, not int",
    '{"prompt_token_ids": "a"}': "must be a list, not str",
    '{"prompt_token_ids": [1, [2]]}': "a flat list of integers",
    '{"prompt_token_ids": [1, true]}': "a flat list of integers",
    '{"prompt": "a", "temperature": -1}': "temperature=-1",
    '{"prompt": "a", "temperature": "hot"}': "temperature='hot'",
    '{"prompt": "a", "stop": 3}': "stop",
    '{"prompt": "a", "logit_bias": {"x5": 1}}': "logit_bias has the key 'x5', which is no token id",
    '{"prompt": "a", "logit_bias": {"-5": 1}}': "0 or more",
    '{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}': "logit_bias has token id 5 twice",
    '{"prompt": "a", "logit_bias": {"5": "x"}}': "logit_bias={5: 'x'}",
    '{"prompt": "a", "logit_bias": [5]}': "logit_bias=[5] must map",
    '{"prompt": null, "id": null}': "this one has none",
    '{"prompt": "a", "zzz": null}': "unknown field 'zzz'",
    '{"prompt": "a", "id": [1]}': "id=[1] must be a text or an integer",
    '{"prompt": ""}': "the prompt is empty",
    '{"prompt_token_ids": []}': "the prompt is empty",
    '{"messages": [{"role": "user"}]}': "a message has no content",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda row: row[:40])
def test_a_bad_row_becomes_a_row_and_the_others_run(run, jsonl, tmp_path, bad):
    path = jsonl([{"id": "first", "prompt": "a"}, bad, {"id": "last", "prompt": "c d"}])
    result = run("--input", path, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    assert "1 row failed" in result.stderr
    out = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert (out["first"]["text"], out["last"]["text"], len(out)) == ("a ", "c d ", 3)
    (failed,) = [row for row in out.values() if row["error"]]
    assert BAD_ROWS[bad] in failed["error"]
    assert failed["error"].startswith("line 2: ")
    assert "request 'r'" not in failed["error"]
    assert (failed["text"], failed["token_ids"], failed["finish_reason"]) == ("", [], "error")


def test_a_request_that_fails_later_is_a_row_too(run, jsonl, tmp_path):
    run("--input", jsonl([{"prompt": "a nan"}, {"prompt": "b"}]), "--output", tmp_path / "o")
    out = {row["id"]: row for row in read_rows(tmp_path / "o")}
    failed, other = out["line-1"], out["line-2"]
    assert (failed["error"], failed["finish_reason"]) == ("line 1: the logits hold NaN", "error")
    assert (other["error"], other["text"]) == (None, "b ")


def test_ids_that_repeat_are_refused_and_kept_apart_by_type(run, jsonl, tmp_path):
    rows = [{"id": i, "prompt": text} for i, text in (("1", "a"), (1, "b"), ("1", "c"), (1, "d"))]
    run("--input", jsonl(rows), "--output", tmp_path / "o")
    out = read_rows(tmp_path / "o")
    assert sorted(row["text"] for row in out) == ["", "", "a ", "b "]
    assert sorted(row["error"] for row in out if row["error"]) == [
        "line 3: id '1' is line 1's; make ids unique",
        "line 4: id 1 is line 2's; make ids unique",
    ]


@pytest.mark.parametrize("first", [{"prompt": "x"}, "not JSON"])
def test_a_row_without_an_id_takes_none_that_a_later_row_has(run, jsonl, tmp_path, first):
    run(
        "--input",
        jsonl([first, {"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}]),
        "--output",
        tmp_path / "o",
    )
    out = {row["id"]: row["text"] for row in read_rows(tmp_path / "o")}
    assert set(out) == {"line-1", 1, "1"}
    assert (out[1], out["1"]) == ("a ", "b ")


def test_keys_of_logit_bias_become_token_ids():
    row = parse_row(1, b'{"prompt": "x", "logit_bias": {"5": 1, "7": -Infinity}}', SamplingParams())
    assert (row.error, row.params.logit_bias) == (None, {5: 1.0, 7: -math.inf})


def test_a_field_that_is_null_counts_as_absent():
    base = SamplingParams(seed=1, stop="z", max_tokens=9, logit_bias={3: 1.0})
    names = (field.name for field in dataclasses.fields(SamplingParams))
    fields = {**dict.fromkeys(names), "id": None, "messages": None, "prompt_token_ids": None, "prompt": "x"}
    row = parse_row(4, json.dumps(fields).encode(), base)
    assert (row.error, row.id, row.kind, row.prompt) == (None, "line-4", "prompt", "x")
    assert row.params == base


def test_a_used_id_is_reported_after_the_row_that_has_it(run, jsonl, tmp_path):
    # Otherwise a run that stops in between would leave the id in the results, and a resume would skip the row.
    run(
        "--input",
        jsonl([{"id": "a", "prompt": "x y z"}, {"id": "a", "prompt": "y"}]),
        "--output",
        tmp_path / "o",
    )
    assert [row["text"] for row in read_rows(tmp_path / "o")] == ["x y z ", ""]


def test_blank_lines_are_no_rows_and_line_numbers_stay(run, jsonl, tmp_path):
    run("--input", jsonl(["", {"prompt": "a"}, "  ", {"prompt": "b"}]), "--output", tmp_path / "o")
    assert sorted(row["id"] for row in read_rows(tmp_path / "o")) == ["line-2", "line-4"]


def test_many_rows_run_in_windows_and_each_is_written_once(run, jsonl, tmp_path, llm_class):
    rows = [{"id": i, "prompt": f"p{i}" if i % 100 else ""} for i in range(600)]
    result = run("--input", jsonl(rows), "--output", tmp_path / "o")
    assert "6 rows failed" in result.stderr
    out = read_rows(tmp_path / "o")
    assert sorted(row["id"] for row in out) == list(range(600))
    assert all((row["text"] == f"p{row['id']} ") == (row["error"] is None) for row in out)
    assert max(map(len, llm_class.last.streams)) <= 256


def test_rows_go_to_stdout_and_come_from_stdin(run):
    result = run("--input", "-", input='{"id": "ä", "prompt": "你好"}\n')
    assert json.loads(result.stdout)["text"] == "你好 "
    assert "你好" in result.stdout
    assert result.stdout.count("\n") == 1


def test_prompts_can_be_written_as_rows(run, tmp_path):
    run("a", "b c", "--chat", "--output", tmp_path / "o")
    assert [(row["id"], row["text"]) for row in read_rows(tmp_path / "o")] == [
        (1, "user=a "),
        (2, "user=b c "),
    ]


def test_logprobs_stand_in_the_row(run, tmp_path, llm_class):
    llm_class.script = ["B"]
    run("a", "--logprobs", 1, "--output", tmp_path / "o")
    (row,) = read_rows(tmp_path / "o")
    expected = [{"token_id": 66, "logprob": -0.5}, {"token_id": 65, "logprob": -1.5}]
    assert row["logprobs"] == [expected]


def test_an_output_with_rows_is_kept_unless_told_otherwise(run, jsonl, tmp_path, llm_class):
    source, out = jsonl([{"id": "a", "prompt": "x"}]), tmp_path / "o"
    out.write_text('{"id": "old"}\n')
    result = run("--input", source, "--output", out)
    assert result.exit_code == 2
    assert "--resume continues it, --overwrite replaces it" in result.stderr
    assert llm_class.last is None
    llm_class.load_error = OSError("no model")
    run("--input", source, "--output", out, "--overwrite")
    assert out.read_text() == '{"id": "old"}\n'
    llm_class.load_error = None
    run("--input", source, "--output", out, "--overwrite")
    assert [row["id"] for row in read_rows(out)] == ["a"]


def test_resume_skips_what_is_done_and_drops_half_a_row(run, jsonl, tmp_path, llm_class):
    source = jsonl([{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}, {"prompt": "z"}, {"id": "bad"}])
    out = tmp_path / "o"
    run("--input", source, "--output", out)
    whole = out.read_text().splitlines(keepends=True)
    kept = [line for line in whole if json.loads(line)["id"] in ("a", "bad")]
    out.write_text("".join(kept) + '{"id": "b", "te')
    result = run("--input", source, "--output", out, "--resume")
    assert (result.exit_code, result.stderr) == (0, "")
    assert llm_class.last.streams == [["y", "z"]]
    assert sorted(out.read_text().splitlines(keepends=True)) == sorted(whole)
    run("--input", source, "--output", out, "--resume")
    assert llm_class.last.streams == []
    assert sorted(out.read_text().splitlines(keepends=True)) == sorted(whole)


def test_resume_starts_a_file_that_is_not_there(run, jsonl, tmp_path):
    result = run("--input", jsonl([{"prompt": "a"}]), "--output", tmp_path / "o", "--resume")
    assert result.exit_code == 0
    assert len(read_rows(tmp_path / "o")) == 1


@pytest.mark.parametrize("content", ["hello\n", "{}\n", "[1]\n", '{"id": []}\n'])
def test_resume_refuses_a_file_of_something_else(run, jsonl, tmp_path, content):
    (tmp_path / "o").write_text(content)
    result = run("--input", jsonl([{"prompt": "a"}]), "--output", tmp_path / "o", "--resume")
    assert result.exit_code == 2
    assert "line 1, is no result row" in result.stderr
    assert (tmp_path / "o").read_text() == content


def test_outputs_that_cannot_be_written_are_refused_before_loading(run, jsonl, tmp_path, llm_class):
    source = jsonl([{"prompt": "a"}])
    for output, says in (
        (source, "same file"),
        (tmp_path / "no" / "o", "does not exist"),
        (tmp_path, "directory"),
    ):
        result = run("--input", source, "--output", output)
        assert result.exit_code == 2
        assert says in result.stderr
    assert run("--input", source, "--resume").exit_code == 2
    assert llm_class.last is None


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_an_output_that_is_another_name_of_the_input_is_refused(run, jsonl, tmp_path, link):
    source = jsonl([{"prompt": "a"}])
    rows = source.read_text()
    link(source, tmp_path / "other")
    result = run("--input", source, "--output", tmp_path / "other", "--overwrite")
    assert (result.exit_code, source.read_text()) == (2, rows)
    assert "are the same file" in result.stderr


def test_an_id_that_utf8_cannot_hold_is_written_escaped(tmp_path):
    with ResultsFile(str(tmp_path / "o"), resume=False, overwrite=False) as results:
        results.write({"id": "\ud800", "text": "é"})
    assert json.loads((tmp_path / "o").read_bytes()) == {"id": "\ud800", "text": "é"}


def test_rows_are_parsed_lazily():
    def lines():
        yield b'{"prompt": "a"}\n'
        raise AssertionError("read too far")

    assert next(parse_rows(lines(), SamplingParams())).prompt == "a"


def test_the_input_may_be_a_pipe(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"prompt": "a"}\n'))
    writer.start()
    result = run("--input", pipe, "--output", tmp_path / "o")
    writer.join()
    assert result.exit_code == 0, result.stderr
    assert [row["text"] for row in read_rows(tmp_path / "o")] == ["a "]
