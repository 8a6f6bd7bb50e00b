"""The plugin manager: conflicts, versions, class checks, disabling, and what it says of each plugin."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
from plugin_distributions import install, plugin_source

from model_states import (
    ModelState,
    PluginConflictError,
    PluginError,
    PluginHookError,
    PluginLoadError,
    PluginManager,
    PluginVersionError,
    UnsupportedModelError,
    hookimpl,
)


class State(ModelState):
    """A working model state to derive test classes from."""

    name = "base"
    api_version = 1
    capabilities = frozenset({"chunked_prefill"})

    @hookimpl
    def add_request(self, slot, request):
        """One hot hook."""

    def forward(self, batch, **inputs):
        return batch

    def compute_logits(self, hidden_states):
        return hidden_states


def make_state(name, **attributes):
    return type(f"State_{name}", (State,), {"name": name, **attributes})


def make_plugin(*classes, name="given"):
    plugin = ModuleType(name)
    plugin.register_model_states = hookimpl(lambda: list(classes))
    return plugin


def manager_of(*classes):
    return PluginManager(autoload=False, plugins=[make_plugin(*classes)])


def checkpoint(architecture="FooLM", hf_config=None):
    return SimpleNamespace(architecture=architecture, model="m", raw_config={}, hf_config=hf_config)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed distributions; those of the environment are hidden."""
    found = tmp_path / "site"
    found.mkdir()
    monkeypatch.syspath_prepend(str(found))
    real = __import__("importlib.metadata").metadata.distributions
    monkeypatch.setattr("importlib.metadata.distributions", lambda: real(path=[str(found)]))
    monkeypatch.delenv("MODEL_STATES_DISABLE", raising=False)
    yield found
    for name in [name for name in sys.modules if name.endswith("_module")]:
        del sys.modules[name]


def test_rows_say_what_each_plugin_brings(site):
    install(site, "beta", plugin_source("beta", "BetaLM"), version="2.0")
    install(site, "alpha", plugin_source("alpha", "AlphaLM"))
    rows = PluginManager(
        plugins=[make_plugin(make_state("c", architectures=("Z", "A")), make_state("d"))]
    ).plugins()
    assert [(row.name, row.distribution, row.version) for row in rows] == [
        ("alpha", "dist-alpha", "1.0"),
        ("beta", "dist-beta", "2.0"),
        ("given", "given by call", "-"),
    ]
    assert rows[2].hooks == ("register_model_states", "add_request")
    assert rows[2].architectures == ("A", "Z")
    assert rows[2].model_states == ("c", "d")
    assert [row.status for row in rows] == ["ok"] * 3


def test_disabled_plugins_are_not_imported(site, monkeypatch):
    install(site, "boom", "raise RuntimeError('imported')")
    install(site, "alpha", plugin_source("alpha", "AlphaLM"))
    monkeypatch.setenv("MODEL_STATES_DISABLE", "boom, other")
    manager = PluginManager(strict=True)
    assert [(row.name, row.status, row.error) for row in manager.plugins()] == [
        ("alpha", "ok", None),
        ("boom", "disabled", None),
    ]
    assert PluginManager(autoload=False).plugins() == []


def test_plugin_name_of_two_distributions_is_a_conflict_that_names_both(site, caplog):
    install(site, "twin", plugin_source("twin", "TwinLM"), distribution="first")
    (site / "second-3.0.dist-info").mkdir()
    (site / "second-3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: second\nVersion: 3.0\n"
    )
    (site / "second-3.0.dist-info" / "entry_points.txt").write_text("[model_states]\ntwin = twin_module\n")
    manager = PluginManager()
    message = "plugin name 'twin' is provided by first 1.0 and second 3.0"
    assert [row.status for row in manager.plugins()] == ["broken", "broken"]
    assert message in caplog.text
    with pytest.raises(PluginConflictError, match=message):
        manager.select(checkpoint("TwinLM"), "twin")
    with pytest.raises(UnsupportedModelError, match=message):
        manager.select(checkpoint("TwinLM"))
    with pytest.raises(PluginConflictError, match=message):
        PluginManager(strict=True)


def test_second_copy_of_a_distribution_is_no_conflict(site):
    """As with a user's folder beside an environment: Python imports from the first copy alone."""
    install(site, "twin", plugin_source("twin", "TwinLM"), distribution="dist-twin")
    install(site, "twin", plugin_source("twin", "TwinLM"), distribution="Dist_Twin", version="0.9")
    [row] = PluginManager(strict=True).plugins()
    assert row.status == "ok"


