"""Which backend serves a model: the one that was named, or the fastest that can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from model_states.attention.interface import AttentionBackend, AttentionSpec
from model_states.attention.torch_backend import TorchAttention
from model_states.errors import CapabilityError
from model_states.kernels.dispatch import has_triton

logger = logging.getLogger(__name__)

BackendFactory = Callable[[], AttentionBackend]


def _triton_backend() -> AttentionBackend:
    # Triton takes a moment to import, which a run on a CPU never needs.
    from model_states.attention.triton_backend import TritonAttention

    return TritonAttention()


BACKENDS: dict[str, BackendFactory] = {"torch": TorchAttention, "triton": _triton_backend}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Make `factory` selectable as `name`. CapabilityError when the name is taken by another factory."""
    if BACKENDS.get(name, factory) is not factory:
        raise CapabilityError(
            f"attention backend {name!r} exists already. Register yours under another name."
        )
    BACKENDS[name] = factory


def _refusal(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """The first reason why `backend` cannot serve all of `specs`."""
    reasons = (backend.unsupported(spec, block_size, dtype, device) for spec in specs)
    return next((reason for reason in reasons if reason), None)


def _named(
    name: str, specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    if name not in BACKENDS:
        raise CapabilityError(
            f"attention backend {name!r} is unknown. Installed: {', '.join(sorted(BACKENDS))}. "
            "Name one of these, or leave it out to have one chosen."
        )
    if name == "triton" and not has_triton():
        raise CapabilityError("attention backend 'triton' needs Triton, which is not installed. Use 'torch'.")
    backend = BACKENDS[name]()
    if reason := _refusal(backend, specs, block_size, dtype, device):
        raise CapabilityError(f"attention backend {name!r} cannot serve this model: {reason}. Use 'torch'.")
    return backend


def select_backend(
    name: str | None,
    specs: Sequence[AttentionSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """A backend that serves every layer of `specs` with caches of `block_size` tokens a block and of `dtype`.

    name: "torch", "triton", or one that `register_backend` added; CapabilityError says why it cannot be had.
    None takes Triton on a CUDA device when it supports every layer, else torch, and logs which.
    """
    if name is not None:
        return _named(name, specs, block_size, dtype, device)
    reason: str | None = "the device is not CUDA"
    if device.type == "cuda":
        reason = "Triton is not installed"
        if has_triton():
            backend = _triton_backend()
            reason = _refusal(backend, specs, block_size, dtype, device)
            if reason is None:
                return backend
    logger.info("attention backend: torch (%s)", reason)
    return _named("torch", specs, block_size, dtype, device)
