"""Layers that expand keys and values from a latent: the latent alone is cached, and nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states_decoder.latent_attention import LatentAttention, is_latent, watched_projections
from support.drained import Drained
from support.reference import assert_exact, greedy_reference
from support.tiny_models import TINY, build_tiny, save_tiny
from torch import nn

from core_runner import SamplingParams
from model_states.transformers_bridge import ATTN_IMPLEMENTATION, TransformersModel, register_attention

RANK, ROPE = 16, 8  # of the tiny models
MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
# Without a low rank for queries; with values of another size than keys; a scale that is not that of the head size.
VARIANTS = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": None, "v_head_dim": 12}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_parameters": YARN, "v_head_dim": 20, "rope_interleave": False}),
]
SIZES = {"device": "cpu", "block_size": 4, "max_num_reqs": 4, "max_model_len": 128}


def prompts() -> list[list[int]]:
    draw = random.Random(11)
    made = [[draw.randrange(3, 211) for _ in range(length)] for length in (3, 8, 21, 37)]
    return [*made, made[3][:24] + made[2]]


def check_exact(llm: Any, model: Any, texts: list[list[int]], params: SamplingParams = GREEDY) -> None:
    outputs = llm.generate(texts, params)
    skipped = 0
    for i, (output, prompt) in enumerate(zip(outputs, texts, strict=True)):
        reference = greedy_reference(model, prompt, params.max_tokens)
        skipped += assert_exact(output.outputs[0], reference, f"prompt {i}")
    assert skipped <= params.max_tokens


def cached_numbers(llm: Any) -> float:
    """Numbers of one token and layer, on average, in the caches of an engine that runs in fp32."""
    groups = llm.engine.runner.cache_groups
    layers = sum(len(group.layers) for group in groups)
    return sum(group.block_bytes / group.block_size for group in groups) / 4 / layers


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=str)
def test_exact_when_chunked_cached_and_preempted(
    name: str, overrides: dict[str, Any], tmp_path: Path, drained: Drained
) -> None:
    model = save_tiny(name, tmp_path, **overrides)
    for options in ({"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 11, "num_blocks": 24}):
        llm = drained(str(tmp_path), **SIZES, **options)
        assert cached_numbers(llm) == RANK + ROPE
        for _ in ("cold", "warm"):
            check_exact(llm, model, prompts())


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_exact_through_the_triton_kernels(
    name: str, tmp_path: Path, drained: Drained, device: torch.device
) -> None:
    model = save_tiny(name, tmp_path)
    options = {**SIZES, "device": str(device), "max_num_batched_tokens": 16}
    llm = drained(str(tmp_path), **options, attention_backend="triton")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    check_exact(llm, model, [[5, 6, 7], list(range(20, 41))], params)


@pytest.mark.parametrize("name", ["glm4_moe_lite", "minicpm3"])
def test_an_architecture_without_a_test_of_its_own_is_found_by_what_it_does(
    name: str, tmp_path: Path, drained: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes through the check at load too, which compares it with transformers' own attention."""
    monkeypatch.setitem(TINY, name, (name, TINY["deepseek_v3"][1]))
    model = save_tiny(name, tmp_path)
    llm = drained(str(tmp_path), **SIZES, max_num_batched_tokens=64)
    assert cached_numbers(llm) == RANK + ROPE
    check_exact(llm, model, prompts()[:2])


def watched(model: Any) -> tuple[TransformersModel, list[Any], list[bool]]:
    register_attention()
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    bridge = TransformersModel(model)
    with watched_projections(model):
        calls = bridge.attention_calls()
        latent = [is_latent(call) for call in calls]
    return bridge, calls, latent


def dense(layer: LatentAttention, widths: list[int]) -> Any:
    """Causal attention over the tokens of one call, which are the whole sequence."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: None, sinks: None) -> torch.Tensor:
        widths.append(key.shape[-1])
        scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * layer.spec.scale
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, key[:, 0, : layer.spec.head_size_v])

    return attend


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=str)
def test_absorbed_equals_expanded(name: str, overrides: dict[str, Any]) -> None:
    model = build_tiny(name, **overrides)
    ids = torch.arange(40) * 7919 % 211
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model.base_model(input_ids=ids[None], use_cache=False)[0][0]
    register_attention()
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    bridge = TransformersModel(model)
    widths: list[int] = []
    with watched_projections(model):
        calls = bridge.attention_calls()
        layers = [LatentAttention(call) for call in calls]
    for layer in layers:
        layer.layer = dense(layer, widths)
    bridge.bind(calls, layers)
    error = (bridge.forward(ids, torch.arange(40)) - expected).norm() / expected.norm()
    assert error < 1e-5
    assert widths == [RANK + ROPE] * 2
    # transformers' own attention still gets what it needs.
    model.set_attn_implementation("eager")
    torch.testing.assert_close(bridge.forward(ids, torch.arange(40)), expected, atol=0, rtol=0)


def test_what_the_projection_gives_is_not_computed_once_absorbed(tmp_path: Path, drained: Drained) -> None:
    save_tiny("deepseek_v3", tmp_path)
    llm = drained(str(tmp_path), **SIZES, max_num_batched_tokens=64)
    calls = []
    for name, module in llm.engine.runner.model_state.model.model.named_modules():
        if name.endswith("kv_b_proj.linear"):
            module.register_forward_hook(lambda *_: calls.append(1))
    llm.generate([prompts()[1]], GREEDY)
    assert calls == []


def spoil_key(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.nn.functional.normalize(key, dim=-1), value


def spoil_value(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, value.tanh()


def spoil_rope(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.arange(1, key.shape[1] + 1)[None, :, None, None]
    return torch.cat((key[..., :-ROPE], key[..., -ROPE:] * scale), -1), value


@pytest.mark.parametrize("spoil", [spoil_key, spoil_value, spoil_rope])
def test_a_layer_that_does_more_than_expand_stays_expanded(
    spoil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drained: Drained
) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    plain = DeepseekV3Attention.expand_kv
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda *args: spoil(*plain(*args)))
    model = save_tiny("deepseek_v3", tmp_path)
    llm = drained(str(tmp_path), **SIZES, max_num_batched_tokens=64)
    assert cached_numbers(llm) == 4 * (16 + ROPE + 16)
    check_exact(llm, model, prompts()[:2])


def test_a_projection_that_is_not_a_plain_matrix_is_left_alone() -> None:
    model = build_tiny("deepseek_v3")
    biased = model.model.layers[0].self_attn
    biased.kv_b_proj.bias = nn.Parameter(torch.ones(biased.kv_b_proj.out_features))
    _, _, latent = watched(model)
    assert latent == [False, True]
    assert type(biased.kv_b_proj) is nn.Linear
    assert type(model.model.layers[1].self_attn.kv_b_proj) is nn.Linear  # nobody absorbed it


def test_other_models_are_not_touched() -> None:
    model = build_tiny("llama")
    before = dict(model.named_modules())
    _, _, latent = watched(model)
    assert latent == [False, False]
    assert dict(model.named_modules()) == before
