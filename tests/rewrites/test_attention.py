"""Which rotation a model's attention does, for each style of its tables; against transformers' own functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from model_states.kernels.rope_write import rotate_torch
from model_states.rewrites.attention import _STYLES, RotaryStyle, _form

NUM_TOKENS, HEADS, SIZE = 6, 3, 16


def _angles(width: int) -> torch.Tensor:
    return torch.linspace(0.3, 40.0, NUM_TOKENS)[:, None] * torch.linspace(1.0, 0.1, width)


# module, function's tables from the angles [NUM_TOKENS, rotary_dim / 2], and the style
CASES: dict[str, tuple[str, Any, RotaryStyle]] = {
    "halves": ("llama", lambda a: torch.cat((a, a), -1), RotaryStyle("halves", False)),
    "once": ("gpt_oss", lambda a: a, RotaryStyle("once", False)),
    "pairs": ("cohere2", lambda a: a.repeat_interleave(2, -1), RotaryStyle("pairs", True)),
    "halves of interleaved": ("glm", lambda a: torch.cat((a, a), -1), RotaryStyle("halves", True)),
}


def _rotated(module: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    apply = import_module(f"transformers.models.{module}.modeling_{module}").apply_rotary_pos_emb
    return apply(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])[0][0].transpose(0, 1)


@pytest.mark.parametrize(
    ("case", "rotary_dim"), [*((case, SIZE) for case in CASES), ("halves of interleaved", SIZE // 2)]
)
def test_style_is_found_and_rotates_alike(case: str, rotary_dim: int) -> None:
    module, tables_of, style = CASES[case]
    torch.manual_seed(3)
    x = torch.randn(NUM_TOKENS, HEADS, SIZE)
    angles = tables_of(_angles(rotary_dim // 2))
    cos, sin = angles.cos(), angles.sin()
    expected = _rotated(module, x, cos, sin)
    form = _form(x.flatten(1), expected, [], (cos, sin))
    assert form is not None
    assert form.style == style
    got = rotate_torch(x, style.rotary(style.tables(cos, sin), None))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_no_rotation_is_a_form_too() -> None:
    x = torch.randn(NUM_TOKENS, HEADS, SIZE)
    angles = _angles(SIZE)
    form = _form(x.flatten(1), x, [], (angles.cos(), angles.sin()))
    assert form is not None
    assert form.style is None


def test_another_function_of_the_heads_has_no_form() -> None:
    x = torch.randn(NUM_TOKENS, HEADS, SIZE)
    angles = _angles(SIZE)
    tables = (angles.cos(), angles.sin())
    assert _form(x.flatten(1), 1.01 * x, [], tables) is None
    assert _form(x.flatten(1), x.flip(-1), [], tables) is None


@pytest.mark.parametrize("style", _STYLES, ids=str)
def test_tables_have_rows_that_a_kernel_can_read(style: RotaryStyle) -> None:
    cos, sin = torch.randn(2, 5, 8)
    assert all(table.stride(-1) == 1 for table in style.tables(cos, sin))
