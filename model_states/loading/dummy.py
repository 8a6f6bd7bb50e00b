"""Random weights for benchmarks and tests: built where they are used, from config.json alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from model_states.config import ModelConfig
from model_states.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DUMMY_SEED = 0
DUMMY_STD = 0.02


def build_dummy_model(config: ModelConfig, model_class: Any, attn_implementation: str) -> PreTrainedModel:
    """The module with seeded weights: matrices normal with std 0.02, norms and biases as in a new model.

    One device and one release of torch give the same weights each time; the caller's random state stays.
    """
    hf_config = copy.deepcopy(config.checkpoint.hf_config)
    options = {"dtype": config.dtype, "attn_implementation": attn_implementation}
    if hasattr(model_class, "from_config"):
        options["trust_remote_code"] = config.checkpoint.trust_remote_code
    # An auto class has the public name, a model class the underscored one; both do the same.
    build = getattr(model_class, "from_config", None) or model_class._from_config
    # Both generators are kept as they were: a benchmark must not change what its caller samples.
    cuda = [config.device] if config.device.type == "cuda" else []
    # Under the device's context buffers are computed where they live, as a real load leaves them.
    with torch.random.fork_rng(devices=cuda), torch.device(config.device):
        torch.manual_seed(DUMMY_SEED)
        try:
            model = build(hf_config, **options)
        except (ValueError, ImportError) as error:
            raise CheckpointError(
                f"model {config.checkpoint.model!r} could not be built from config.json: {error}"
            ) from error
        _fill(model, torch.Generator(config.device).manual_seed(DUMMY_SEED))
    return model


@torch.no_grad()
def _fill(model: Any, generator: torch.Generator) -> None:
    # Not every class initialises each matrix itself; one that it forgot would hold whatever the memory held.
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)
