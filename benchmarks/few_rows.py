"""Products of few rows beside the library's, and what a chain of dependent kernels costs at least.

    python benchmarks/few_rows.py [--sweep] [--json FILE]

A time is the replay of a CUDA graph of one product with each of many weights, more than the L2 cache holds; the
median of several replays is reported, and TB/s counts the weight alone. *decoder* chains the products of 28 layers
and the head as a decode step of one request does, each taking what the one before gave. *early* says whether a kernel
starts before the one before it has ended. --sweep tries other cuts of the work and prints the best ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import show_table
from torch.nn import functional

from model_states.kernels import linear as kernels
from model_states.kernels.add_norm import RMSNorm
from model_states.kernels.linear import LinearConfig, linear_triton
from model_states.kernels.programmatic_launch import gdc_launch_dependents, gdc_wait, programmatic_launch
from model_states.kernels.triton_import import tl, triton

DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Product:
    """A weight [m, k], and what is done before and after."""

    k: int
    m: int
    normed: bool = False
    added: bool = False
    activation: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return self.k * self.m * DTYPE.itemsize

    @property
    def out_size(self) -> int:
        """Columns of the result."""
        return self.m // 2 if self.activation else self.m


# One layer of each decoder, then its head.
DECODERS = {
    "0.6B": {
        "qkv": Product(1024, 4096, normed=True),
        "o": Product(2048, 1024, added=True),
        "gate-up": Product(1024, 6144, normed=True, activation="silu"),
        "down": Product(3072, 1024, added=True),
        "head": Product(1024, 151936),
    },
    "8B": {
        "qkv": Product(4096, 6144, normed=True),
        "o": Product(4096, 4096, added=True),
        "gate-up": Product(4096, 28672, normed=True, activation="silu"),
        "down": Product(14336, 4096, added=True),
        "head": Product(4096, 128256),
    },
}


@triton.jit
def _step_kernel(out, x, PDL: tl.constexpr) -> None:  # noqa: ANN001
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + at, tl.load(x + at) + 1.0)


class Layers:
    """Random operands of one product in each of `count` layers."""

    def __init__(self, product: Product, n: int, count: int, device: torch.device) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=DTYPE, device=device)

        self.product = product
        self.x = normal(n, product.k)
        self.residual = normal(n, product.out_size) if product.added else None
        self.norm = RMSNorm(normal(product.k), 1e-6, rounds_first=True) if product.normed else None
        self.weights = [normal(product.m, product.k) * product.k**-0.5 for _ in range(count)]

    def __call__(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, op: Any) -> torch.Tensor:
        """The product of one layer by `op`, which takes what `linear_triton` takes."""
        kept = residual if self.product.added else None
        return op(x, self.weights[layer], None, kept, self.norm, self.product.activation)

    def microseconds(self, op: Any) -> float:
        """Of one product."""

        def every_layer() -> None:
            for layer in range(len(self.weights)):
                self(layer, self.x, self.residual, op)

        return microseconds(every_layer) / len(self.weights)


def microseconds(call: Callable[[], object], replays: int = 15) -> float:
    """The median replay of a CUDA graph of `call`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


@contextmanager
def launches(early: bool) -> Iterator[None]:
    """Whether kernels start before the one before them has ended."""
    usual = kernels.programmatic_launch
    if not early:
        kernels.programmatic_launch = lambda tensor: {"PDL": False}
    try:
        yield
    finally:
        kernels.programmatic_launch = usual


