"""Rewritten models: the same numbers and the same parameters, and nothing rewritten that is not understood."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.one_row import hidden_states, load_state, tiny_state
from support.tiny_models import TINY, build_tiny

from model_states.rewrites import fuse, parts
from model_states.transformers_bridge import TransformersModel

# Of these only parts are rewritten, or nothing.
IN_PARTS = {"gpt2", "opt", "gpt_neox", "cohere2", "deepseek_v2", "deepseek_v3"}
# Rewritten in place: attentions, gated networks, norms.
COUNTS = {"gpt2": (0, 0, 0), "cohere2": (4, 4, 0), "deepseek_v2": (0, 2, 9)}


@pytest.mark.parametrize("name", TINY)
def test_same_hidden_states_and_parameters(name: str, tmp_path: Path) -> None:
    plain = tiny_state(name, tmp_path, fused_layers=False)
    fused = load_state(tmp_path)
    assert plain.model.fused is None
    assert (fused.model.fused is None) is (name in IN_PARTS)
    expected = hidden_states(plain)
    got = hidden_states(fused)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(
        fused.compute_logits(got), plain.compute_logits(expected), rtol=1e-4, atol=1e-4
    )
    before, after = plain.model.model.state_dict(), fused.model.model.state_dict()
    assert list(before) == list(after)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_rewritten_in_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(*args: object) -> dict[str, int]:
        counts.append(parts.rewrite_parts(*args))
        return counts[-1]

    monkeypatch.setattr(fuse, "rewrite_parts", counted)
    tiny_state(name, tmp_path)
    assert [tuple(each.values()) for each in counts] == [COUNTS[name]]


def test_merged_weights_are_the_models_own(tmp_path: Path) -> None:
    state = tiny_state("qwen3", tmp_path)
    layer = state.model.model.model.layers[0]
    qkv = state.model.fused.layers[0].attention.qkv.weight
    storages = {
        p.weight.untyped_storage().data_ptr() for p in (layer.self_attn.q_proj, layer.self_attn.v_proj)
    }
    assert storages == {qkv.untyped_storage().data_ptr()}
    before = hidden_states(state)
    with torch.no_grad():
        layer.self_attn.v_proj.weight.mul_(2.0)
        layer.mlp.up_proj.weight.mul_(0.5)
    changed = hidden_states(state)
    assert not torch.allclose(before, changed, atol=1e-3)
    state.model.fused = None
    torch.testing.assert_close(hidden_states(state), changed, rtol=1e-4, atol=1e-5)


def test_a_step_with_inputs_of_its_own_takes_the_models_backbone(tmp_path: Path) -> None:
    state = tiny_state("llama", tmp_path)
    expected = hidden_states(state)
    taken = []
    state.model.backbone.register_forward_hook(lambda *_: taken.append(True))
    got = hidden_states(state, attention_mask=None)
    assert taken
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["queries", "mlp", "layer", "embedding", "end"])
def test_what_is_changed_in_a_model_stays_changed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the structure tells of these changes; only the numbers do."""
    initialise = TransformersModel.__init__

    def changed(self: TransformersModel, model: torch.nn.Module) -> None:
        layer = model.model.layers[1]
        {
            "queries": lambda: layer.self_attn.q_proj.register_forward_hook(lambda _, __, out: 2 * out),
            "mlp": lambda: layer.mlp.register_forward_hook(lambda _, args, out: out + args[0]),
            "layer": lambda: layer.register_forward_hook(lambda _, __, out: 1.25 * out),
            "embedding": lambda: model.model.layers[0].register_forward_pre_hook(
                lambda _, a: (3 * a[0], *a[1:])
            ),
            "end": lambda: model.model.norm.register_forward_hook(lambda _, __, out: out + 1),
        }[change]()
        initialise(self, model)

    monkeypatch.setattr(TransformersModel, "__init__", changed)
    expected = hidden_states(tiny_state("llama", tmp_path, fused_layers=False))
    state = load_state(tmp_path)
    got = hidden_states(state)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_a_head_that_does_more_than_a_product_and_a_number_is_kept(tmp_path: Path) -> None:
    assert tiny_state("qwen3", tmp_path / "a").model.fused_head.multiplier == 1.0
    scaled = tiny_state("granite", tmp_path / "b").model
    assert scaled.fused_head.multiplier == 1 / scaled.config.logits_scaling != 1.0
    x = torch.randn(3, scaled.config.hidden_size)
    logits, scaled.fused_head = scaled.compute_logits(x), None
    torch.testing.assert_close(logits, scaled.compute_logits(x), rtol=1e-5, atol=1e-6)
    assert tiny_state("gemma2", tmp_path / "c").model.fused_head is None


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    build_tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_state(tmp_path).model
    assert model.fused_head is not None
    assert model.fused_head.weight is model.model.model.embed_tokens.weight
