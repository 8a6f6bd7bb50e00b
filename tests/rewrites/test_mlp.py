"""Which modules are gated feed-forward networks, with which activation; found by their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from model_states.rewrites.mlp import recognise_activation, recognise_mlp


class _Gated(nn.Module):
    """The layers are made in the order `names`, so that their places tell nothing."""

    def __init__(self, names: tuple[str, ...], act: str, bias: bool = False, size: int = 24) -> None:
        super().__init__()
        for name in names:
            shape = (size, 16) if name == "down" else (16, size)
            self.add_module(name, nn.Linear(*shape, bias=bias))
        self.act = ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class _Fused(nn.Module):
    def __init__(self, gate_first: bool = True) -> None:
        super().__init__()
        self.both, self.down, self.act = nn.Linear(16, 48), nn.Linear(24, 16), nn.SiLU()
        self.gate_first = gate_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(self.act(gate if self.gate_first else up) * (up if self.gate_first else gate))


class _Functional(nn.Module):
    """Its activation is no module."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self._function = [ACT2FN[act]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self._function[0](self.w1(x)) * self.w3(x))


class _Clamped(_Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x).clamp(max=0.01))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [("gate", "up", "down"), ("up", "gate", "down"), ("down", "gate", "up")])
@pytest.mark.parametrize("size", [24, 16])
def test_gated_networks_are_recognised(
    names: tuple[str, ...], bias: bool, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    module = _Gated(names, "silu", bias, size).to(dtype).requires_grad_(False)
    x = torch.randn(3, 16).to(dtype)
    expected = module(x)
    parameters = {name: value.clone() for name, value in module.state_dict().items()}
    found = recognise_mlp(module)
    assert found is not None
    assert found.act == "silu"
    torch.testing.assert_close(found(x), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(module.state_dict(), parameters, rtol=0, atol=0)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


def test_fused_projection_is_taken_as_it_is() -> None:
    module = _Fused().requires_grad_(False)
    found = recognise_mlp(module)
    assert found is not None
    assert found.gate_up.weight is module.both.weight


@pytest.mark.parametrize(
    "module",
    [
        _Fused(gate_first=False),
        _Clamped(("gate", "up", "down"), "silu"),
        _Gated(("gate", "up", "down"), "quick_gelu"),
        nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)),
        nn.Linear(16, 16),
    ],
    ids=["up first", "clamped", "another activation", "no gate", "a layer"],
)
def test_other_modules_are_left_alone(module: nn.Module) -> None:
    assert recognise_mlp(module.requires_grad_(False)) is None


@pytest.mark.parametrize(
    ("act", "name"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("relu", "relu"),
        ("relu2", None),
        ("quick_gelu", None),
        ("tanh", None),
    ],
)
def test_activations(act: str, name: str | None) -> None:
    assert recognise_activation(ACT2FN[act]) == name


@pytest.mark.parametrize(
    ("act", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
def test_an_activation_that_is_a_function(act: str, name: str) -> None:
    torch.manual_seed(6)
    module = _Functional(act).requires_grad_(False)
    x = torch.randn(5, 16)
    expected = module(x)
    found = recognise_mlp(module)
    assert found is not None
    assert found.act == name
    torch.testing.assert_close(found(x), expected, rtol=1e-5, atol=1e-6)
    assert recognise_mlp(_Functional("tanh").requires_grad_(False)) is None


def test_linears_alone_are_no_gated_network() -> None:
    assert recognise_mlp(nn.Sequential()) is None
    assert recognise_mlp(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))) is None
