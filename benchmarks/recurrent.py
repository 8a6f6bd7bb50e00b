"""Models with recurrent state: decode steps and prefill, beside what the memory rate allows and beside transformers.

    python benchmarks/recurrent.py --model bamba-9b --json recurrent.json --plot recurrent.svg

*Floor* is the time in which the device's memory could move what a step must: every weight once, the state of every
request in and out, and the keys and values of its context. Decode is timed over steady steps, with prompts of 128 ids;
prefill is 8 prompts of 4,096 ids (steps of at most 8,192 tokens), one token each. `--transformers` also times its
generate at 64 requests, with the kernels that it finds: those of mamba-ssm and causal-conv1d, where they can be
imported (the report names them). Without mamba-ssm its prompts are 16 ids, since it then expands the states of a whole
prompt, and shorter contexts are no loss to it. Random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from common import Report, free_memory, greedy, make_parser, median, open_llm, run_script, show_table, timed
from plots import barh_panels

from core_runner import LLM
from core_runner.request import Request

MEMORY_RATE = 4.3e12  # bytes/s that an H200 moves
DECODE = {False: (1, 64, 256), True: (1, 4)}  # by --small
PROMPT_LEN, STEPS = 128, 48
PREFILL = {False: (8, 4096), True: (2, 96)}
TRANSFORMERS = {False: 64, True: 4}  # requests, which are among those of DECODE
_WITHOUT_KERNELS = 16  # ids in transformers' prompts


def measure(args: argparse.Namespace) -> Report:
    """Every figure of one model."""
    longest = 2 * PREFILL[args.small][1]
    options = {"max_model_len": min(longest, 512) if args.small else longest, "block_size": 16}
    model = "tiny-hybrid" if args.small else args.model
    with open_llm(model, args.small, **options) as llm:
        report: Report = {"decode": {}}
        for n in DECODE[args.small]:
            report["decode"][str(n)] = found = _decode(llm, n, args.repeats)
            print(f"decode, {n} requests: {found['step_s'] * 1e3:.3f} ms a step", flush=True)
        report["prefill"] = found = _prefill(llm, *PREFILL[args.small], args.repeats)
        print(f"prefill: {found['tok_s']:,.0f} tok/s", flush=True)
        config = llm.engine.runner.model_state.model.model.config  # type: ignore[attr-defined]
    del llm
    if args.transformers:
        free_memory()
        device = "cpu" if args.small else "cuda"
        report["transformers"] = _transformers(config, TRANSFORMERS[args.small], device, args.repeats)
    return report


def _decode(llm: LLM, num_reqs: int, repeats: int) -> dict[str, float]:
    """Seconds of a steady decode step, and of its floor."""
    steps = 8 if num_reqs < 8 else STEPS
    engine = llm.engine
    for index in range(num_reqs):
        prompt = [101 + (7 * index + i) % 1000 for i in range(PROMPT_LEN)]
        engine.add_request(Request(f"r{index}", prompt, greedy(STEPS * (repeats + 3))))  # type: ignore[arg-type]
    while engine.stats().waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds.append((time.perf_counter() - started) / steps)
    engine.abort_all()
    step = median(seconds)
    floor = _floor_bytes(llm, num_reqs, PROMPT_LEN + STEPS) / MEMORY_RATE
    return {"step_s": step, "tok_s": num_reqs / step, "floor_s": floor, "share": floor / step}


def _floor_bytes(llm: LLM, num_reqs: int, context: int) -> int:
    """Bytes that a decode step has to move."""
    runner = llm.engine.runner
    state: Any = runner.model_state
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in _weights(state.model.model)}
    traffic = 0
    for group in runner.cache_groups:
        # A state is read and written; keys and values are read.
        recurrent = group.sliding_window == 2
        traffic += 2 * group.block_bytes if recurrent else group.block_bytes * context // group.block_size
    return sum(weights.values()) + num_reqs * traffic


def _weights(model: Any) -> list[torch.Tensor]:
    """Parameters without an embedding that is only looked up, and those that the mixers hold."""
    held = [value for m in model.modules() for value in vars(m).values()]
    projections = [
        t for value in held for t in (getattr(value, "weight", None), getattr(value, "bias", None))
    ]
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    found = [*model.parameters(), *(t for t in projections if isinstance(t, torch.Tensor))]
    return [p for p in found if p is head or p is not embedding]


def _prefill(llm: LLM, num_reqs: int, prompt_len: int, repeats: int) -> dict[str, float]:
    """Seconds to compute prompts that share nothing."""
    prompts = [[101 + (13 * r + 7 * i) % 1000 for i in range(prompt_len)] for r in range(num_reqs)]
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        llm.generate(prompts, greedy(1))
        seconds.append(time.perf_counter() - started)
    step = median(seconds[1:])
    return {"seconds": step, "tok_s": num_reqs * prompt_len / step}


def _transformers(config: Any, batch: int, device: str, repeats: int) -> dict[str, Any]:
    """Tokens per second of transformers' own generate, the prompt's pass taken off."""
    from transformers import AutoModelForCausalLM

    kernels = [name for name in ("mamba_ssm", "causal_conv1d") if _imports(name)]
    prompt_len = PROMPT_LEN
    if "mamba_ssm" not in kernels:
        prompt_len = _WITHOUT_KERNELS
        for name in ("chunk_size", "mamba_chunk_size"):
            if hasattr(config, name):
                setattr(config, name, prompt_len)  # a prompt is padded to a multiple of it
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()
    ids = torch.randint(101, 1000, (batch, prompt_len), device=device)

    def run(num_tokens: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )

    run(2)
    short, long = (median(timed(partial(run, num_tokens), repeats)) for num_tokens in (2, 18))
    speed = batch * 16 / (long - short)
    return {"batch": batch, "prompt_len": prompt_len, "kernels": kernels, "tok_s": speed}


def _imports(name: str) -> bool:
    """Whether a package can be imported; one that was built in part raises all kinds of errors."""
    try:
        import_module(name)
    except Exception:
        return False
    return True


def show(report: Report) -> None:
    """The figures as tables."""
    rows = [
        [n, f["step_s"] * 1e3, f["floor_s"] * 1e3, 100 * f["share"], f["tok_s"]]
        for n, f in report["decode"].items()
    ]
    show_table("Decode", ["requests", "step ms", "floor ms", "% of floor's rate", "tok/s"], rows)
    prefill = report["prefill"]
    show_table("Prefill", ["", "seconds", "tok/s"], [["all prompts", prefill["seconds"], prefill["tok_s"]]])
    if "transformers" in report:
        other = report["transformers"]
        ours = report["decode"][str(other["batch"])]["tok_s"]
        row = [other["batch"], other["tok_s"], ours, ours / other["tok_s"]]
        title = f"Beside transformers (kernels: {', '.join(other['kernels']) or 'none'})"
        show_table(title, ["requests", "transformers tok/s", "core-runner tok/s", "times"], [row])


def plot(report: Report, path: Path) -> None:
    """Decode rate by number of requests, beside the floor's."""
    panels = {
        f"{n} requests": {"measured": f["tok_s"], "floor": int(n) / f["floor_s"]}
        for n, f in report["decode"].items()
    }
    barh_panels(path, "Decode", panels, "tok/s")


def main(argv: Sequence[str] | None = None) -> None:
    """Run as a script."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--transformers", action="store_true", help="also time transformers' generate")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
