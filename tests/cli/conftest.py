from __future__ import annotations

import json

import fake_llm
import pytest
from click.testing import CliRunner

import core_runner
from core_runner.cli import main


@pytest.fixture
def llm_class(monkeypatch):
    """The class that stands for `core_runner.LLM`; a test may set its `script` or `load_error`."""

    class Fake(fake_llm.FakeLLM):
        last = None

    # `setattr` would look up, and so import, the real one.
    monkeypatch.setitem(vars(core_runner), "LLM", Fake)
    return Fake


@pytest.fixture
def run(llm_class):
    """Run `core-runner generate` in this process."""

    def invoke(*arguments, **options):
        return CliRunner().invoke(main, ["generate", *map(str, arguments)], **options)

    return invoke


@pytest.fixture
def jsonl(tmp_path):
    """Write rows to a file; a row that is a text is written as it stands."""

    def write(rows, name="in.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write
