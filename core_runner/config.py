"""`RunnerConfig`: everything that is decided once, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from core_runner.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Settings of one runner. `None` means: decided at load, and logged.

    model: hub name or local directory; "embedded:NAME" is the model that model state NAME ships, and None the default
        plugin's.
    device: "cpu", "cuda", "cuda:1"; None takes a GPU where there is one.
    dtype: "float32", "bfloat16", "float16"; None takes the checkpoint's on a GPU and float32 on a CPU.
    max_model_len: tokens of prompt and output together, L; None is the model's own limit.
    max_num_reqs: request slots, R.
    max_num_batched_tokens: token budget of one step, T.
    block_size: tokens of one cache block.
    num_blocks: blocks of each cache group, null block included; None sizes them from `gpu_memory_utilization`
        (on a CPU: enough for `max_num_reqs` requests, at most `cpu_cache_bytes`).
    enable_prefix_caching: None is on where the model state can; True is an error where it cannot.
    max_waiting: length of the bounded waiting queue; one more request is refused.
    policy: "fcfs" (first come, first served) or "priority" (a smaller number runs earlier, ties by arrival).
    async_scheduling: schedule step N+1 before step N's tokens are read.
    num_draft_tokens: draft columns per request, K; anything but 0 is refused until drafts are verified.
    model_state: name of a plugin's model state; None selects the one that claims the architecture.
    model_options: settings of the model state's own, by name, such as the dtype of recurrent state; an unknown name is
        refused with the ones there are.
    attention_backend: "torch" or "triton"; None takes the fastest one that supports the model.
    fused_layers: rewrite the layers of a model that are recognised, see docs/rewrites.md; False keeps transformers'
        own modules, to debug or to compare.
    cuda_graphs: record steps; None is on where device and model state can, True is an error elsewhere.
    record_graphs_at_start: record the graphs of decode steps at load, not when a step of their size first comes.
    load_format: "auto" reads the checkpoint, "dummy" fills random weights (benchmarks).
    prompt_logprobs_bytes: most memory for the logits of prompt log-probabilities, which are computed in pieces of
        as many positions as fit. prompt_logprobs_result_bytes: most host memory for those of one prompt.
    poison: debug mode that overwrites freed slots and newly handed-out blocks, so a stale read is loud.
    seed: base of the seeds drawn for requests that bring none; None draws from the system's entropy.
    """

    model: str | None = None
    tokenizer: str | None = None
    device: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_reqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.85
    cpu_cache_bytes: int = 1 << 30
    enable_prefix_caching: bool | None = None
    max_waiting: int = 100_000
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    num_draft_tokens: int = 0
    model_state: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    attention_backend: str | None = None
    fused_layers: bool = True
    cuda_graphs: bool | None = None
    record_graphs_at_start: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    trust_remote_code: bool = False
    prompt_logprobs_bytes: int = 256 << 20
    prompt_logprobs_result_bytes: int = 1 << 30
    poison: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that could only fail later."""
        for name in (
            "max_num_reqs",
            "max_num_batched_tokens",
            "block_size",
            "max_waiting",
        ):
            self._require_int(name, 1)
        for name, least in (("max_model_len", 1), ("num_blocks", 2)):
            if getattr(self, name) is not None:
                self._require_int(name, least)
        for name in (
            "num_draft_tokens",
            "prompt_logprobs_bytes",
            "prompt_logprobs_result_bytes",
            "cpu_cache_bytes",
        ):
            self._require_int(name, 0)
        for name in (
            "trust_remote_code",
            "async_scheduling",
            "fused_layers",
            "record_graphs_at_start",
            "poison",
        ):
            self._require_choice(name, (False, True))
        for name in ("enable_prefix_caching", "cuda_graphs"):
            self._require_choice(name, (None, False, True))
        for name in ("model", "tokenizer", "device", "model_state", "attention_backend"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a string")
        if not isinstance(self.model_options, Mapping):
            raise ConfigError(f"model_options={self.model_options!r} must map names to values, such as {{}}")
        if self.num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens={self.num_draft_tokens}: nothing verifies drafts yet; leave it at 0"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size} is not a power of two; use 16 or 32")
        share: Any = self.gpu_memory_utilization
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={share!r} must be a number in (0, 1]")
        self._require_choice("policy", ("fcfs", "priority"))
        self._require_choice("load_format", ("auto", "dummy"))
        self._require_choice("dtype", (None, "float32", "bfloat16", "float16"))

    def _require_int(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")

    def _require_choice(self, name: str, choices: tuple[str | bool | None, ...]) -> None:
        value = getattr(self, name)
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
            raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")
