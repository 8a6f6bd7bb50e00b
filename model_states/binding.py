"""Binding: pluggy checks a loaded model's hooks, and each becomes the plain call it stands for.

A relayed call costs about 1.7 us, a bound one about 0.07 us. A hook without implementation is a shared no-op,
with one it is that method (or an adapter that drops the arguments it does not take), with several a flat
loop. Call order is the order of registration: the model state, its components, then extensions; `tryfirst`
and `trylast` move an implementation within it. A hook that has a wrapper keeps pluggy's relay, and so do all
under MODEL_STATES_TRACE=1.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pluggy

from model_states.errors import PluginConflictError, PluginError, PluginHookError
from model_states.hook_checks import check_hooks, implemented_hooks
from model_states.hook_names import HOT_HOOK_ARGUMENTS, HOT_HOOKS, combine_rule
from model_states.hookspecs import PROJECT_NAME, HotHooks
from model_states.input_names import input_names
from model_states.interface import Component

if TYPE_CHECKING:
    import torch

    from model_states.batch import InputBatch, RemoveReason, RequestInputs, RequestView
    from model_states.cache import CacheGroup, Caches
    from model_states.config import ModelConfig
    from model_states.logits_processor import LogitsProcessor
    from model_states.sampler import Sampler

Call = Callable[..., Any]
_NO_INPUTS: Final[Mapping[str, Any]] = MappingProxyType({})
_trace_log = logging.getLogger("model_states.trace")


class HookRelay(pluggy.PluginManager):
    """pluggy's manager of one loaded model; it refuses registration once its hooks are bound."""

    sealed = False

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register an object with hooks, before binding only."""
        self._check_open("register", name or type(plugin).__name__)
        return super().register(plugin, name)

    def unregister(self, plugin: object | None = None, name: str | None = None) -> object | None:
        """Take an object out, before binding only."""
        self._check_open("unregister", name or type(plugin).__name__)
        return super().unregister(plugin, name)

    def _check_open(self, action: str, what: str) -> None:
        if self.sealed:
            raise PluginError(
                f"cannot {action} {what}: hooks are bound already; give it to bind() at load instead"
            )


class _Implementation:
    """The hooks of one object as attributes, compared by identity."""

    def __init__(self, hooks: Mapping[str, Call]) -> None:
        vars(self).update(hooks)


class Hooks:
    """Every hot hook of one loaded model as a plain call; arguments are positional, in the spec's order.

    input_names: of the `model_inputs` that somebody reads; None where one judges the names itself.
    """

    __slots__ = (*HOT_HOOKS, "input_names", "relay")

    cache_groups: Callable[[], list[CacheGroup]]
    init_caches: Callable[[Caches], None]
    input_keys: Callable[[RequestInputs], Mapping[str, bytes]]
    reserve: Callable[[RequestInputs], Mapping[str, str]]
    expect_requests: Callable[[Sequence[RequestInputs]], None]
    add_request: Callable[[int, RequestView], None]
    remove_request: Callable[[int, RemoveReason], None]
    apply_staged_writes: Callable[[], None]
    run_encoder: Callable[[InputBatch], None]
    preprocess_state: Callable[[InputBatch], None]
    prepare_attn: Callable[[InputBatch], None]
    prepare_inputs: Callable[[InputBatch], Mapping[str, torch.Tensor]]
    prepare_dummy_inputs: Callable[[int, int], Mapping[str, torch.Tensor]]
    after_forward: Callable[[InputBatch, torch.Tensor], None]
    postprocess_state: Callable[[InputBatch, torch.Tensor, torch.Tensor], None]
    custom_sampler: Callable[[Sampler], Sampler]
    logits_processors: Callable[[ModelConfig, int], list[LogitsProcessor]]
    relay: HookRelay

    def __init__(
        self, calls: Mapping[str, Call], relay: HookRelay, input_names: frozenset[str] | None
    ) -> None:
        for hook in HOT_HOOKS:
            setattr(self, hook, calls[hook])
        self.relay, self.input_names = relay, input_names

    def has(self, hook: str) -> bool:
        """Whether somebody implements a hook."""
        return bool(getattr(self.relay.hook, hook).get_hookimpls())


def bind(implementations: Sequence[Component], *, trace: bool | None = None) -> Hooks:
    """Check and bind the hooks of one loaded model.

    implementations: the model state, its components, then extensions; hooks are called in this order.
    trace: keep pluggy's relay and log every call; None asks MODEL_STATES_TRACE.
    Raises `PluginHookError` for a hook that pluggy would ignore, `PluginConflictError` for an object given
    twice.
    """
    relay = HookRelay(PROJECT_NAME)
    relay.add_hookspecs(HotHooks)
    _register(relay, implementations)
    relay.check_pending()
    if trace is None:
        trace = os.environ.get("MODEL_STATES_TRACE", "") not in ("", "0")
    if trace:
        _start_trace(relay)
    calls = {hook: _compile(relay, hook, trace) for hook in HOT_HOOKS}
    hooks = Hooks(calls, relay, input_names(implementations))
    relay.sealed = True
    return hooks


def _register(relay: HookRelay, implementations: Sequence[Component]) -> None:
    for index, implementation in enumerate(implementations):
        _check_instance(implementation)
        if any(implementation is other for other in implementations[:index]):
            name = type(implementation).__qualname__
            raise PluginConflictError(
                f"{name} number {index} is given to bind() twice; its hooks would run twice"
            )
    # pluggy calls what was registered last first. It is given the hooks alone, because it looks at every
    # attribute of what it registers, and a property of a model may be costly or fail.
    for index, implementation in reversed(list(enumerate(implementations))):
        cls = type(implementation)
        hooks = {hook: getattr(implementation, hook) for hook in implemented_hooks(cls)}
        relay.register(_Implementation(hooks), name=f"{cls.__qualname__}[{index}]")


def _check_instance(implementation: object) -> None:
    if not isinstance(implementation, Component):
        what = "the class" if isinstance(implementation, type) else "an object that is no Component:"
        raise PluginHookError(f"bind() was given {what} {implementation!r}; give an instance of a Component")
    check_hooks(type(implementation))
    hidden = sorted(set(HOT_HOOKS) & set(getattr(implementation, "__dict__", ())))
    if hidden:
        name = type(implementation).__qualname__
        raise PluginHookError(
            f"{name}: the attribute {hidden[0]} hides the hook of that name; rename the attribute"
        )


def _compile(relay: HookRelay, hook: str, trace: bool) -> Call:
    implementations = getattr(relay.hook, hook).get_hookimpls()[::-1]
    owners = [i.plugin_name for i in implementations]
    calls = [_positional(hook, i.function, i.argnames) for i in implementations]
    rule = combine_rule(hook)
    if rule == "chain":
        return _chain([_traced(hook, o, c) for o, c in zip(owners, calls, strict=True)] if trace else calls)
    if trace or any(i.wrapper for i in implementations):
        return _relayed(relay, hook, owners)
    if rule == "concatenate":
        return lambda *args: _concatenate(hook, owners, (call(*args) for call in calls))
    if rule == "merge":
        return _merged(hook, owners, calls)
    return _notify(calls)


def _positional(hook: str, method: Call, taken: Sequence[str]) -> Call:
    """`method`, callable with all of the hook's arguments by position."""
    names = HOT_HOOK_ARGUMENTS[hook]
    if tuple(taken) == names:
        return method
    # Generated once, so that a call costs one frame; both name lists were checked against the spec.
    source = f"lambda {', '.join(names)}: method({', '.join(taken)})"
    adapter: Call = eval(source, {"method": method})
    return adapter


