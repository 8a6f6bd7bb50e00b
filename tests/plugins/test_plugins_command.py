"""`core-runner plugins`: the list, its JSON form, and `explain`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from plugin_distributions import install, plugin_source
from test_manager import site  # noqa: F401

from core_runner.cli import main

WITH_HOOK = """
    from model_states import hookimpl
    @hookimpl
    def add_request(self, slot): pass
"""


@pytest.fixture
def run(site, tmp_path):  # noqa: F811
    install(site, "alpha", plugin_source("alpha", "AlphaLM", WITH_HOOK), version="1.2")
    install(site, "broken", "import no_such_module_anywhere")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"architectures": ["AlphaLM"], "model_type": "never-heard-of"})
    )

    def invoke(*arguments):
        return CliRunner().invoke(main, ["plugins", *(a.replace("MODEL", str(model)) for a in arguments)])

    return invoke


def test_table_shows_versions_hooks_architectures_and_reasons(run):
    result = run()
    assert result.exit_code == 0, result.output
    for text in (
        "alpha",
        "dist-alpha",
        "1.2",
        "AlphaLM",
        "register_model_states, add_request",
        "dist-broken",
    ):
        assert text in result.stdout
    assert "plugin 'broken' (dist-broken 1.0, module broken_module) failed to import" in result.stdout
    assert run("--strict").exit_code == 1


def test_json_holds_the_same(run):
    rows = json.loads(run("--json").stdout)
    assert [row["name"] for row in rows] == ["alpha", "broken"]
    assert rows[0] == {
        "name": "alpha",
        "distribution": "dist-alpha",
        "version": "1.2",
        "hooks": ["register_model_states", "add_request"],
        "architectures": ["AlphaLM"],
        "model_states": ["alpha"],
        "status": "ok",
        "error": None,
    }
    assert "no_such_module_anywhere" in rows[1]["error"]


def test_explain_says_which_model_state_and_why(run):
    result = run("explain", "MODEL")
    assert result.exit_code == 0, result.output
    assert "why: model state 'alpha' claims architecture 'AlphaLM'" in result.stdout
    assert "no_such_module_anywhere" in result.stdout
    named = run("explain", "MODEL", "--model-state", "alpha")
    assert "was asked for by name" in named.stdout


def test_explain_of_an_unknown_name_is_a_message_not_a_traceback(run):
    result = run("explain", "MODEL", "--model-state", "alfa")
    assert result.exit_code == 2
    assert "error: no model state is named 'alfa'. Did you mean 'alpha'?" in result.stderr
    assert "Traceback" not in result.output
