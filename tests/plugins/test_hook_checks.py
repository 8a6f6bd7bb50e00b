"""A hook that pluggy would drop without a word is an error when its class is created."""

from __future__ import annotations

import pytest

from model_states import Component, PluginHookError, hookimpl
from model_states.hook_checks import implemented_hooks
from model_states.hook_names import HOT_HOOKS


def make(name, function, base=Component):
    return type("Bad", (base,), {name: function})


def test_marked_hook_is_accepted_with_all_or_fewer_arguments_in_any_order():
    class Good(Component):
        @hookimpl
        def add_request(self, request, slot):
            """Reordered."""

        @hookimpl(tryfirst=True)
        def remove_request(self, slot):
            """Fewer."""

        @hookimpl(wrapper=True)
        def preprocess_state(self):
            return (yield)

        def helper(self, anything):
            """Not a hook."""

    assert implemented_hooks(Good) == ("add_request", "remove_request", "preprocess_state")


@pytest.mark.parametrize("hook", HOT_HOOKS)
def test_unmarked_method_with_a_hooks_name_is_refused(hook):
    with pytest.raises(
        PluginHookError, match=rf"Bad: {hook} has the name of a hook but is not marked.*@hookimpl"
    ):
        make(hook, lambda self: None)


def test_override_that_forgets_the_marker_is_refused():
    class Base(Component):
        @hookimpl
        def prepare_attn(self, batch):
            """Marked here."""

    with pytest.raises(PluginHookError, match="prepare_attn has the name of a hook but is not marked"):
        make("prepare_attn", lambda self, batch: None, Base)


def test_unmarked_hook_of_a_mixin_is_refused():
    class Mixin:
        def run_encoder(self, batch):
            """Would silently be no implementation."""

    with pytest.raises(PluginHookError, match="run_encoder"):
        type("Mixed", (Mixin, Component), {})


def test_misspelt_hook_names_the_closest():
    with pytest.raises(
        PluginHookError, match=r"prepare_atn is not a model_states hook \(closest: prepare_attn\)"
    ):
        make("prepare_atn", hookimpl(lambda self, batch: None))


def test_marked_method_with_a_foreign_name_lists_the_hooks():
    with pytest.raises(PluginHookError, match=r"zzz is not a model_states hook \(hooks: cache_groups, "):
        make("zzz", hookimpl(lambda self: None))


def wrong_name(self, bach):
    """An argument that the spec has not."""


def with_default(self, slot, reason="finished"):
    """A default that pluggy would always use."""


def star(self, *args):
    """Never filled."""


def keyword_only(self, *, slot):
    """Never filled."""


async def asynchronous(self, slot):
    """Never awaited."""


def generator(self, slot):
    """Its body never runs."""
    yield


BAD_IMPLEMENTATIONS = [
    (
        "prepare_attn",
        hookimpl(wrong_name),
        r"takes 'bach' \(closest: batch\), which prepare_attn\(batch\) has not",
    ),
    ("remove_request", hookimpl(with_default), "gives reason a default"),
    ("remove_request", hookimpl(star), r"takes \*args"),
    ("remove_request", hookimpl(keyword_only), "name the arguments plainly"),
    ("remove_request", hookimpl(asynchronous), "is async"),
    ("remove_request", hookimpl(generator), "would never run"),
    ("remove_request", hookimpl(lambda self, slot: None, wrapper=True), "a wrapper must yield"),
    ("custom_sampler", hookimpl(lambda self, sampler: (yield), wrapper=True), "cannot be a wrapper"),
    (
        "remove_request",
        staticmethod(hookimpl(lambda slot: None)),
        "is a staticmethod; a hook is a plain method",
    ),
    ("remove_request", classmethod(hookimpl(lambda cls, slot: None)), "is a classmethod"),
    ("run_encoder", None, "has the name of a hook but is not marked"),
    ("remove_request", hookimpl(lambda self: None, specname="add_request"), "specname"),
]


@pytest.mark.parametrize(("name", "function", "message"), BAD_IMPLEMENTATIONS)
def test_ill_shaped_hook_is_refused(name, function, message):
    with pytest.raises(PluginHookError, match=message):
        make(name, function)
