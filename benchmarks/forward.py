"""The forward of a step with fused layers and with transformers' own modules, and each fused kernel beside its floor.

    python benchmarks/forward.py [--model qwen3-0.6b] [--json FILE]

A time is the median replay of a CUDA graph. *difference* is that of the hidden states of both, relative to their norm;
random weights make it larger than a trained model's. The floor of a kernel is what it reads and writes at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from common import MODELS, show_table
from few_rows import microseconds
from model_states_decoder.state import DecoderState

from model_states import InputBatch, ModelConfig
from model_states.kernels.act_mul import act_mul
from model_states.kernels.add_norm import RMSNorm, add_norm
from model_states.kernels.rope_write import HeadLayout, Rotary, rope_write
from model_states.loading import load_checkpoint_config

DEVICE, DTYPE, BLOCK_SIZE, RATE = torch.device("cuda"), torch.bfloat16, 16, 4.2e12

# name -> (requests, tokens of each, tokens computed before)
STEPS = {
    "decode 1 x 256": (1, 1, 255),
    "decode 16 x 256": (16, 1, 255),
    "decode 64 x 256": (64, 1, 255),
    "decode 256 x 256": (256, 1, 255),
    "prefill 64 x 128": (64, 128, 0),
}


def load(model: str, fused_layers: bool) -> DecoderState:
    """The model with seeded random weights."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODELS[model]))
        checkpoint = load_checkpoint_config(directory)
    return DecoderState(
        ModelConfig(
            checkpoint=checkpoint,
            device=DEVICE,
            dtype=DTYPE,
            max_model_len=4096,
            max_num_reqs=256,
            max_num_batched_tokens=8192,
            block_size=BLOCK_SIZE,
            load_format="dummy",
            fused_layers=fused_layers,
        )
    )


def ints(values: Any) -> torch.Tensor:
    """int32 on the device."""
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def prepared(state: DecoderState, num_reqs: int, query_len: int, computed: int) -> InputBatch:
    """A step of random tokens over caches of random numbers, ready for `forward`."""
    attention = state.components[0]
    groups = attention.cache_groups()
    blocks = (computed + query_len - 1) // BLOCK_SIZE + 1
    generator = torch.Generator(DEVICE).manual_seed(0)
    caches = {group.name: group.allocate(num_reqs * blocks + 1, DEVICE) for group in groups}
    for layer in (layer for group in caches.values() for layer in group.values()):
        for tensor in layer.values():
            tensor.normal_(generator=generator)
    attention.init_caches(caches)
    positions = torch.arange(computed, computed + query_len, device=DEVICE).repeat(num_reqs)
    table = torch.arange(1, num_reqs * blocks + 1, device=DEVICE).view(num_reqs, blocks)
    rows = torch.arange(num_reqs, device=DEVICE).repeat_interleave(query_len)
    slots = table[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(num_reqs + 1, dtype=np.int32) * query_len
    lengths = np.full(num_reqs, query_len, np.int32)
    batch = InputBatch(
        num_reqs=num_reqs,
        num_tokens=num_reqs * query_len,
        idx_mapping=ints(range(num_reqs)),
        idx_mapping_np=np.arange(num_reqs, dtype=np.int32),
        num_scheduled_tokens_np=lengths,
        num_computed_tokens_np=np.full(num_reqs, computed, np.int32),
        query_start_loc=ints(starts),
        query_start_loc_np=starts,
        seq_lens=ints(lengths + computed),
        input_ids=torch.randint(
            state.vocab_size, (num_reqs * query_len,), device=DEVICE, generator=generator
        ),
        positions=positions,
        block_tables=(ints(table),) * len(groups),
        slot_mappings=(slots,) * len(groups),
        logits_indices=positions[:0],
        expanded_idx_mapping=ints([]),
        expanded_local_pos=ints([]),
        cu_num_logits=ints([0] * (num_reqs + 1)),
        cu_num_logits_np=np.zeros(num_reqs + 1, np.int32),
        max_query_len=query_len,
        max_seq_len=computed + query_len,
    )
    attention.prepare_attn(batch)
    return batch


@torch.inference_mode()
def measure_steps(model: str) -> list[dict[str, Any]]:
    """Milliseconds of every step, fused and not."""
    states = {"fused": load(model, True), "plain": load(model, False)}
    results = []
    for name, step in STEPS.items():
        result: dict[str, Any] = {"step": name}
        hidden = {}
        for kind, state in states.items():
            batch = prepared(state, *step)
            hidden[kind] = state.forward(batch).float()
            result[f"{kind} ms"] = microseconds(lambda s=state, b=batch: s.forward(b)) / 1e3
        difference = (hidden["fused"] - hidden["plain"]).norm() / hidden["plain"].norm()
        results.append(result | {"difference": float(difference)})
    return results


@torch.inference_mode()
def measure_kernels(model: str, n: int) -> list[dict[str, Any]]:
    """Microseconds of every kernel between two products, of n tokens."""
    config = MODELS[model]
    hidden, middle, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = HeadLayout(config["num_attention_heads"], config["num_key_value_heads"], size, size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE)

    x, residual, out = normal(3, n, hidden)
    both, act, qkv = normal(n, 2 * middle), normal(n, middle), normal(n, sum(heads.sizes))
    caches = normal(2, n // BLOCK_SIZE + 1, BLOCK_SIZE, heads.num_kv_heads, size)
    norm, head_norm = (RMSNorm(normal(k), 1e-6, rounds_first=True) for k in (hidden, size))
    rotary = Rotary(*normal(2, n, size // 2), torch.arange(n, device=DEVICE), False)
    slots = torch.randperm(n, device=DEVICE)
    kernels = {
        "add_norm": (partial(add_norm, x, residual, None, norm, 1.0, out), 4 * x.nbytes),
        "act_mul": (partial(act_mul, both, "silu", act), both.nbytes + act.nbytes),
        "rope_write": (
            partial(rope_write, qkv, heads, head_norm, head_norm, rotary, *caches, slots),
            2 * qkv.nbytes,
        ),
    }
    return [
        {
            "kernel": name,
            "tokens": n,
            "us": microseconds(lambda call=call: [call() for _ in range(20)]) / 20,
            "floor us": 1e6 * num_bytes / RATE,
        }
        for name, (call, num_bytes) in kernels.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=["qwen3-0.6b"])
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    report = {
        "steps": measure_steps(options.model),
        "kernels": [row for n in (1, 256, 8192) for row in measure_kernels(options.model, n)],
    }
    for title, rows in report.items():
        show_table(title, list(rows[0]), [list(row.values()) for row in rows])
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
