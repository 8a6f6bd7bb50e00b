"""Products of few rows: Triton equals the torch twin, row by row, at every cut of the work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

from model_states.kernels.add_norm import RowRoot, rms_norm_torch
from model_states.kernels.linear import (
    ACTIVATIONS,
    MAX_ROWS,
    LinearConfig,
    RMSNorm,
    gate_up,
    linear,
    linear_config,
    linear_torch,
    linear_triton,
    norm_linear,
)

# n, m, k and a cut that leaves a rest in each of them
SHAPES = [
    (1, 40, 64, LinearConfig(8, 64, 2)),
    (3, 18, 72, LinearConfig(8, 128, 4, staged=True)),
    (5, 22, 200, LinearConfig(16, 64, 2)),
    (16, 8, 48, LinearConfig(4, 32, 1, staged=True)),
]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _outputs_start_as_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["fp32", "half"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """fp32 shows what the kernel computes, a 16-bit type what it rounds; the interpreter has no bf16 products."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    return half if request.param == "half" else torch.float32


class Inputs:
    """Random operands of one product; x is a slice of rows that hold NaN beside it."""

    def __init__(self, n: int, m: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(n + m + k)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        wide = torch.full((n, k + 24), float("nan"), dtype=dtype, device=device)
        wide[:, 8 : 8 + k] = normal(n, k)
        self.x = wide[:, 8 : 8 + k]
        self.weight = normal(m, k) / 8
        self.bias, self.residual = normal(m), normal(n, m)
        self.norm = RMSNorm(normal(k), EPS, rounds_first=True)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    # One rounding may fall the other way in a 16-bit type, and in a norm it is then multiplied.
    relative = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[result.dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=relative, atol=relative)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:3])))
@pytest.mark.parametrize("parts", ["", "bias", "residual", "bias residual", "norm", "norm bias"])
def test_kernel_equals_twin(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, LinearConfig], parts: str
) -> None:
    n, m, k, config = shape
    inputs = Inputs(n, m, k, dtype, device)
    given = {part: getattr(inputs, part) for part in parts.split()}
    expected = linear_torch(inputs.x, inputs.weight, **given)
    assert_near(linear_triton(inputs.x, inputs.weight, **given, config=config), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:3])))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norm"])
