"""The benchmarks import each other by name, as scripts of one folder do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last, so that nothing else is hidden by their names

Report = dict[str, Any]


@pytest.fixture
def run_small(tmp_path: Path) -> Callable[..., Report]:
    """Run a script's `main` with `--small` and give what it wrote with `--json`."""

    def run(script: ModuleType, *arguments: str) -> Report:
        path = tmp_path / f"{script.__name__}.json"
        script.main(["--small", "--json", str(path), *arguments])
        return json.loads(path.read_text(encoding="utf-8"))

    return run
