"""How the command ends: user errors, files, Ctrl-C, bugs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from core_runner import ConfigError
from core_runner.cli import main
from model_states.errors import CheckpointError


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError])
def test_errors_of_both_trees_are_one_line(run, llm_class, kind):
    llm_class.load_error = kind("model 'x' has no lm_head; add it")
    result = run("a")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: model 'x' has no lm_head; add it\n"


@pytest.mark.parametrize("arguments", [["--debug", "generate", "a"], ["generate", "a", "--debug"]])
def test_debug_shows_the_traceback(llm_class, arguments):
    llm_class.load_error = ConfigError("no")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "error: no" in result.stderr


def test_a_full_disk_is_no_traceback(run, llm_class):
    llm_class.load_error = OSError(28, "No space left on device")
    result = run("a")
    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device\n"


def test_a_bug_shows_itself(run, llm_class):
    llm_class.load_error = ValueError("not ours to hide")
    result = run("a")
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)


def test_ctrl_c_while_loading_says_so_and_nothing_else(run, llm_class):
    llm_class.load_error = KeyboardInterrupt()
    result = run("a")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_while_streaming_aborts_what_runs(run, llm_class):
    def interrupted():
        yield "one "
        raise KeyboardInterrupt

    llm_class.script = interrupted()
    result = run("a", "b")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert result.stdout == "one "
    assert llm_class.last.aborted == 2


def test_a_step_that_fails_while_ctrl_c_unwinds_is_still_an_interrupt(run, llm_class):
    def interrupted():
        try:
            yield "one "
            raise KeyboardInterrupt
        finally:
            raise ValueError("half a step")

    llm_class.script = interrupted()
    result = run("a")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_help_and_version_name_every_command():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "generate" in result.stdout
    assert "plugins" in result.stdout
    assert CliRunner().invoke(main, ["-h"]).stdout == result.stdout
    assert CliRunner().invoke(main, ["--version"]).stdout.startswith("core-runner ")


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(main, ["generat"])
    assert result.exit_code == 2
    assert "generat" in result.stderr