def test_model_state_name_of_two_plugins_is_a_conflict_that_names_both(site):
    install(site, "alpha", plugin_source("same", "AlphaLM"))
    install(site, "beta", plugin_source("same", "BetaLM"))
    install(site, "gamma", plugin_source("gamma", "GammaLM"))
    manager = PluginManager()
    assert [cls.name for cls in manager.model_states] == ["gamma"]
    for row in manager.plugins()[:2]:
        assert "'same' is provided by alpha_module.State of plugin 'alpha' (dist-alpha 1.0" in row.error
        assert "and by beta_module.State of plugin 'beta'" in row.error
    with pytest.raises(PluginConflictError, match=r"model state 'x' is provided by .*\(given by call\)"):
        manager_of(make_state("x"), make_state("x"))


def test_one_class_that_two_plugins_register_counts_once():
    cls = make_state("x", architectures=("FooLM",))
    manager = PluginManager(autoload=False, plugins=[make_plugin(cls, name="a"), make_plugin(cls, name="b")])
    assert manager.select(checkpoint()) is cls


def abstract(name):
    return type("Abstract", (ModelState,), {"name": name, "api_version": 1})


BAD_CLASSES = {
    "version too new": (
        make_state("x", api_version=99),
        PluginVersionError,
        "has api_version 99, this release speaks 1",
    ),
    "version zero": (make_state("x", api_version=0), PluginHookError, "`api_version` is 0"),
    "no name": (make_state(""), PluginHookError, "class attribute `name` is ''; declare it"),
    "no version": (
        type("NoVersion", (State,), {"name": "x", "api_version": None}),
        PluginHookError,
        "`api_version`",
    ),
    "architectures a string": (make_state("x", architectures="FooLM"), PluginHookError, "must be a tuple"),
    "unknown capability": (
        make_state("x", capabilities=frozenset({"graphs", "telepathy"})),
        PluginHookError,
        r"unknown capabilities \['telepathy'\]; known are \['chunked_prefill', 'graphs',",
    ),
    "abstract": (abstract("x"), PluginHookError, "does not define compute_logits, forward"),
    "an instance": (State(None), PluginHookError, "is not a subclass of ModelState"),
    "a foreign class": (dict, PluginHookError, "is not a subclass of ModelState"),
}


@pytest.mark.parametrize("case", BAD_CLASSES)
def test_class_that_breaks_the_contract_is_refused_at_load(case):
    cls, error, message = BAD_CLASSES[case]
    with pytest.raises(error, match=message):
        manager_of(cls)


def test_result_that_is_no_list_and_a_class_as_plugin_are_refused():
    plugin = ModuleType("given")
    plugin.register_model_states = hookimpl(lambda: 3)
    with pytest.raises(PluginHookError, match=r"register_model_states returned 3; return a list"):
        PluginManager(autoload=False, plugins=[plugin])
    with pytest.raises(PluginHookError, match=r"is a class; a plugin is a module, or an object"):
        PluginManager(autoload=False, plugins=[State])


def test_wrong_arguments_and_misspelt_cold_hooks_are_refused():
    plugin = ModuleType("given")
    plugin.register_model_states = hookimpl(lambda registry: [])
    with pytest.raises(PluginHookError, match=r"registry"):
        PluginManager(autoload=False, plugins=[plugin])
    plugin = ModuleType("given")
    plugin.register_model_state = hookimpl(lambda: [])
    with pytest.raises(
        PluginHookError, match=r"register_model_state is not a hook .*closest: register_model_states"
    ):
        PluginManager(autoload=False, plugins=[plugin])


