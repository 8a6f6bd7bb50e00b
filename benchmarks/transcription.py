"""Speech to text: seconds of audio transcribed in a second, from log-mel features on the device.

    python benchmarks/transcription.py --peers --json turbo.json --plot turbo.svg
    python benchmarks/transcription.py --peers --model whisper-large-v3

Every window is 30 s of features (noise: what is computed does not depend on them); the encoder runs on each, and 100
tokens are decoded greedily after a prompt of four, end ids ignored, by models of real shapes with random weights. All
windows are there at the start. Each figure is the median of `--repeats` runs after two that compile and record.
`--peers` runs transformers' `generate` after ours, on one fixed batch of the same windows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import (
    MODELS,
    Report,
    free_memory,
    greedy,
    make_parser,
    median,
    open_llm,
    run_script,
    show_table,
    timed,
)
from plots import barh_panels

OURS, THEIRS = "core-runner", "transformers generate"
# Shape -> windows at once.
WINDOWS = {"whisper-large-v3-turbo": (256, 64), "whisper-large-v3": (64, 1), "tiny-speech": (3, 1)}
WINDOW_SECONDS = 30
PROMPT = [1, 2, 3, 4]
NUM_TOKENS = {False: 100, True: 5}  # by --small

Transcribe = Callable[[torch.Tensor], int]


def make_features(model: str, windows: int, small: bool) -> torch.Tensor:
    """Features [windows, bands, frames], float32 on the device."""
    config, device = MODELS[model], "cpu" if small else "cuda"
    generator = torch.Generator(device).manual_seed(0)
    shape = (windows, config["num_mel_bins"], 2 * config["max_source_positions"])
    return torch.randn(shape, generator=generator, device=device)


@contextmanager
def open_ours(model: str, windows: int, args: argparse.Namespace) -> Iterator[Transcribe]:
    """An `LLM` with a slot for each window."""
    options = {"encoder_batch": args.encoder_batch}
    limit = MODELS[model]["max_target_positions"]
    with open_llm(model, args.small, max_num_reqs=windows, max_model_len=limit, model_options=options) as llm:

        def transcribe(features: torch.Tensor) -> int:
            prompts = [
                {"prompt_token_ids": PROMPT, "model_inputs": {"input_features": one}} for one in features
            ]
            outputs = llm.generate(prompts, greedy(NUM_TOKENS[args.small]))
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        yield transcribe


@contextmanager
def open_theirs(model: str, windows: int, args: argparse.Namespace) -> Iterator[Transcribe]:
    """transformers' plain `generate`, which is what its class for this model ends in."""
    from transformers import AutoConfig, GenerationMixin, WhisperForConditionalGeneration

    config = AutoConfig.for_model(**MODELS[model])
    dtype, device = (torch.float32, "cpu") if args.small else (torch.bfloat16, "cuda")
    with torch.device(device):
        module = WhisperForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    num_tokens = NUM_TOKENS[args.small]

    def transcribe(features: torch.Tensor) -> int:
        ids = torch.tensor([PROMPT] * len(features), device=device)
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None}
        inputs = {"input_features": features.to(dtype), "decoder_input_ids": ids}
        out = GenerationMixin.generate(module, **inputs, do_sample=False, num_beams=1, **limits)
        return int(out[:, len(PROMPT) :].numel())

    yield transcribe


def measure_one(transcribe: Transcribe, features: torch.Tensor, wanted: int, repeats: int) -> dict[str, Any]:
    """Speed of one row by one engine; every run must give the tokens that were asked for."""
    tokens = [transcribe(features) for _ in range(2)]
    seconds = timed(lambda: tokens.append(transcribe(features)), repeats)
    if set(tokens) != {wanted}:
        raise RuntimeError(f"{wanted} tokens were asked for, the runs gave {tokens}")
    return {"tokens": wanted, "seconds": seconds, "speed": WINDOW_SECONDS * len(features) / median(seconds)}


def measure(args: argparse.Namespace) -> Report:
    """Every number of windows by every engine."""
    results = []
    for windows in args.windows or WINDOWS[args.model]:
        features = make_features(args.model, windows, args.small)
        for engine, opener in {OURS: open_ours, **({THEIRS: open_theirs} if args.peers else {})}.items():
            with opener(args.model, windows, args) as transcribe, torch.inference_mode():
                found = measure_one(transcribe, features, windows * NUM_TOKENS[args.small], args.repeats)
            results.append({"engine": engine, "windows": windows, **found})
            print(f"{engine}, {windows} at once: {found['speed']:,.0f} s/s", flush=True)
            del transcribe
            free_memory()
    return {"results": results}


def _by_windows(report: Report) -> dict[int, dict[str, float]]:
    """Windows at once -> engine -> speed."""
    speeds: dict[int, dict[str, float]] = {}
    for result in report["results"]:
        speeds.setdefault(result["windows"], {})[result["engine"]] = result["speed"]
    return speeds


def show(report: Report) -> None:
    """Windows down, engines across."""
    engines = list(dict.fromkeys(result["engine"] for result in report["results"]))
    table = [[windows, *map(found.get, engines)] for windows, found in _by_windows(report).items()]
    show_table("seconds of audio in a second", ["windows at once", *engines], table)


def plot(report: Report, path: Path) -> None:
    """A panel for each number of windows, a bar for each engine."""
    panels = {f"{windows} windows at once": found for windows, found in _by_windows(report).items()}
    environment = report["environment"]
    title = f"transcription, {environment['model']}, {environment['machine']}"
    barh_panels(path, title, panels, "seconds of audio in a second")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--peers", action="store_true", help="transformers' generate too")
    parser.add_argument(
        "--windows", type=int, nargs="+", metavar="N", help="windows at once (default: see above)"
    )
    parser.add_argument(
        "--encoder-batch", type=int, default=16, help="windows that the encoder takes at once"
    )
    small = parser.parse_known_args(argv)[0].small
    parser.set_defaults(model="tiny-speech" if small else "whisper-large-v3-turbo")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
