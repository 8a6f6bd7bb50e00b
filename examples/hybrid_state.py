"""Constant state against growing keys and values: what a request keeps in memory, measured and drawn, and recall.

    pip install "core-runner[bench]"    # matplotlib, for --plot alone
    python examples/hybrid_state.py [--plot docs/constant_state.svg]

A request is served by the embedded hybrid (Mamba-2 layers, attention in two of eight) and by the embedded decoder
(attention in eight of eight), and its cache blocks are counted while it runs. The same is computed for a published
hybrid's shape and for a decoder's of its size. Then the hybrid is asked for values that it read up to 1,500 tokens
before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_runner import LLM, SamplingParams
from model_states import PluginManager

HYBRID, DECODER = "embedded:mamba", "embedded:decoder"
CONTEXTS = (64, 160, 320, 480, 672, 864, 1056, 1248, 1440, 1632, 1824, 2000)
REAL_CONTEXTS = tuple(2**power for power in range(8, 19))
BYTES = 2  # of a number in bfloat16


@dataclass(frozen=True)
class Kept:
    """Bytes that one request keeps at some context: recurrent state, and keys and values."""

    state: int
    keys_and_values: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.state + self.keys_and_values


@dataclass(frozen=True)
class Shape:
    """What of a model's configuration decides its memory."""

    name: str
    attention_layers: int
    kv_heads: int
    head_size: int
    mamba_layers: int = 0
    mamba_heads: int = 0
    mamba_head_size: int = 0
    state_size: int = 0
    conv_width: int = 4

    def kept(self, context: int) -> Kept:
        """By the shapes alone: a state [heads, head size, state size] and the last inputs of the convolution."""
        inner = self.mamba_heads * self.mamba_head_size
        conv = (self.conv_width - 1) * (inner + 2 * self.state_size)
        state = self.mamba_layers * (inner * self.state_size + conv)
        per_token = 2 * self.attention_layers * self.kv_heads * self.head_size
        return Kept(BYTES * state, BYTES * per_token * context)


EMBEDDED_HYBRID = Shape("embedded hybrid", 2, 2, 64, 6, 8, 64, 64)
EMBEDDED_DECODER = Shape("embedded decoder", 8, 2, 64)
BAMBA = Shape("Bamba-9B", 3, 8, 128, 29, 128, 64, 128)
LLAMA = Shape("a Llama-like 8B", 32, 8, 128)


def measure(model: str, contexts: Sequence[int]) -> list[Kept]:
    """Bytes of the blocks that a request holds after as many tokens and two more."""
    llm = LLM(
        model, device="cpu", dtype="bfloat16", max_num_reqs=1, max_num_batched_tokens=512,
        enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    pools = llm.engine.runner.num_blocks
    groups = llm.engine.runner.cache_groups
    kept = []
    for context in contexts:
        prompt = [5 + i % 1000 for i in range(context)]
        held: list[int] = []
        for _ in llm.stream([prompt], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)):
            if llm.stats().running:
                free = llm.engine.scheduler.stats().free_blocks
                held = [n - 1 - f for n, f in zip(pools, free, strict=True)]
        sizes = {group.name: count * group.block_bytes for group, count in zip(groups, held, strict=True)}
        state = sum(size for name, size in sizes.items() if name == "recurrent")
        kept.append(Kept(state, sum(sizes.values()) - state))
    return kept


def recall(model: str = HYBRID) -> list[dict[str, Any]]:
    """Held-out questions about a value read long before: distance in tokens, right answer, and what is said."""
    rows = json.loads((Path(PluginManager().locate(model)) / "heldout.json").read_text())
    asked = [row for row in rows if "distance" in row]
    llm = LLM(model, max_num_reqs=4)
    prompts = [
        llm.render_chat([{"role": "user", "content": row["prompt"]}])[0] if row["chat"] else row["prompt"]
        for row in asked
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, stop=() if row["chat"] else "\n") for row in asked
    ]
    said = [output.outputs[0].text.strip() for output in llm.generate(prompts, params)]
    return [row | {"said": text} for row, text in zip(asked, said, strict=True)]


def plot(path: Path, hybrid: Sequence[Kept], decoder: Sequence[Kept]) -> None:
    """Two panels: measured for the embedded models, and computed for published shapes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "core-runner", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
    left.plot(
        CONTEXTS, [k.total / 1e6 for k in decoder], "-o", ms=3, color="#ff725c", label="embedded decoder"
    )
    left.plot(CONTEXTS, [k.total / 1e6 for k in hybrid], "-o", ms=3, color="#4269d0", label="embedded hybrid")
    left.plot(
        CONTEXTS, [k.state / 1e6 for k in hybrid], "--o", ms=3, color="#97bbf5", label="its state alone"
    )
    left.set(title="Measured", xlabel="tokens of context", ylabel="MB a request", ylim=(0, None))
    kept = {shape: [shape.kept(n) for n in REAL_CONTEXTS] for shape in (LLAMA, BAMBA)}
    right.plot(REAL_CONTEXTS, [k.total / 1e9 for k in kept[LLAMA]], "-", color="#ff725c", label=LLAMA.name)
    right.plot(REAL_CONTEXTS, [k.total / 1e9 for k in kept[BAMBA]], "-", color="#4269d0", label=BAMBA.name)
    right.plot(
        REAL_CONTEXTS, [k.state / 1e9 for k in kept[BAMBA]], "--", color="#97bbf5", label="its state alone"
    )
    right.set(title="Computed from the shapes", xlabel="tokens of context", ylabel="GB a request")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    ticks = REAL_CONTEXTS[::2]
    right.set_xticks(ticks, [str(n) if n < 1024 else f"{n // 1024}k" for n in ticks])
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e4e4e4")
        axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def show(hybrid: Sequence[Kept], decoder: Sequence[Kept], answers: Sequence[dict[str, Any]]) -> None:
    """The same as text."""
    print("bytes a request keeps, in bfloat16\n")
    print(f"{'tokens':>8} {'decoder':>12} {'hybrid':>12} {'its state':>12}")
    for context, ours, theirs in zip(CONTEXTS, hybrid, decoder, strict=True):
        print(f"{context:8,} {theirs.total:12,} {ours.total:12,} {ours.state:12,}")
    print(f"\n{'tokens':>8} {LLAMA.name:>18} {BAMBA.name:>18} {'its state':>18}")
    for context in REAL_CONTEXTS:
        bamba = BAMBA.kept(context)
        print(f"{context:8,} {LLAMA.kept(context).total:18,} {bamba.total:18,} {bamba.state:18,}")
    print(f"\n{'distance':>8}  asked and said")
    for row in answers:
        mark = "right" if row["said"] == row["answer"] else f"wrong, it was {row['answer']!r}"
        print(f"{row['distance']:8,}  {row['prompt'].splitlines()[-1]} {row['said']} ({mark})")


def main() -> None:
    """Measure, draw and ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="file of the plot: .svg or .png")
    args = parser.parse_args()
    hybrid, decoder = measure(HYBRID, CONTEXTS), measure(DECODER, CONTEXTS)
    show(hybrid, decoder, recall())
    if args.plot is not None:
        plot(args.plot, hybrid, decoder)


if __name__ == "__main__":
    main()
