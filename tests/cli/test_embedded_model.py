"""The command with the real engine and the embedded model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.replays import replayed_steps

from core_runner import LLM, SamplingParams
from core_runner.cli import main

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--max-model-len", "256", "--max-num-reqs", "4", "--num-blocks", "65"]


def generate(*arguments):
    return CliRunner().invoke(main, ["generate", *SMALL, *map(str, arguments)])


def start(*arguments):
    command = [sys.executable, "-m", "core_runner.cli", "generate", *SMALL, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT
    )


@pytest.fixture(scope="module")
def rows():
    return [
        {
            "id": f"row {i}",
            "prompt": "Once upon a time",
            "seed": i,
            "temperature": 0.9,
            "max_tokens": 4 + 12 * i,
        }
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def expected(rows):
    """Token ids of each row, from the engine without the command line."""
    params = [
        SamplingParams(temperature=0.9, seed=row["seed"], max_tokens=row["max_tokens"], ignore_eos=True)
        for row in rows
    ]
    with LLM(device="cpu", max_model_len=256, max_num_reqs=4, num_blocks=65) as llm:
        outputs = llm.generate([row["prompt"] for row in rows], params)
    return {row["id"]: output.outputs[0].token_ids for row, output in zip(rows, outputs, strict=True)}


def test_a_text_and_nothing_else_on_stdout():
    process = start("--max-tokens", 20, "Once upon a time")
    stdout, stderr = process.communicate(timeout=120)
    with LLM(device="cpu", max_model_len=256, max_num_reqs=4, num_blocks=65) as llm:
        (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=20))
    assert (process.returncode, stderr) == (0, b"")
    assert stdout.decode() == output.outputs[0].text.removesuffix("\n") + "\n"


def test_ctrl_c_then_resume_equals_the_uninterrupted_batch(tmp_path, rows, expected):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--ignore-eos", "--input", source, "--output", out]
    process = start(*arguments)
    while not (out.exists() and out.read_bytes()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout, stderr) == (130, b"", b"interrupted\n")
    assert 0 < len(out.read_text().splitlines()) < len(rows)
    result = generate(*arguments, "--resume")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == len(rows)
    assert {row["id"]: row["token_ids"] for row in written} == expected


def test_ctrl_c_in_the_middle_of_a_text_leaves_no_traceback():
    process = start("--ignore-eos", "Once upon a time")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (130, b"interrupted\n")


def test_chat_answers_and_stats_count():
    result = generate("--chat", "--temperature", 0, "--stats", "What is 12 + 30?")
    assert result.exit_code == 0, result.stderr
    assert "42" in result.stdout
    assert "generated:" in result.stderr
    assert "0 of 64 blocks" not in result.stderr


def test_stats_report_each_graph():
    with replayed_steps():
        result = generate(
            "--temperature", 0, "--max-tokens", 8, "--stats", "--record-graphs-at-start", "A cat"
        )
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.split("graphs:", 1)[1].splitlines()
    assert lines[0].split() == ["7", "steps", "replayed"]
    assert [line.split()[:5] for line in lines[1:4]] == [
        ["step", rows, "tokens", rows, "rows"] for rows in ("4", "2", "1")
    ]
    assert lines[3].endswith("7 replays")
    assert "0 of at most 128 graphs with prefill" in result.stderr
    assert "7 steps step graph" in result.stderr


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [5, 2, None]), ("priority", [None, 2, 5])])
def test_rows_run_by_their_priority(policy, order, jsonl, tmp_path):
    rows = [{"id": str(p), "prompt": "A cat", **({} if p is None else {"priority": p})} for p in (5, 2, None)]
    out = tmp_path / "o"
    base = ["--priority", 1] if policy == "priority" else []
    result = generate(
        "--input",
        jsonl(rows),
        "--output",
        out,
        "--max-num-reqs",
        1,
        "--max-tokens",
        3,
        "--policy",
        policy,
        *base,
    )
    assert result.exit_code == 0, result.stderr
    assert ('2 rows with a "priority", which has no effect' in result.stderr) == (policy == "fcfs")
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [str(p) for p in order]


def test_stop_and_logprobs_in_rows(tmp_path):
    out = tmp_path / "o"
    result = generate(
        "Once upon a time", "--temperature", 0, "--stop", "there", "--logprobs", 2, "--output", out
    )
    assert result.exit_code == 0, result.stderr
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["finish_reason"] == "stop"
    assert "there" not in row["text"]
    assert len(row["logprobs"]) == row["usage"]["completion_tokens"] == len(row["token_ids"])
    assert [position[0]["token_id"] for position in row["logprobs"]] == row["token_ids"]


def test_bad_rows_of_the_real_engine_are_rows(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = [
        {"id": 1, "prompt": ""},
        {"id": 2, "prompt_token_ids": [5] * 300},
        {"id": 3, "prompt_token_ids": [10**6]},
        {"id": 4, "messages": [{"rol": "user"}]},
        {"id": 5, "prompt": "\ud800"},
        {"id": 6, "prompt_token_ids": [-1]},
    ]
    good = {"id": 0, "prompt": "The", "max_tokens": 3}
    source.write_text("".join(json.dumps(row) + "\n" for row in [good, *bad]))
    result = generate("--input", source, "--output", out)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == '6 rows failed; "error" in the output says why\n'
    written = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert written[0]["error"] is None
    assert len(written[0]["token_ids"]) == 3
    assert all(written[row["id"]]["error"].startswith(f"line {row['id'] + 1}: ") for row in bad)


def test_what_the_engine_refuses_is_one_line():
    for arguments, says in (
        (["a", "--model", "/no/such/model"], "/no/such/model"),
        (["a", "--block-size", 3], "block_size=3"),
        (["a", "--device", "tpu"], "device='tpu'"),
        (["a", "--model-state", "nobody"], "nobody"),
        ([""], "prompt"),
        (["w " * 400], "max_model_len=256"),
    ):
        result = generate(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert says in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
