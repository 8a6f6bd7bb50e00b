"""Offline throughput of a real model's shape with random weights, beside transformers in the same run.

    python benchmarks/offline.py --json results.json

Workloads: `batch` (256 requests of 128 tokens in, 256 out) and `single` (one request of 128 in, 512 out), greedy,
end ids ignored, no prefix hits. Peers: transformers' continuous batching and `generate`, on the same weights.
Prints a table; `profile` says where a decode step's time goes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core_runner import LLM, SamplingParams

# Qwen3-0.6B's published configuration.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
WORKLOADS = {"batch": (256, 128, 256), "single": (1, 128, 512)}  # requests, tokens in, tokens out


def make_prompts(count: int, length: int, seed: int = 1234) -> list[list[int]]:
    """Random token ids, so that no prefix is shared."""
    draw = random.Random(seed)
    return [[draw.randrange(100, MODEL["vocab_size"] - 1000) for _ in range(length)] for _ in range(count)]


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` runs; the device is idle before and after each."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


Bench = Callable[[list[list[int]], int], int]  # (prompts, new tokens each) -> tokens generated


def bench(name: str, run: Bench, repeats: int, workloads: Iterable[str] = WORKLOADS) -> dict[str, float]:
    """Output tokens per second of each workload, after a short warm-up of the same shape."""
    rates = {}
    for workload in workloads:
        count, length, new = WORKLOADS[workload]
        prompts = make_prompts(count, length)
        tokens = [run(prompts, 8)]
        rates[workload] = count * new / timed(lambda p=prompts, n=new, t=tokens: t.append(run(p, n)), repeats)
        assert tokens[-1] == count * new, f"{name} gave {tokens[-1]} tokens, not {count * new}"
        print(f"{name}: {workload} {rates[workload]:.1f} output tokens/s", flush=True)
    return rates


def run_core_runner(llm: LLM, prompts: list[list[int]], new: int) -> int:
    """Ours."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def run_generate(model: Any, prompts: list[list[int]], new: int) -> int:
    """transformers.generate on the whole batch at once; rows have one length, so no padding is wasted."""
    ids = torch.tensor(prompts, device=model.device)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out.numel() - ids.numel()


def run_continuous_batching(model: Any, prompts: list[list[int]], new: int) -> int:
    """transformers' generate_batch with its defaults, at our batch size and step budget."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    results = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=8192, max_requests_per_batch=256, allow_block_sharing=False
        ),
        progress_bar=False,
    )
    return sum(len(result.generated_tokens) for result in results.values())


PEERS = {
    "transformers generate": run_generate,
    "transformers continuous batching": run_continuous_batching,
}


def agreement(llm: LLM, model: Any, count: int = 8, new: int = 64) -> dict[str, float]:
    """Greedy tokens against transformers, up to each prompt's first difference; its margin is that of the oracle."""
    prompts = make_prompts(count, 96, seed=99)
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    same, worst = 0, 0.0
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        got = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + got], device=model.device)).logits[0, len(prompt) - 1 : -1]
        best = torch.log_softmax(logits.float(), -1)
        chosen = best.gather(1, torch.tensor(got, device=model.device)[:, None])[:, 0]
        gaps = (best.max(-1).values - chosen).tolist()  # 0 where the oracle would choose the same id
        same += sum(gap == 0.0 for gap in gaps)
        worst = max(worst, *gaps)
    return {"tokens": count * new, "same": same, "largest_gap_nat": worst}


def profile_decode(llm: LLM, steps: int = 20) -> dict[str, Any]:
    """Host and device time of steady decode steps of 256 requests, and the kernels that take most of it."""
    from torch.profiler import ProfilerActivity, profile

    prompts = make_prompts(256, 128, seed=5)
    stream = llm.stream(prompts, SamplingParams(temperature=0.0, max_tokens=steps + 40, ignore_eos=True))
    for _ in range(256 * 20):
        next(stream)
    started = time.perf_counter()
    torch.cuda.synchronize()
    for _ in range(256 * steps):
        next(stream)
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as result:
        for _ in range(256 * 5):
            next(stream)
        torch.cuda.synchronize()
    stream.close()
    events = [e for e in result.key_averages() if e.self_device_time_total > 0]
    device_ms = sum(e.self_device_time_total for e in events) / 5 / 1000
    events.sort(key=lambda e: -e.self_device_time_total)
    launches = sum(e.count for e in events) / 5
    top = [(e.key[:70], round(e.self_device_time_total / 5 / 1000, 3), e.count // 5) for e in events[:12]]
    return {"wall_ms": wall * 1000, "device_ms": device_ms, "device_ops": launches, "top": top}


def make_llm(directory: str, **options: Any) -> LLM:
    """Ours, with the caches that 256 requests of 1,024 tokens need."""
    return LLM(
        directory,
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=1024,
        max_num_reqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        **options,
    )


def load_peer(directory: str, state_dict: dict[str, torch.Tensor]) -> Any:
    """transformers' model with the same weights and its own attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.load_state_dict(state_dict)
    return model.eval()


def main() -> None:
    """Run what was asked for and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip-peers", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        llm = make_llm(directory)
        report: dict[str, Any] = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
        report["transformers"] = importlib.metadata.version("transformers")
        report["core_runner"] = bench("core_runner", partial(run_core_runner, llm), args.repeats)
        report["profile"] = profile_decode(llm)
        print_profile(report["profile"])
        peer = load_peer(directory, llm.engine.runner.model_state.model.model.state_dict())
        report["agreement"] = agreement(llm, peer)
        print("agreement with transformers:", report["agreement"], flush=True)
        llm.close()
        del llm
        torch.cuda.empty_cache()
        eager = make_llm(directory, cuda_graphs=False)
        report["core_runner, no graphs"] = bench("no graphs", partial(run_core_runner, eager), 1, ["batch"])
        del eager
        torch.cuda.empty_cache()
        if not args.skip_peers:
            for workload, (name, run) in itertools.product(WORKLOADS, PEERS.items()):
                report.setdefault(name, {}).update(bench(name, partial(run, peer), 1, [workload]))
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def print_report(report: dict[str, Any]) -> None:
    """The table: output tokens per second, and each peer's ratio to ours."""
    print(f"{report['machine']}, torch {report['torch']}, transformers {report['transformers']}")
    ours = report["core_runner"]
    print(f"{'output tokens/s (ours against it)':<36}{'batch':>10}{'single':>17}")
    for name in ("core_runner", "core_runner, no graphs", *PEERS):
        if name in report:
            rates = report[name]
            cells = (f"{rates[w]:>10.1f} ({ours[w] / rates[w]:.2f}x)" for w in WORKLOADS if w in rates)
            print(f"{name:<36}{''.join(cells)}")


def print_profile(profile: dict[str, Any]) -> None:
    """Where a decode step of 256 requests spends its time."""
    print(
        f"decode step of 256: wall {profile['wall_ms']:.2f} ms, device {profile['device_ms']:.2f} ms,",
        end=" ",
    )
    print(f"{profile['device_ops']:.0f} device operations")
    for name, milliseconds, count in profile["top"]:
        print(f"  {milliseconds:8.3f} ms  {count:5d}x  {name}")


if __name__ == "__main__":
    main()