def library(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """The product alone, by torch."""
    return functional.linear(x, weight)


def num_layers(product: Product) -> int:
    """Weights of more than the L2 cache, in not much memory."""
    return max(1, min(28, int(1e9) // product.num_bytes))


def measure_chain(device: torch.device, length: int = 200) -> list[dict[str, Any]]:
    """Microseconds of one of many kernels that each read what the one before wrote."""
    rows = []
    for programs, early in itertools.product((1, 132), (False, True)):
        buffers = torch.zeros(2, programs * 128, device=device)
        options = programmatic_launch(buffers) if early else {"PDL": False}

        def chain(
            buffers: torch.Tensor = buffers, grid: tuple[int] = (programs,), options: Any = options
        ) -> None:
            for i in range(length):
                _step_kernel[grid](buffers[1 - i % 2], buffers[i % 2], **options)

        rows.append({"programs": programs, "early": early, "us": microseconds(chain) / length})
    return rows


def measure_products(device: torch.device) -> list[dict[str, Any]]:
    """Each product by the kernel and by the library."""
    results = []
    for decoder, products in DECODERS.items():
        for (name, product), n in itertools.product(products.items(), ROWS):
            layers = Layers(product, n, num_layers(product), device)
            ours, theirs = layers.microseconds(linear_triton), layers.microseconds(library)
            rates = {"TB/s": product.num_bytes / ours / 1e6, "library TB/s": product.num_bytes / theirs / 1e6}
            row = {"product": f"{decoder} {name}", "k": product.k, "m": product.m, "rows": n}
            results.append(row | {"us": ours, "library us": theirs} | rates)
            del layers
    return results


def measure_decoder(device: torch.device) -> list[dict[str, Any]]:
    """All products of the smaller decoder for one token, each waiting for the one before."""
    shapes = DECODERS["0.6B"]
    layers = {
        name: Layers(product, 1, 1 if name == "head" else 28, device) for name, product in shapes.items()
    }

    def decode(op: Any) -> torch.Tensor:
        hidden = layers["qkv"].x
        for i in range(28):
            qkv = layers["qkv"](i, hidden, None, op)
            hidden = layers["o"](i, qkv[:, :2048], hidden, op)
            middle = layers["gate-up"](i, hidden, None, op)
            hidden = layers["down"](i, middle[:, :3072], hidden, op)
        return layers["head"](0, hidden, None, op)

    rows = []
    floor = sum(product.num_bytes * len(layers[name].weights) for name, product in shapes.items())
    ways = (("library", library, False), ("kernel", linear_triton, False), ("kernel", linear_triton, True))
    for name, op, early in ways:
        with launches(early):
            us = microseconds(lambda op=op: decode(op))
        rows.append({"by": name, "early": early, "us": us, "TB/s": floor / us / 1e6})
    return rows


def other_cuts(product: Product, n: int) -> Iterator[LinearConfig]:
    """Cuts whose columns fit into the registers, and with x into shared memory."""
    for block_m, block_k, warps in itertools.product(
        (4, 8, 16, 32, 64), (512, 1024, 2048, 4096), (2, 4, 8, 16)
    ):
        held = block_m * block_k * 2 // (32 * warps)
        if 48 <= held <= 256 and (block_m + n) * block_k * 2 <= 110_000 and block_k < 2 * product.k:
            yield LinearConfig(block_m, block_k, warps)
            if block_k >= product.k:
                yield LinearConfig(block_m, block_k, warps, staged=True)


def sweep(device: torch.device, names: list[str], rows: list[int]) -> list[dict[str, Any]]:
    """The best cuts of each product."""
    results = []
    for decoder, name, n in itertools.product(DECODERS, DECODERS["0.6B"], rows):
        if names and f"{decoder} {name}" not in names:
            continue
        product = DECODERS[decoder][name]
        layers = Layers(product, n, num_layers(product), device)
        found = []
        for config in other_cuts(product, n):
            try:
                us = layers.microseconds(partial(linear_triton, config=config))
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    raise
                continue
            found.append({"product": f"{decoder} {name}", "rows": n, "us": us} | asdict(config))
        results += sorted(found, key=lambda row: row["us"])[:5]
    return results


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of the same columns."""
    show_table(title, list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="try other cuts of the work too (many minutes)")
    parser.add_argument(
        "--products", nargs="*", default=[], help='of the sweep, such as "0.6B qkv"; default all'
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="of the sweep")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("rates need a GPU")
    device = torch.device("cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    report: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name(device)}
    report["chain"] = measure_chain(device)
    show("a chain of dependent kernels, each", report["chain"])
    report["decoder"] = measure_decoder(device)
    show("28 layers and the head of 0.6B, one row", report["decoder"])
    report["products"] = measure_products(device)
    show("products", report["products"])
    if options.sweep:
        report["sweep"] = sweep(device, options.products, options.rows)
        show("best cuts", report["sweep"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