def _nothing(*_: object) -> None:
    """What a notification does that nobody implements."""


def _notify(calls: Sequence[Call]) -> Call:
    if len(calls) <= 1:
        return calls[0] if calls else _nothing

    def notify(*args: object) -> None:
        for call in calls:
            call(*args)

    return notify


def _merged(hook: str, owners: Sequence[str], calls: Sequence[Call]) -> Call:
    if not calls:
        return lambda *_: _NO_INPUTS
    if len(calls) == 1:
        only = calls[0]
        return lambda *args: only(*args) or _NO_INPUTS
    return lambda *args: _merge(hook, owners, (call(*args) for call in calls))


def _chain(calls: Sequence[Call]) -> Call:
    def chain(value: object) -> object:
        for call in calls:
            wrapped = call(value)
            value = value if wrapped is None else wrapped
        return value

    return chain


def _concatenate(hook: str, owners: Sequence[str], parts: Iterable[Sequence[Any] | None]) -> list[Any]:
    """One list; what is in it has a name of its own."""
    items = [item for part in parts if part is not None for item in part]
    names = [getattr(item, "name", "") for item in items]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what, who = hook.rpartition("_")[2], ", ".join(owners)
        raise PluginHookError(
            f"{hook}: several {what} of {who} are named {twice[0]!r}; give each a name of its own"
        )
    return items


def _merge(hook: str, owners: Sequence[str], parts: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        if not part:
            continue
        if not merged.keys().isdisjoint(part):
            twice = ", ".join(sorted(merged.keys() & part.keys()))
            raise PluginHookError(
                f"{hook}: two of {', '.join(owners)} give {twice}; each name may come from one only"
            )
        merged.update(part)
    return merged


def _relayed(relay: HookRelay, hook: str, owners: Sequence[str]) -> Call:
    """The hook through pluggy, with the results combined as the bound form does."""
    caller, names, rule = getattr(relay.hook, hook), HOT_HOOK_ARGUMENTS[hook], combine_rule(hook)

    def relayed(*args: object) -> Any:
        results = caller(**dict(zip(names, args, strict=True)))
        if rule == "concatenate":
            return _concatenate(hook, owners, results)
        return _merge(hook, owners, results) if rule == "merge" else None

    return relayed


def _traced(hook: str, owner: str, call: Call) -> Call:
    def traced(*args: object) -> Any:
        _trace_log.info("%s(%s) of %s", hook, ", ".join(map(_summary, args)), owner)
        return call(*args)

    return traced


def _start_trace(relay: HookRelay) -> None:
    """Log every relayed call; visible also where the program has set up no logging."""
    if not _trace_log.hasHandlers():
        _trace_log.addHandler(logging.StreamHandler())
    _trace_log.setLevel(logging.INFO)

    def before(hook: str, implementations: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        given = ", ".join(f"{name}={_summary(value)}" for name, value in arguments.items())
        owners = ", ".join(i.plugin_name for i in reversed(implementations)) or "nobody"
        _trace_log.info("%s(%s) of %s", hook, given, owners)

    relay.add_hookcall_monitoring(before, lambda *_: None)


def _summary(value: object) -> str:
    """A value in a log line. A tensor is its shape: to print its content would wait for the device."""
    if isinstance(value, (int, str, float, type(None))):
        return repr(value)
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__}{list(shape)}"
