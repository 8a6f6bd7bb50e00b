"""One broken plugin must not take the program down (F-01): real distributions, one process each."""

from __future__ import annotations

import pytest
from plugin_distributions import BUNDLED, install, plugin_source, run_json, run_python

HALF_WAY = """
from model_states import hookimpl

class Plugin:
    @hookimpl
    def register_model_states(self):
        return [State]

    @hookimpl
    def register_model_states_again(self):
        return []

from good1_module import State
plugin = Plugin()
raise RuntimeError("half-way")
"""

RAISES_IN_HOOK = """
from model_states import ModelState, hookimpl

@hookimpl
def register_model_states():
    class Half(ModelState):
        name = "half"
        api_version = 1
        architectures = ("HalfLM",)
        def forward(self, batch, **inputs): return batch
        def compute_logits(self, hidden_states): return hidden_states
    yield Half
    raise RuntimeError("half-way through the list")
"""

SECOND_HOOK_BAD = """
from model_states import hookimpl
from good1_module import State

class Plugin:
    @hookimpl
    def register_model_states(self):
        return [type("Other", (State,), {"name": "other", "architectures": ("OtherLM",)})]

    @hookimpl
    def register_model_statez(self):
        return []

plugin = Plugin()
"""

VARIANTS = {
    "missing import": (
        "import no_such_module_anywhere",
        "",
        "ModuleNotFoundError: No module named 'no_such_module",
    ),
    "syntax error": ("def broken(:", "", "SyntaxError: "),
    "system exit": ("raise SystemExit(3)", "", "SystemExit: 3"),
    "raises half-way": (HALF_WAY, "broken_module:plugin", "RuntimeError: half-way"),
    "raises inside its hook": (RAISES_IN_HOOK, "", "RuntimeError: half-way through the list"),
    "second hook misspelt": (SECOND_HOOK_BAD, "broken_module:plugin", "register_model_statez is not a hook"),
    "names no object": (
        "x = 1",
        "broken_module:nothing",
        "AttributeError: module 'broken_module' has no attribute",
    ),
    "malformed reference": ("x = 1", "not a reference", "plugin 'broken'"),
    "no hooks": ("x = 1", "", "does not define the hook register_model_states"),
    "unmarked hook": (
        "def register_model_states(): return []",
        "",
        "does not mark the hook register_model_states",
    ),
}

SCRIPT = """
import json, logging, sys
from types import SimpleNamespace
logs = []
handler = logging.Handler()
handler.emit = lambda record: logs.append(record.getMessage())
logging.getLogger("model_states").addHandler(handler)
from model_states import PluginManager

def outcome(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

manager = PluginManager()
checkpoint = lambda name: SimpleNamespace(architecture=name, model="m", raw_config={}, hf_config=None)
print(json.dumps({
    "logs": logs,
    "rows": {row.name: [row.distribution, row.version, row.status, row.error] for row in manager.plugins()},
    "classes": sorted(cls.name for cls in manager.model_states),
    "selected": [outcome(lambda: manager.select(checkpoint(name)).name) for name in ("Good1LM", "Good2LM")],
    "missing": outcome(lambda: manager.select(checkpoint("OnlyBrokenServesLM"))),
    "by_name": outcome(lambda: manager.select(checkpoint("Good1LM"), "broken")),
    "strict": outcome(lambda: PluginManager(strict=True)),
}))
"""


def install_three(site, source, value):
    install(site, "good1", plugin_source("good1", "Good1LM"))
    install(site, "broken", source, value=value, version="0.2.1")
    install(site, "good2", plugin_source("good2", "Good2LM"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_broken_plugin_is_a_row_and_the_others_work(tmp_path, variant):
    source, value, reason = VARIANTS[variant]
    install_three(tmp_path, source, value)
    seen = run_json(tmp_path, SCRIPT, MODEL_STATES_DISABLE=BUNDLED)
    assert seen["selected"] == ["good1", "good2"]
    assert seen["classes"] == ["good1", "good2"]
    distribution, version, status, error = seen["rows"]["broken"]
    assert (distribution, version, status) == ("dist-broken", "0.2.1", "broken")
    assert reason in error
    assert "plugin 'broken' (dist-broken 0.2.1, module " in error
    assert "MODEL_STATES_DISABLE=broken" in error
    assert [seen["rows"][name][2:] for name in ("good1", "good2")] == [["ok", None]] * 2
    assert seen["logs"].count(error) == 1
    assert "OnlyBrokenServesLM" in seen["missing"]
    assert error in seen["missing"]
    assert seen["missing"].startswith("UnsupportedModelError")
    assert seen["by_name"].partition(": ")[2] == seen["strict"].partition(": ")[2] == error


def test_command_line_lives_beside_a_broken_plugin_and_strict_fails(tmp_path):
    install_three(tmp_path, "raise SystemExit(3)", "")
    command = "from core_runner.cli import main; main()"
    # The bundled plugin imports torch, which is no part of this.
    without = {"MODEL_STATES_DISABLE": "decoder"}
    listed = run_python(tmp_path, command, "plugins", **without)
    assert listed.returncode == 0, listed.stderr
    assert "SystemExit: 3" in listed.stdout
    assert "Good2LM" in listed.stdout
    assert listed.stderr == ""
    assert run_python(tmp_path, command, "plugins", "--strict", **without).returncode == 1
    disabled = run_python(tmp_path, command, "plugins", "--strict", MODEL_STATES_DISABLE="decoder, broken")
    assert disabled.returncode == 0
    assert "plugin 'broken' is disabled by MODEL_STATES_DISABLE" in disabled.stdout


def test_a_malformed_entry_points_file_is_a_row_of_its_own(tmp_path):
    install_three(tmp_path, "x = 1", "")
    (tmp_path / "dist_broken-0.2.1.dist-info" / "entry_points.txt").write_text(
        "[model_states]\nno equals sign\n"
    )
    (tmp_path / "foreign-1.0.dist-info").mkdir()
    (tmp_path / "foreign-1.0.dist-info" / "entry_points.txt").write_text("[other]\nno equals sign\n")
    seen = run_json(tmp_path, SCRIPT, MODEL_STATES_DISABLE=BUNDLED)
    assert seen["selected"] == ["good1", "good2"]
    broken = [row for row in seen["rows"].values() if row[2] == "broken"]
    assert [row[0] for row in broken] == ["dist-broken"]
    assert "malformed entry_points.txt" in broken[0][3]
