"""core-runner: a fast model runner that does not know which model it runs.

Names are imported on first use, so that `import core_runner` costs nothing that is not needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from model_states.collector import collector_paused

if TYPE_CHECKING:
    from core_runner.completions import completion_seed
    from core_runner.config import RunnerConfig
    from core_runner.engine import Engine
    from core_runner.errors import (
        AudioError,
        ConfigError,
        CoreRunnerError,
        QueueFullError,
        RequestError,
        SchedulerOutputError,
    )
    from core_runner.llm import LLM
    from core_runner.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput, TextDelta
    from core_runner.runner import ModelRunner
    from core_runner.sampling_params import SamplingParams
    from core_runner.scheduling.output import (
        BlockUpdate,
        GrammarBitmask,
        ModelRunnerOutput,
        NewRequest,
        RemovedRequest,
        SchedulerOutput,
    )
    from core_runner.structured.options import StructuredOutput

_EXPORTS = {
    "completions": ["completion_seed"],
    "config": ["RunnerConfig"],
    "engine": ["Engine"],
    "errors": [
        "AudioError",
        "ConfigError",
        "CoreRunnerError",
        "QueueFullError",
        "RequestError",
        "SchedulerOutputError",
    ],
    "llm": ["LLM"],
    "outputs": ["CompletionOutput", "EngineStats", "Logprob", "RequestOutput", "TextDelta"],
    "runner": ["ModelRunner"],
    "sampling_params": ["SamplingParams"],
    "scheduling.output": [
        "BlockUpdate",
        "GrammarBitmask",
        "ModelRunnerOutput",
        "NewRequest",
        "RemovedRequest",
        "SchedulerOutput",
    ],
    "structured.options": ["StructuredOutput"],
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "LLM",
    "AudioError",
    "BlockUpdate",
    "CompletionOutput",
    "ConfigError",
    "CoreRunnerError",
    "Engine",
    "EngineStats",
    "GrammarBitmask",
    "Logprob",
    "ModelRunner",
    "ModelRunnerOutput",
    "NewRequest",
    "QueueFullError",
    "RemovedRequest",
    "RequestError",
    "RequestOutput",
    "RunnerConfig",
    "SamplingParams",
    "SchedulerOutput",
    "SchedulerOutputError",
    "StructuredOutput",
    "TextDelta",
    "completion_seed",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'core_runner' has no attribute {name!r}")
    with collector_paused():
        value = getattr(import_module(f"core_runner.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
