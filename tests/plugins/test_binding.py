"""Binding: a bound hook does what pluggy's relay does, and is the plain call it stands for."""

from __future__ import annotations

import logging

import pytest
import torch

from model_states import (
    CacheGroup,
    Component,
    Hooks,
    PluginConflictError,
    PluginError,
    PluginHookError,
    bind,
    hookimpl,
)
from model_states import binding as binding_module
from model_states.hook_names import HOT_HOOK_ARGUMENTS, HOT_HOOKS, combine_rule

ARGUMENTS = {hook: tuple(f"<{hook}.{name}>" for name in names) for hook, names in HOT_HOOK_ARGUMENTS.items()}


def make_component(label, calls, arguments=None, **options):
    """A component that implements every hook, records each call, and answers with its label."""

    def implementation(hook):
        names = HOT_HOOK_ARGUMENTS[hook] if arguments is None else arguments(HOT_HOOK_ARGUMENTS[hook])
        scope = {"record": lambda **given: record(hook, given)}
        passed = ", ".join(f"{name}={name}" for name in names)
        exec(f"def {hook}({', '.join(['self', *names])}): return record({passed})", scope)
        return hookimpl(scope[hook], **options)

    def record(hook, given):
        calls.append((label, hook, tuple(sorted(given.items()))))
        return result(hook, given)

    def result(hook, given):
        rule = combine_rule(hook)
        if rule == "concatenate":
            return [CacheGroup(f"{label}.group", 16, {})]
        if rule == "merge":
            return {f"{label}.{hook}": torch.tensor(1)}
        return f"{label}({given.get('sampler')})" if rule == "chain" else "ignored"

    return type(f"Of{label}", (Component,), {hook: implementation(hook) for hook in HOT_HOOKS})()


COMPOSITIONS = {
    "none": [],
    "one": [{}],
    "one with no arguments": [{"arguments": lambda names: ()}],
    "one with the last argument": [{"arguments": lambda names: names[-1:]}],
    "one with arguments reversed": [{"arguments": lambda names: names[::-1]}],
    "three, mixed": [{}, {"arguments": lambda names: names[:1]}, {"arguments": lambda names: names[::-1]}],
    "three, the last one first": [{}, {}, {"tryfirst": True}],
    "three, the first one last": [{"trylast": True}, {}, {}],
}


def call_all(composition, trace):
    calls, results = [], {}
    hooks = bind(
        [make_component(f"c{i}", calls, **options) for i, options in enumerate(composition)], trace=trace
    )
    for hook in HOT_HOOKS:
        results[hook] = getattr(hooks, hook)(*ARGUMENTS[hook])
    return calls, results


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_bound_equals_relayed_for_every_hook(name):
    bound_calls, bound = call_all(COMPOSITIONS[name], trace=False)
    relayed_calls, relayed = call_all(COMPOSITIONS[name], trace=True)
    assert bound_calls == relayed_calls
    assert len(bound_calls) == len(COMPOSITIONS[name]) * len(HOT_HOOKS)
    for hook in HOT_HOOKS:
        if combine_rule(hook) != "notify":
            assert bound[hook] == relayed[hook]


def test_calls_run_in_registration_order_with_the_arguments_of_the_spec():
    calls, results = call_all([{}, {}], trace=False)
    expected = [
        (label, hook, tuple(sorted(zip(HOT_HOOK_ARGUMENTS[hook], ARGUMENTS[hook], strict=True))))
        for hook in HOT_HOOKS
        for label in ("c0", "c1")
    ]
    assert [call[:2] for call in calls] == [call[:2] for call in expected]
    plain = [call for call in calls if call[1] != "custom_sampler"]
    assert plain == [call for call in expected if call[1] != "custom_sampler"]
    assert [group.name for group in results["cache_groups"]] == ["c0.group", "c1.group"]
    assert list(results["prepare_inputs"]) == ["c0.prepare_inputs", "c1.prepare_inputs"]
    assert list(results["prepare_dummy_inputs"]) == ["c0.prepare_dummy_inputs", "c1.prepare_dummy_inputs"]
    assert results["custom_sampler"] == "c1(c0(<custom_sampler.sampler>))"


def test_no_implementation_is_a_shared_no_op_with_a_neutral_result():
    hooks = bind([], trace=False)
    assert hooks.preprocess_state is hooks.after_forward is hooks.apply_staged_writes
    assert hooks.cache_groups() == []
    assert dict(hooks.prepare_inputs("batch")) == dict(hooks.prepare_dummy_inputs(1, 2)) == {}
    assert hooks.custom_sampler("sampler") == "sampler"


def test_one_implementation_is_the_bound_method_itself():
    component = make_component("c", [])
    hooks = bind([component], trace=False)
    for hook in HOT_HOOKS:
        if combine_rule(hook) == "notify":
            assert getattr(hooks, hook) == getattr(component, hook)


