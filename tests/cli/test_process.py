"""The command as a process: signals, closed pipes, bytes on stdout, start-up."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FAKE_MAIN = [sys.executable, str(Path(__file__).with_name("fake_main.py"))]
ROOT = Path(__file__).parents[2]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # colours, and moves of the cursor
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}


def start(seconds, *arguments, **options):
    command = [*FAKE_MAIN, str(seconds), *map(str, arguments)]
    pipes = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": ENVIRONMENT,
    }
    return subprocess.Popen(command, **{**pipes, **options})


def wait_for_line(path, process):
    while not (path.exists() and b"\n" in path.read_bytes()):
        assert process.poll() is None, process.communicate()


@pytest.fixture
def batch(tmp_path):
    """Rows of growing length, so that they finish one after another; and where the results go."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": "w " * (2 * i + 1)}) + "\n" for i in range(40)))
    return source, out


def test_ctrl_c_in_a_batch_keeps_what_is_finished_and_resume_completes_it(batch):
    source, out = batch
    process = start(0.05, "generate", "--input", source, "--output", out)
    wait_for_line(out, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (130, b"", b"interrupted\n")
    first = out.read_text().splitlines()
    assert 0 < len(first) < 40
    process = start(0, "generate", "--input", source, "--output", out, "--resume")
    assert process.communicate(timeout=30) == (b"", b"")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(40))
    assert all(row["text"] == "w " * (2 * row["id"] + 1) for row in rows)
    assert out.read_text().splitlines()[: len(first)] == first


def test_a_second_ctrl_c_does_not_wait_for_the_step(batch, tmp_path):
    source, out = batch
    started = tmp_path / "started"
    environment = {**ENVIRONMENT, "FAKE_STARTED": str(started)}
    process = start(30, "generate", "--input", source, "--output", out, env=environment)
    while not started.exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, b"interrupted\n")


def test_ctrl_c_in_a_text_keeps_what_was_shown():
    process = start(0.05, "generate", "w " * 2000)
    shown = process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, b"interrupted\n")
    assert shown == b"w w "
    assert set((shown + rest).split()) == {b"w"}


def test_a_reader_that_goes_away_ends_it_quietly():
    process = start(0.01, "generate", "w " * 2000)
    assert process.stdout.read(2) == b"w "
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141


def test_a_batch_on_a_closed_pipe_ends_quietly(batch):
    process = start(0.01, "generate", "--input", batch[0])
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141


def test_stdout_is_utf8_bytes_in_a_pipe():
    text = "café 👋🏽 שלום 你好"
    stdout, stderr = start(0, "generate", text).communicate(timeout=30)
    assert (stdout.decode(), stderr) == (text + " \n", b"")


def test_a_locale_without_the_characters_shows_question_marks():
    environment = {**ENVIRONMENT, "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    stdout, stderr = start(0, "generate", "né 你", env=environment).communicate(timeout=30)
    assert (stdout.decode("latin-1"), stderr) == ("né ? \n", b"")


def run_on_terminal(*arguments):
    """Run with a terminal as stdout and stderr; returns what it showed and the exit code."""
    leader, follower = pty.openpty()
    process = start(0, *arguments, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    while chunk := _read_terminal(leader):
        shown += chunk
    os.close(leader)
    return shown.decode(), process.wait(timeout=30)


def _read_terminal(leader):
    try:
        return os.read(leader, 4096)
    except OSError:  # Linux's way of saying that the other side is closed
        return b""


def test_a_terminal_gets_the_text_and_its_cursor_back():
    shown, code = run_on_terminal("generate", "one\x1b[2Jtwo")
    assert code == 0
    assert "Loading weights" in shown
    # The bar hides the cursor while it draws, and the model's own control characters do not act.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.endswith("one\N{REPLACEMENT CHARACTER}[2Jtwo \r\n")


def test_a_terminal_sees_graphs_being_recorded():
    shown, code = run_on_terminal("generate", "--record-graphs-at-start", "one two")
    assert code == 0
    lines = [CONTROL.sub("", line) for line in shown.splitlines()]
    assert any(re.fullmatch(r"graphs +━+ 3/3 +[-:\d]+ *", line) for line in lines), lines
    assert any(re.match(r"Loading weights +.*━+.* 1/2 ", line) for line in lines), "a bar of its own"
    assert shown.rindex("\x1b[2K") > shown.rindex("3/3"), "the bars are gone when the text comes"
    assert lines[-1].endswith("one two ")


def test_a_terminal_sees_a_batch_advance(batch):
    shown, code = run_on_terminal("generate", "--input", batch[0], "--output", batch[1])
    assert code == 0
    assert "Rows" in shown
    assert "40/40" in shown


def test_help_needs_nothing_but_click():
    program = (
        "import sys; from click.testing import CliRunner; from core_runner.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['generate', '--help']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['transcribe', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy', 'rich', 'pluggy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
