"""From a `RunnerConfig` to a loaded model state: choose the plugin, settle the open sizes, build the caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

import torch
from torch.nn import functional

from core_runner.config import RunnerConfig
from core_runner.errors import ConfigError
from model_states import CheckpointConfig, ModelConfig, ModelState, PluginManager
from model_states.collector import collector_paused
from model_states.kernels.compile_ahead import await_before_forks
from model_states.loading import load_checkpoint_config
from model_states.selection import check_capability
from model_states.staged import StagedTensor
from model_states.staged_writer import StagedWriter

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model_state(config: RunnerConfig, plugins: PluginManager, progress: Progress | None) -> ModelState:
    """Choose the model state for `config.model` and load it."""
    device = pick_device(config.device)
    waking = Thread(target=_wake, args=(device,), daemon=True)
    waking.start()
    await_before_forks(waking)
    with collector_paused():
        state = _load(config, plugins, device, progress)
    waking.join()  # a recording must not find it at work
    return state


def _load(
    config: RunnerConfig, plugins: PluginManager, device: torch.device, progress: Progress | None
) -> ModelState:
    checkpoint = load_checkpoint_config(
        plugins.locate(config.model), trust_remote_code=config.trust_remote_code
    )
    state_class = plugins.select(checkpoint, config.model_state)
    model_config = ModelConfig(
        checkpoint=checkpoint,
        device=device,
        dtype=_pick_dtype(config.dtype, device, checkpoint),
        max_model_len=_pick_max_model_len(config.max_model_len, state_class, checkpoint),
        max_num_reqs=config.max_num_reqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_draft_tokens=config.num_draft_tokens,
        attention_backend=config.attention_backend,
        fused_layers=config.fused_layers,
        cuda_graphs=config.cuda_graphs is not False,
        load_format=config.load_format,
        options=_check_options(config, state_class),
        progress=progress,
    )
    logger.info(
        "loading %s as %s on %s in %s, up to %d tokens a request",
        checkpoint.architecture,
        state_class.name,
        device,
        model_config.dtype,
        model_config.max_model_len,
    )
    return plugins.construct(state_class, model_config)


def _wake(device: torch.device) -> None:
    if device.type != "cpu":
        with suppress(Exception):  # whoever needs it meets the error again, where it can be told
            launch_first(device)


def launch_first(device: torch.device) -> None:
    """Start what takes a second or two to start, while this process imports what models need: the device's context, its
    library of products, those of torch's kernels that most models begin with, each of which is loaded when it is first
    launched, and Triton's driver, which hashes its own compiler first.
    """
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    x = functional.embedding(torch.arange(16, device=device) % 7, x)
    x = functional.silu(functional.linear(x, x)) * x + x
    wide = torch.cat([x, -x], -1).float()
    wide *= torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    (wide.cos() - wide.sin()).to(x.dtype).float().norm()
    writer = StagedWriter(device)
    for staged in (
        StagedTensor((1,), torch.int32, device),
        StagedTensor((1,), torch.int32, device, writer=writer),
    ):
        staged.stage(0, 0, [0])
        staged.apply()
    writer.flush()


def _check_options(config: RunnerConfig, state_class: type[ModelState]) -> Mapping[str, Any]:
    unknown = sorted(set(config.model_options) - set(state_class.options))
    if unknown:
        known = ", ".join(state_class.options) or "none"
        raise ConfigError(
            f"model_options: {unknown[0]!r} is no option of model state {state_class.name!r}; it has {known}"
        )
    return dict(config.model_options)


def pick_device(name: str | None) -> torch.device:
    """The named device, checked, or a GPU where there is one."""
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a torch device; use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: only 'cpu' and 'cuda' are supported")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise ConfigError(f"device={name!r}: this machine has {count} CUDA devices; pass device='cpu'")
    return device


def use_prefix_cache(config: RunnerConfig, state: ModelState) -> bool:
    """Whether prefix blocks are shared: as asked, or where the model state can."""
    wanted = config.enable_prefix_caching
    return wanted is not False and check_capability(type(state), "prefix_cache", chosen=wanted is True)


def use_graphs(config: RunnerConfig, state: ModelState) -> bool:
    """Whether decode steps are recorded as CUDA graphs: as asked, or on a GPU where the model state can."""
    wanted, on_gpu = config.cuda_graphs, state.config.device.type == "cuda"
    if wanted and not on_gpu:
        raise ConfigError(
            f"cuda_graphs=True needs a GPU, and the device is {state.config.device}; leave it out"
        )
    return on_gpu and wanted is not False and check_capability(type(state), "graphs", chosen=wanted is True)


def _pick_dtype(name: str | None, device: torch.device, checkpoint: CheckpointConfig) -> torch.dtype:
    if name is not None:
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    stored: Any = getattr(checkpoint.hf_config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) and stored in _DTYPES.values() else torch.bfloat16


def _pick_max_model_len(
    wanted: int | None, state_class: type[ModelState], checkpoint: CheckpointConfig
) -> int:
    limit = state_class.max_model_len(checkpoint)
    if wanted is None and limit is None:
        raise ConfigError(
            f"{checkpoint.model} does not say how long its sequences may be; pass max_model_len"
        )
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len={wanted} is beyond the {limit} positions of {checkpoint.model}")
    return int(wanted or limit or 0)
