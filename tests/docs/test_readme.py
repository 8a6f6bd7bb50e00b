"""The README does what it says: its commands are CI's, its code runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_ci_runs_both_commands_as_written():
    first, second = (block.strip() for block in blocks("sh")[:2])
    assert first.startswith("pip install . && core-runner generate ")
    assert second.endswith("python -m pytest -n 2")
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in script
    # In brackets, so that a failing first half ends the script as well.
    assert script.index(f"({first})") < script.index(f"({second})")


def test_ci_script_is_bash():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True, timeout=60)


LOCAL = [block for block in blocks("python") if "Qwen/" not in block]
NOT_RUN = pytest.mark.skip(reason="names a model of the hub, which a test cannot fetch, and asks for a GPU")


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0])
def test_python_blocks_compile(block):
    compile(block, "README.md", "exec")


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=() if block in LOCAL else NOT_RUN) for block in blocks("python")],
    ids=lambda block: block.splitlines()[0],
)
def test_python_blocks_run(block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)  # where a person reads it
    namespace = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), namespace)
    if "LLM()" in block:
        text = namespace["llm"].generate("Once upon a time", namespace["params"])[0].outputs[0].text
        shown = capsys.readouterr().out
        assert shown.startswith(f"Once upon a time -> {text} ")
        assert shown.endswith(text)
    if "transcript" in namespace:
        assert capsys.readouterr().out.split()[-2:] == ["you,", "Ella."]
    if "runner" in namespace:
        assert len(namespace["tokens"]) == 8


def test_the_own_scheduler_samples_what_the_engine_samples():
    from core_runner import LLM, SamplingParams

    (block,) = (block for block in LOCAL if "SchedulerOutput(" in block)
    namespace = {}
    exec(compile(block, "README.md", "exec"), namespace)
    params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    with LLM(device="cpu", max_num_reqs=4, num_blocks=16) as llm:
        (output,) = llm.generate([namespace["prompt"]], params)
    assert namespace["tokens"] == output.outputs[0].token_ids


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_file_names_lead_somewhere(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:core_runner|model_states|plugins|tests|docs|examples)/[\w/.]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_options_that_the_readme_shows_exist():
    from click.testing import CliRunner

    from core_runner.cli import main

    # Every command line, and the options that its own help names.
    lines = re.findall(r"^core-runner (\w+) (.*)$", "".join(blocks("sh")), re.MULTILINE)
    assert {command for command, _ in lines} == {"generate", "plugins", "transcribe"}
    shown = {(command, option) for command, rest in lines for option in re.findall(r"--[a-z-]+", rest)}
    helped = {command: CliRunner().invoke(main, [command, "--help"]).stdout for command, _ in lines}
    assert shown
    assert {(command, option) for command, option in shown if option not in helped[command]} == set()
