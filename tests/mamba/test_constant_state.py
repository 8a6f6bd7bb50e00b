"""examples/hybrid_state.py: what it measures is what the shapes say, and what it asks is answered."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid_state.py"
BLOCK = 16  # tokens of a block of keys and values


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hybrid_state", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["HYBRID", "DECODER"])
def test_measured_bytes_are_those_of_the_shapes(example: ModuleType, model: str) -> None:
    shape = {"HYBRID": example.EMBEDDED_HYBRID, "DECODER": example.EMBEDDED_DECODER}[model]
    contexts = (70, 330, 650)
    for context, kept in zip(contexts, example.measure(getattr(example, model), contexts), strict=True):
        assert kept.state == shape.kept(context).state
        # Whole blocks, for the two tokens too that were computed behind the prompt.
        assert kept.keys_and_values == shape.kept(-(-(context + 2) // BLOCK) * BLOCK).keys_and_values


def test_it_asks_over_every_distance_and_is_answered(example: ModuleType) -> None:
    rows = example.recall()
    assert {row["distance"] for row in rows} == {64, 128, 256, 512, 1024, 1500}
    assert [row["said"] for row in rows] == [row["reference"] for row in rows]


def test_the_plot_is_small(example: ModuleType, tmp_path: Path) -> None:
    kept = {
        s.name: [s.kept(n) for n in example.CONTEXTS]
        for s in (example.EMBEDDED_HYBRID, example.EMBEDDED_DECODER)
    }
    example.plot(tmp_path / "plot.svg", *kept.values())
    text = (tmp_path / "plot.svg").read_text()
    assert len(text) < 100_000
    assert "Bamba-9B" in text