class Silent(Component):
    """Answers None where a result is asked for."""

    @hookimpl
    def cache_groups(self):
        return None

    @hookimpl
    def prepare_inputs(self):
        return None

    @hookimpl
    def custom_sampler(self):
        return None


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("neighbours", [0, 1])
def test_none_means_nothing_to_add(trace, neighbours):
    others = [make_component(f"c{i}", []) for i in range(neighbours)]
    hooks = bind([Silent(), *others], trace=trace)
    assert len(hooks.cache_groups()) == len(hooks.prepare_inputs("batch")) == neighbours
    assert hooks.custom_sampler("s") == ("c0(s)" if neighbours else "s")


class GivesPositions(Component):
    """Gives an input and a cache group under a fixed name."""

    @hookimpl
    def prepare_inputs(self):
        return {"positions": torch.zeros(1)}

    @hookimpl
    def cache_groups(self):
        return [CacheGroup("kv", 16, {})]


@pytest.mark.parametrize("trace", [False, True])
def test_a_name_given_twice_is_an_error_that_names_both(trace):
    other = type("Other", (GivesPositions,), {})
    hooks = bind([GivesPositions(), other()], trace=trace)
    with pytest.raises(
        PluginHookError, match=r"prepare_inputs: two of GivesPositions\[0\], Other\[1\] give positions"
    ):
        hooks.prepare_inputs("batch")
    with pytest.raises(PluginHookError, match=r"cache_groups: several groups of .*Other\[1\] are named 'kv'"):
        hooks.cache_groups()


@pytest.mark.parametrize("trace", [False, True])
def test_wrapper_keeps_the_relay_and_runs_around_all_others(trace):
    calls = []

    class Timer(Component):
        @hookimpl(wrapper=True)
        def prepare_inputs(self, batch):
            calls.append(("before", batch))
            results = yield
            calls.append(("after", len(results)))
            return results

    hooks = bind([make_component("c0", calls), Timer(), make_component("c1", calls)], trace=trace)
    assert list(hooks.prepare_inputs("b")) == ["c0.prepare_inputs", "c1.prepare_inputs"]
    assert [call[0] for call in calls] == ["before", "c0", "c1", "after"]


def test_an_exception_reaches_the_caller_as_it_is():
    class Fails(Component):
        @hookimpl
        def add_request(self, slot):
            raise KeyError(slot)

    for trace in (False, True):
        with pytest.raises(KeyError, match="7"):
            bind([Fails()], trace=trace).add_request(7, "request")


def test_registration_is_refused_after_binding():
    hooks = bind([Silent()])
    with pytest.raises(PluginError, match="cannot register Silent: hooks are bound already; give it to bind"):
        hooks.relay.register(Silent())
    with pytest.raises(PluginError, match="cannot unregister"):
        hooks.relay.unregister(name="Silent[0]")
    with pytest.raises(AttributeError):
        hooks.new_hook = None


def test_what_is_bound_must_be_distinct_component_instances():
    component = Silent()
    with pytest.raises(PluginHookError, match=r"the class .*Silent.*give an instance"):
        bind([Silent])
    with pytest.raises(PluginHookError, match="an object that is no Component: <object"):
        bind([object()])
    with pytest.raises(PluginConflictError, match="Silent number 1 is given to bind"):
        bind([component, component])
    assert len(bind([Silent(), Silent(), Component(), Component()]).relay.get_plugins()) == 4


def test_an_attribute_or_a_late_method_that_hides_a_hook_is_refused():
    component = Silent()
    component.cache_groups = []
    with pytest.raises(PluginHookError, match=r"Silent: the attribute cache_groups hides the hook"):
        bind([component])

    class Patched(Component):
        """Gets an unmarked method after the class was checked."""

    Patched.run_encoder = lambda self, batch: None
    with pytest.raises(PluginHookError, match="run_encoder has the name of a hook but is not marked"):
        bind([Patched()])


def test_properties_of_an_implementation_are_not_evaluated():
    class Costly(Silent):
        @property
        def weights(self):
            raise RuntimeError("evaluated")

    assert bind([Costly()]).cache_groups() == []


def test_trace_variable_keeps_the_relay_and_logs_shapes_only(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="model_states.trace")
    component = make_component("c", [])
    monkeypatch.setenv("MODEL_STATES_TRACE", "1")
    hooks = bind([component])
    assert hooks.after_forward != component.after_forward
    hooks.after_forward("batch", torch.full((2, 3), 7.0))
    hooks.custom_sampler("sampler")
    assert "after_forward(batch='batch', hidden_states=Tensor[2, 3]) of Ofc[0]" in caplog.messages
    assert "custom_sampler('sampler') of Ofc[0]" in caplog.messages
    monkeypatch.setenv("MODEL_STATES_TRACE", "0")
    assert bind([component]).after_forward == component.after_forward


def test_typed_attributes_cover_every_hook_with_its_number_of_arguments():
    annotations = {name: text for name, text in Hooks.__annotations__.items() if name != "relay"}
    assert tuple(annotations) == HOT_HOOKS == binding_module.HOT_HOOKS
    for hook, text in annotations.items():
        inside = text[len("Callable[[") : text.index("]", len("Callable[["))]
        assert len([part for part in inside.split(",") if part.strip()]) == len(HOT_HOOK_ARGUMENTS[hook])
