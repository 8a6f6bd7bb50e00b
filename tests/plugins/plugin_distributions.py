"""Installed distributions for tests: real dist-info folders, and a process that sees them on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# The plugins that come with this distribution, as MODEL_STATES_DISABLE takes them.
BUNDLED = ",".join(
    tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][
        "model_states"
    ]
)


def plugin_source(name: str, architecture: str, body: str = "") -> str:
    """Source of a working plugin module: one model state, light enough to import without torch."""
    return f"""
from model_states import ModelState, hookimpl

class State(ModelState):
    name = {name!r}
    api_version = 1
    architectures = ({architecture!r},)
    {body or "pass"}
    def forward(self, batch, **inputs): return batch
    def compute_logits(self, hidden_states): return hidden_states

@hookimpl
def register_model_states():
    return [State]
"""


def install(
    site: Path, name: str, source: str, *, distribution: str = "", value: str = "", version: str = "1.0"
) -> None:
    """Write module `<name>_module` and a dist-info whose entry point `name` refers to it."""
    distribution = distribution or f"dist-{name}"
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{name}_module.py").write_text(source)
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[model_states]\n{name} = {value or name + '_module'}\n")


def run_python(
    site: Path, script: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own that finds the distributions of `site` and this checkout."""
    path = os.pathsep.join([str(site), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_json(site: Path, script: str, **environment: str) -> Any:
    """What a script prints as its last line, as JSON; a failure shows the script's errors."""
    done = run_python(site, script, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