def test_a_hook_that_raises_when_given_by_call_is_raised_at_once():
    plugin = ModuleType("given")
    plugin.register_model_states = hookimpl(lambda: 1 // 0)
    with pytest.raises(PluginLoadError, match=r"ZeroDivisionError.*or do not pass it"):
        PluginManager(autoload=False, plugins=[plugin])


def test_keyboard_interrupt_is_not_swallowed(site):
    install(site, "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginManager()


def test_construct_names_broken_plugins_when_a_model_is_refused(site, caplog):
    install(site, "broken", "import no_such_module_anywhere")

    class Declines(State):
        name = "declines"
        fallback = True

        def __init__(self, config):
            raise UnsupportedModelError("it has an encoder")

    manager = PluginManager(plugins=[make_plugin(Declines)])
    caplog.set_level(logging.INFO)
    cls = manager.select(checkpoint(hf_config=object()))
    assert "falls to the fallback 'declines'" in caplog.text
    with pytest.raises(
        UnsupportedModelError, match=r"it has an encoder.*plugin 'broken' .*no_such_module_anywhere"
    ):
        manager.construct(cls, None)
    with pytest.raises(UnsupportedModelError, match=r"^it has an encoder$"):
        manager_of(Declines).construct(Declines, None)
    assert isinstance(manager.construct(State, None), State)


def test_embedded_model_is_the_fallbacks_then_the_first(tmp_path):
    def having(name, path, **attributes):
        return make_state(name, embedded_model=classmethod(lambda cls: path), **attributes)

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first, fallback = having("x", tmp_path / "a"), having("y", tmp_path / "b", fallback=True)
    assert manager_of(make_state("none"), first).default_embedded_model() == tmp_path / "a"
    assert manager_of(first, fallback).default_embedded_model() == tmp_path / "b"
    with pytest.raises(
        UnsupportedModelError, match=r"no usable plugin ships an embedded model; name a model"
    ):
        manager_of(make_state("none")).default_embedded_model()
    with pytest.raises(
        UnsupportedModelError, match=r"declares an embedded model at .*gone, which is no directory"
    ):
        manager_of(having("x", tmp_path / "gone")).default_embedded_model()


def test_embedded_models_have_names(tmp_path):
    def having(name, path, **attributes):
        return make_state(name, embedded_model=classmethod(lambda cls: path), **attributes)

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    manager = manager_of(
        having("x", tmp_path / "a"),
        having("y", tmp_path / "b", fallback=True),
        having("gone", tmp_path / "c"),
        make_state("none"),
    )
    assert manager.locate(None) == str(tmp_path / "b")
    assert manager.locate("embedded:x") == str(tmp_path / "a")
    for elsewhere in ("owner/name", "/some/where", "x", "embedded"):
        assert manager.locate(elsewhere) == elsewhere
    with pytest.raises(
        UnsupportedModelError,
        match=r"^'embedded:none': no usable model state 'none' ships .*: embedded:x, embedded:y, embedded:gone$",
    ):
        manager.locate("embedded:none")
    with pytest.raises(UnsupportedModelError, match=r"'gone' declares .*c, which is no directory"):
        manager.locate("embedded:gone")


def test_a_task_has_its_own_default_model(tmp_path):
    def having(name, tasks, **attributes):
        return make_state(
            name, embedded_model=classmethod(lambda cls: tmp_path), embedded_tasks=tasks, **attributes
        )

    manager = manager_of(
        make_state("none", embedded_tasks={"transcription": "is not there"}),
        having("other", {}, fallback=True),
        having("first", {"transcription": "understands bells only", "translation": "knows no grammar"}),
        having("second", {"transcription": "hears everything"}),
    )
    assert manager.embedded_for_task("transcription") == ("embedded:first", "understands bells only")
    assert manager.embedded_for_task("translation")[0] == "embedded:first"
    with pytest.raises(
        UnsupportedModelError,
        match=r"^no usable plugin ships an embedded model for segmentation; name a model$",
    ):
        manager.embedded_for_task("segmentation")


def test_an_embedded_model_that_is_missing_names_what_was_switched_off(tmp_path, monkeypatch):
    install(tmp_path, "alone", plugin_source("alone", "AloneLM"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MODEL_STATES_DISABLE", "alone")
    with pytest.raises(UnsupportedModelError, match=r"'embedded:alone'.*MODEL_STATES_DISABLE: alone"):
        PluginManager().locate("embedded:alone")


def test_errors_are_value_errors_of_one_tree():
    assert issubclass(PluginError, ValueError)


def test_a_plugin_that_was_switched_off_is_named_where_it_is_missing(tmp_path, monkeypatch):
    install(tmp_path, "alone", plugin_source("alone", "AloneLM"))
    monkeypatch.syspath_prepend(tmp_path)
    names = ", ".join(row.name for row in PluginManager().plugins())
    monkeypatch.setenv("MODEL_STATES_DISABLE", names)
    with pytest.raises(UnsupportedModelError, match=r"Switched off by MODEL_STATES_DISABLE: .*alone"):
        PluginManager().default_embedded_model()