def test_gated_kernel_equals_twin(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, LinearConfig],
    activation: str,
    normed: bool,
) -> None:
    n, m, k, config = shape
    inputs = Inputs(n, m, k, dtype, device)
    norm, bias = (inputs.norm, None) if normed else (None, inputs.bias)
    given = {"bias": bias, "norm": norm, "activation": activation}
    expected = linear_torch(inputs.x, inputs.weight, **given)
    assert expected.shape == (n, m // 2)
    assert_near(linear_triton(inputs.x, inputs.weight, **given, config=config), expected)


def test_rows_that_are_divided_by_a_root_of_their_own(device: torch.device, dtype: torch.dtype) -> None:
    inputs, config = Inputs(5, 22, 200, dtype, device), LinearConfig(16, 64, 2)
    root = RowRoot(torch.rand(5, 3, device=device) + 0.5, 70, 0.01)
    divided = inputs.x.float() / (root.squares.sum(1, keepdim=True) / 70 + 0.01).sqrt()
    expected = inputs.residual.float() + 0.3 * (divided @ inputs.weight.float().T)
    given = {"residual": inputs.residual, "multiplier": 0.3, "root": root}
    assert_near(linear_torch(inputs.x, inputs.weight, **given), expected.to(dtype))
    assert_near(linear_triton(inputs.x, inputs.weight, **given, config=config), expected.to(dtype))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_product_times_a_number_beside_a_wide_residual(device: torch.device, bias: bool) -> None:
    """A residual stream in fp32 and products in 16 bits: each result is of the dtype that it goes to."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    inputs, config = Inputs(3, 18, 72, half, device), LinearConfig(8, 128, 4)
    stream = torch.randn(3, 18, device=device)
    given = {"bias": inputs.bias if bias else None, "residual": stream, "multiplier": 0.3}
    expected = functional.linear(
        inputs.x.float(), inputs.weight.float(), inputs.bias.float() if bias else None
    )
    for op in (linear_torch, partial(linear_triton, config=config)):
        got = op(inputs.x, inputs.weight, **given)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, stream + 0.3 * expected, rtol=1e-2, atol=1e-2)
    for op in (linear_torch, partial(linear_triton, config=config)):
        scaled = op(inputs.x, inputs.weight, given["bias"], multiplier=0.3)
        torch.testing.assert_close(scaled.float(), 0.3 * expected, rtol=1e-2, atol=1e-2)
    wide = inputs.x.float()
    normed = rms_norm_torch(wide, inputs.norm) @ inputs.weight.float().T
    for op in (linear_torch, partial(linear_triton, config=config)):
        assert_near(op(wide, inputs.weight, norm=inputs.norm), normed.to(half))


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    """Neither what a neighbour holds nor that it is there changes a bit of a row."""
    inputs = Inputs(5, 24, 64, torch.float32, device)
    config = LinearConfig(8, 64, 2)
    whole = linear_triton(inputs.x, inputs.weight, norm=inputs.norm, config=config)
    poisoned = inputs.x.clone()
    poisoned[[0, 1, 3, 4]] = float("nan")
    assert torch.equal(
        linear_triton(poisoned, inputs.weight, norm=inputs.norm, config=config)[2],
        whole[2],
    )
    if (
        device.type == "cuda"
    ):  # the interpreter multiplies by a library that may sum other shapes in another order
        alone = linear_triton(inputs.x[2:3], inputs.weight, norm=inputs.norm, config=config)
        assert torch.equal(alone[0], whole[2])


@pytest.mark.parametrize("n", [0, 1, MAX_ROWS, MAX_ROWS + 1, 40])
def test_any_number_of_rows_is_served(device: torch.device, n: int) -> None:
    half = torch.bfloat16
    inputs = Inputs(n, 24, 64, half, device)
    x, weight, norm = inputs.x, inputs.weight, inputs.norm
    plain = x.float() @ weight.float().T
    normed = rms_norm_torch(x, norm).float() @ weight.float().T
    assert_near(linear(x, weight), plain.to(half))
    assert_near(
        linear(x, weight, inputs.bias, residual=inputs.residual),
        (plain + inputs.bias.float() + inputs.residual.float()).to(half),
    )
    assert_near(norm_linear(x, norm, weight), normed.to(half))
    gate, up = normed.chunk(2, -1)
    assert_near(gate_up(x, norm, weight, "silu"), (functional.silu(gate) * up).to(half))


@pytest.mark.parametrize("rounds_first", [False, True])
def test_every_kind_of_norm(device: torch.device, dtype: torch.dtype, rounds_first: bool) -> None:
    inputs = Inputs(3, 8, 72, dtype, device)
    norm = RMSNorm(1.0 + inputs.norm.weight.float(), 0.5, rounds_first)
    expected = rms_norm_torch(inputs.x, norm).float() @ inputs.weight.float().T
    result = linear_triton(inputs.x, inputs.weight, norm=norm, config=LinearConfig(8, 64, 2))
    assert_near(result, expected.to(dtype))


@pytest.mark.parametrize("k", [16, 64, 1000, 1024, 2048, 3072, 4096, 14336])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, MAX_ROWS])
@pytest.mark.parametrize("m", [8, 4096, 151936])
def test_every_cut_can_be_launched(n: int, m: int, k: int) -> None:
    config = linear_config(n, m, k)
    assert config.block_k & (config.block_k - 1) == 0
    assert config.block_k // config.num_warps >= 16, (
        "a warp's part is at least what one product instruction takes"
    )
    assert config.block_m * config.block_k * 2 <= 256 * config.num_warps * 32, "weights fit into registers"
    num_rows = 1 << (n - 1).bit_length()
    assert (config.block_m + num_rows) * config.block_k * 2 <= 160_000, "and with x into shared memory"
    assert not config.staged or config.block_k >= k, "what follows the first columns is not staged"


@pytest.mark.parametrize("k", [1024, 2048, 3072, 4096])
def test_sums_of_a_row_have_one_order_for_few_rows(k: int) -> None:
    """So a row's result has the same bits, however many rows there are beside it."""
    orders = {(c.block_k, c.num_warps) for c in (linear_config(n, 4096, k) for n in range(1, 9))}
    assert len(orders) == 1
