"""`core-runner generate` with the form of its output, for prompts and in rows."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from forms import CHOICES, GBNF, LIST, PERSON, is_list, is_person

from core_runner.cli import main

SMALL = ["--device", "cpu", "--max-model-len", "256", "--max-num-reqs", "4", "--num-blocks", "65"]
SAMPLED = ["--temperature", "1", "--seed", "4", "Once upon a time"]


def generate(*arguments, **options):
    return CliRunner().invoke(main, ["generate", *SMALL, *map(str, arguments)], **options)


@pytest.fixture
def schema_file(tmp_path: Path) -> Path:
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    return tmp_path / "person.json"


def test_schema_from_a_file_and_from_the_line(schema_file: Path) -> None:
    by_file = generate("--json-schema", schema_file, *SAMPLED)
    by_text = generate("--json-schema", json.dumps(PERSON), *SAMPLED)
    assert by_file.exit_code == by_text.exit_code == 0
    assert by_file.stdout == by_text.stdout
    assert is_person(by_file.stdout)


def test_grammar_from_a_file_and_choices(tmp_path: Path) -> None:
    (tmp_path / "list.lark").write_text(LIST)
    assert is_list(generate("--grammar", tmp_path / "list.lark", *SAMPLED).stdout.strip())
    assert re.fullmatch(
        r"([x-z]=[0-9];){1,2}", generate("--grammar", "-", *SAMPLED, input=GBNF).stdout.strip()
    )
    choices = [argument for choice in CHOICES for argument in ("--choice", choice)]
    assert generate(*choices, *SAMPLED).stdout.removesuffix("\n") in CHOICES


def test_rows_bring_their_own(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "Hi", "structured_output": {"json": PERSON}, "temperature": 1, "seed": 1},
        {"id": "b", "prompt": "Hi", "structured_output": {"regex": "[a"}},
        {"id": "c", "prompt": "Hi", "structured_output": {"pattern": "a"}},
        {"id": "d", "prompt": "Hi"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = generate("--input", tmp_path / "rows.jsonl", "--regex", "[xy]{3}")
    assert done.exit_code == 0
    results = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert is_person(results["a"]["text"])
    assert "unclosed character class" in results["b"]["error"]
    assert "must be a StructuredOutput, or a mapping" in results["c"]["error"]
    assert re.fullmatch("[xy]{3}", results["d"]["text"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regex", "a", "--choice", "b"], "exactly one of"),
        (["--json-schema", "/nowhere/schema.json"], "cannot be read"),
        (["--json-schema", "{"], "is not JSON"),
        (["--regex", "[a"], "unclosed character class"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], message: str) -> None:
    done = generate(*arguments, "Hi")
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_keeps_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "structured_output.py"
    texts = list(runpy.run_path(str(path))["main"]().values())
    animal = json.loads(texts[0])
    assert list(animal) == ["name", "kind", "age"]
    assert re.fullmatch("[0-9a-f]{6}", texts[1])
    assert texts[2] in ("yes", "no")
    assert re.fullmatch(r"[1-9]\d?( [+-] [1-9]\d?){1,2} = [1-9]\d?", texts[3])
    assert str(animal) in capsys.readouterr().out
