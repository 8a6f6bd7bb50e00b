"""`core-runner generate` with prompts: what is read, what reaches stdout and how it ends."""

from __future__ import annotations

import pytest


def test_text_alone_reaches_stdout(run, llm_class):
    result = run("Once upon a time")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Once upon a time \n", "")
    assert llm_class.last.closed


def test_a_newline_at_the_end_is_not_doubled(run, llm_class):
    llm_class.script = ["one\n", "two\n"]
    assert run("x").stdout == "one\ntwo\n"


def test_several_texts_keep_the_order_of_their_prompts(run, llm_class):
    assert run("a b c", "d", "e f").stdout == "a b c \nd \ne f \n"
    assert llm_class.last.streams == [["a b c", "d", "e f"]]


def test_prompts_come_from_stdin_files_and_arguments(run, tmp_path, llm_class):
    (tmp_path / "p.txt").write_text("from a file\n\n")
    (tmp_path / "q.txt").write_text("שלום")
    result = run(
        "-", f"@{tmp_path / 'p.txt'}", "@@home", "--prompt-file", tmp_path / "q.txt", input="piped\n"
    )
    assert result.exit_code == 0, result.stderr
    assert llm_class.last.streams == [["piped", "from a file\n", "@home", "שלום"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "No prompt"),
        (("a", "--input", __file__), "not both"),
        (("a", "--system", "s"), "--system needs --chat"),
        (("--input", __file__, "--chat"), "messages"),
        (("a", "--resume"), "are for --output"),
        (("a", "--output", "o", "--resume", "--overwrite"), "not both"),
        (("-", "-"), "'-' is given for PROMPT and PROMPT, and stdin can be read once"),
        (("-", "--prompt-file", "-"), "PROMPT and --prompt-file"),
        (("-", "@-"), "PROMPT and PROMPT"),
        (("-", "--grammar", "-"), "PROMPT and --grammar"),
        (("-", "--json-schema", "-"), "PROMPT and --json-schema"),
        (("--input", "-", "--grammar", "-"), "--input and --grammar"),
        (("--input", "-", "--json-schema", "-"), "--input and --json-schema"),
        (("a", "--output", ""), "--output is empty"),
        (("--input", ""), "File '' does not exist"),
        (("@",), "The prompt @ names no file"),
        (("a", "--json-schema", "[]"), "must be a JSON schema, which is an object"),
        (("@no-such-file",), "written @@"),
        (("--prompt-file", "no-such-file"), "does not exist"),
        (("a", "--temperature", "-1"), "temperature=-1.0"),
        (("a", "--top-p", "0"), "top_p=0.0"),
        (("a", "--max-tokens", "0"), "max_tokens=0"),
        (("a", "--max-tokens", "many"), "'many' is not a valid integer"),
    ],
)
def test_what_the_caller_can_mend_is_said_before_a_model_is_loaded(run, llm_class, arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert llm_class.last is None


def test_bytes_that_are_no_text_are_refused(run, tmp_path):
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    for result in (run(f"@{tmp_path / 'latin1'}"), run("-", input=b"\xff"), run("a\udcff")):
        assert result.exit_code == 2
        assert "is not UTF-8 text (byte " in result.stderr


def test_options_reach_the_request_and_the_rest_is_the_models(run, llm_class):
    result = run(
        "a", "--max-tokens", 5, "--top-k", 3, "--seed", 0, "--stop", "x", "--stop", "y", "--ignore-eos"
    )
    assert result.exit_code == 0, result.stderr
    (params,) = llm_class.last.params
    assert (params.max_tokens, params.top_k, params.seed, params.stop) == (5, 3, 0, ("x", "y"))
    assert (params.temperature, params.top_p, params.ignore_eos) == (0.5, 0.9, True)
    run("a", "--temperature", 0)
    (params,) = llm_class.last.params
    assert (params.temperature, params.ignore_eos, params.max_tokens) == (0.0, False, 256)


def test_only_given_model_options_are_passed_on(run, llm_class):
    run("a")
    assert set(llm_class.last.options) == {"progress"}
    run(
        "a",
        "-m",
        "dir",
        "--device",
        "cpu",
        "--num-blocks",
        9,
        "--no-prefix-caching",
        "--model-state",
        "toy",
        "--trust-remote-code",
        "--model-option",
        "size=64",
        "--model-option",
        "kind=wide",
    )
    options = {k: v for k, v in llm_class.last.options.items() if k != "progress"}
    assert options == {
        "model": "dir",
        "device": "cpu",
        "num_blocks": 9,
        "enable_prefix_caching": False,
        "model_state": "toy",
        "trust_remote_code": True,
        "model_options": {"size": 64, "kind": "wide"},
    }


def test_model_options_are_pairs(run, llm_class):
    result = run("a", "--model-option", "size")
    assert result.exit_code == 2
    assert "'size' is not NAME=VALUE" in result.stderr


def test_chat_sends_a_conversation_for_each_prompt(run):
    result = run("hi", "bye", "--chat", "--system", "be kind")
    assert result.stdout == "system=be kind/user=hi \nsystem=be kind/user=bye \n"


def test_characters_split_over_deltas_stay_whole(run, llm_class):
    # The engine holds back half a character; the command must not add or lose a byte around it.
    llm_class.script = ["caf", "", "", "é", " 👋🏽", "שלום", "你好"]
    result = run("x")
    assert result.stdout_bytes.decode() == "café 👋🏽שלום你好\n"


def test_logprobs_of_a_text_go_to_stderr(run, llm_class):
    llm_class.script = ["B"]
    result = run("x", "--logprobs", 1)
    assert result.stdout == "B\n"
    assert "'B'" in result.stderr
    assert "-0.500" in result.stderr
    assert "'A' -1.500" in result.stderr


def test_stats_go_to_stderr(run):
    result = run("a b", "--stats")
    assert result.stdout == "a b \n"
    lines = result.stderr.splitlines()
    assert lines[-2:] == ["  step        4 tokens", "         4 steps step graph"]
    report = dict(line.split(":", 1) for line in lines[:-2])
    assert set(report) == {
        "load",
        "first token",
        "prompt",
        "generated",
        "cached",
        "cache use",
        "preemptions",
        "steps",
        "graphs",
    }
    assert report["graphs"].strip() == "4 steps replayed"
    assert report["preemptions"].strip() == "2"
    assert report["cache use"].strip() == "10 of 100 blocks at most"
    assert "tokens/s" in report["generated"]


def test_stats_say_nothing_of_graphs_where_there_are_none(run, llm_class, monkeypatch):
    monkeypatch.setattr(llm_class.graphs, "enabled", False)
    assert "graph" not in run("a b", "--stats").stderr


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ("", {}),
        ("--policy priority --priority 3", {"policy": "priority"}),
        ("--policy fcfs", {"policy": "fcfs"}),
        ("--no-cuda-graphs", {"cuda_graphs": False}),
        ("--cuda-graphs --record-graphs-at-start", {"cuda_graphs": True, "record_graphs_at_start": True}),
    ],
)
def test_policy_and_graphs_reach_the_model(run, llm_class, arguments, chosen):
    result = run("a", *arguments.split())
    assert result.exit_code == 0, result.stderr
    assert {name: value for name, value in llm_class.last.options.items() if name != "progress"} == chosen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--priority 3", ["--priority 3", "--policy fcfs", "--policy priority"]),
        ("--priority 3 --policy fcfs", ["--priority 3", "--policy fcfs"]),
        ("--no-cuda-graphs --record-graphs-at-start", ["--record-graphs-at-start", "--no-cuda-graphs"]),
    ],
)
def test_options_that_would_have_no_effect_are_refused(run, arguments, words):
    result = run("a", *arguments.split())
    assert result.exit_code == 2
    assert [word for word in words if word not in result.stderr] == []


def test_a_request_that_fails_is_said_and_the_others_are_shown(run):
    result = run("a nan", "b")
    assert result.exit_code == 1
    assert result.stdout == "a nan \nb \n"
    assert result.stderr == "error: the logits hold NaN\n"


def test_an_empty_prompt_is_an_error_without_a_traceback(run):
    result = run("")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: the prompt is empty; give at least one token\n"
