"""Who may import whom, and what an import may cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_tree import REPOSITORY, files, imported_modules, name_of

PLUGIN_PACKAGES = {path.name for path in (REPOSITORY / "plugins").iterdir() if path.is_dir()} - {
    "__pycache__"
}


def violations(root, forbidden):
    found = []
    for path in files(root):
        for module in sorted(imported_modules(path)):
            if forbidden(path, module.split(".")[0]):
                found.append(f"{name_of(path)} imports {module}")
    return found


def test_there_are_plugins_and_files_to_check():
    assert "model_states_decoder" in PLUGIN_PACKAGES
    assert len(files("core_runner")) > 10
    assert len(files("model_states")) > 10


def test_core_never_imports_a_plugin():
    assert violations("core_runner", lambda _, top: top in {*PLUGIN_PACKAGES, "plugins"}) == []


def test_contract_imports_neither_core_nor_plugins():
    assert (
        violations("model_states", lambda _, top: top in {*PLUGIN_PACKAGES, "plugins", "core_runner"}) == []
    )


def test_plugins_import_only_the_contract_and_themselves():
    def forbidden(path, top):
        own = path.relative_to(REPOSITORY / "plugins").parts[0]
        return top in ({*PLUGIN_PACKAGES, "plugins", "core_runner"} - {own})

    assert violations("plugins", forbidden) == []


def test_imports_are_absolute_and_never_from_folders_that_do_not_ship():
    unshipped = {"", "tests", "examples", "docs", "benchmarks", "plugins"}
    for root in ("core_runner", "model_states", "plugins"):
        assert violations(root, lambda _, top: top in unshipped) == []


def test_plugin_modules_import_nothing_heavy_themselves():
    heavy = {"torch", "transformers", "triton", "numpy", "safetensors"}
    for package in sorted(PLUGIN_PACKAGES):
        tops = {m.split(".")[0] for m in imported_modules(REPOSITORY / "plugins" / package / "__init__.py")}
        assert not tops & heavy, package


LIGHT = {
    "import core_runner": "import core_runner",
    "import model_states": "import model_states",
    "core-runner --help": "from core_runner.cli import main; main(['--help'], standalone_mode=False)",
    "plugins --help": "from core_runner.cli import main; main(['plugins', '--help'], standalone_mode=False)",
    "a plugin's module": "from model_states import ModelState, hookimpl, bind, PluginManager",
}


@pytest.mark.parametrize("name", LIGHT)
def test_start_imports_no_heavy_library(name):
    check = "import sys; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    script = f"try:\n    {LIGHT[name]}\nexcept SystemExit:\n    pass\n{check}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
