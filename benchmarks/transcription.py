"""Speech to text: seconds of audio transcribed in a second, from log-mel features on the device.

    python benchmarks/transcription.py --peers --json turbo.json --plot turbo.svg
    python benchmarks/transcription.py --peers --model whisper-large-v3

Every window is 30 s of features (noise: what is computed does not depend on them); the encoder runs on each, and 100
tokens are decoded greedily after a prompt of four, end ids ignored, by models of real shapes with random weights. Each
figure is the median of `--repeats` runs after two that compile and record, or one of the ways that go on for longer.

`--ways` says how the windows come: `batch`, all there at the start; `arriving`, 16 times as many (`--rounds`), one by
one at the rate that the batch reached; `wav`, as many from stereo WAV files of 16 bits at 44.1 kHz, with reading,
resampling and features. What counts is all windows over all the time, from the first request or file to the last token.
That includes both ends, at which the device is not full: a window takes a while from its arrival. So the speed at which
the middle half of the windows leaves is given too, which is what a server can keep up with, and how long an arriving
window takes (median and most). The processes that decode files, one for each core, belong to the `LLM`, and run since
the warm-up.

`transcribe` is `LLM.transcribe` as users call it, with timestamp rules, log-probabilities and a look for silence, of a
fourth as many recordings of a window each; `transcribe-wav` reads these from files, and `transcribe-long` has one
recording of that length in parallel windows. Random weights say what they like: they seldom end a text, so the model is
loaded with no more positions than 100 tokens take (for all ways of the run), one temperature is tried, and where a text
breaks off the rest of a window is a window again, as it would be with true weights. So what is counted is the windows
of 30 s that the encoder and the decoder had, by whose number the seconds of audio differ.

`--peers` runs transformers' `generate` after ours, on one fixed batch of the same windows. With
`--cross-attention-dtype int8` keys and values of encoder outputs are kept in 8 bits; `--cross-attention-cache` says
what is kept in place of what suits the number of windows. Every figure names either.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from transcription_ways import ArrivingWindows, Recordings, WavFiles

from core_runner import LLM

OURS, THEIRS = "core-runner", "transformers generate"
TRANSCRIBING = {
    "transcribe": Recordings.arrays,
    "transcribe-wav": Recordings.files,
    "transcribe-long": Recordings.long,
}
WAYS = ("batch", "arriving", "wav", *TRANSCRIBING)
# Shape -> windows at once.
WINDOWS = {"whisper-large-v3-turbo": (256, 64), "whisper-large-v3": (64, 1), "tiny-speech": (3, 1)}
WINDOW_SECONDS = 30
PROMPT = [1, 2, 3, 4]
NUM_TOKENS = {False: 100, True: 5}  # by --small

# What a run gave: windows and tokens.
Count = tuple[int, int]


def make_features(model: str, windows: int, small: bool) -> torch.Tensor:
    """Features [windows, bands, frames], float32 on the device."""
    config, device = MODELS[model], "cpu" if small else "cuda"
    generator = torch.Generator(device).manual_seed(0)
    shape = (windows, config["num_mel_bins"], 2 * config["max_source_positions"])
    return torch.randn(shape, generator=generator, device=device)


@contextmanager
def open_ours(model: str, slots: int, args: argparse.Namespace) -> Iterator[LLM]:
    """An `LLM` with a slot for each window."""
    given = {
        name: getattr(args, name)
        for name in ("encoder_batch", "encoder_ahead", "cross_attention_cache", "cross_attention_dtype")
    }
    options = {name: value for name, value in given.items() if value is not None}
    limit = MODELS[model]["max_target_positions"]
    if not TRANSCRIBING.keys().isdisjoint(args.ways):
        limit = len(PROMPT) + NUM_TOKENS[args.small]
    with open_llm(model, args.small, max_num_reqs=slots, max_model_len=limit, model_options=options) as llm:
        yield llm


def measure_ours(model: str, rows: Sequence[int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each number of windows and each way."""
    kinds = [kind for kind in (args.cross_attention_cache, args.cross_attention_dtype) if kind is not None]
    engine = f"{OURS} with {' '.join(kinds)} cross-attention" if kinds else OURS
    for windows in rows:
        with open_ours(model, windows, args) as llm:
            for found in measure_ways(llm, make_features(model, windows, args.small), args):
                yield {"engine": engine, "windows": windows, **found}


def measure_ways(llm: LLM, features: torch.Tensor, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each way."""
    windows, num_tokens = len(features), NUM_TOKENS[args.small]
    prompts = [{"prompt_token_ids": PROMPT, "model_inputs": {"input_features": one}} for one in features]

    def batch() -> Count:
        outputs = llm.generate(prompts, greedy(num_tokens))
        return windows, sum(len(output.outputs[0].token_ids) for output in outputs)

    found = measure_one(batch, num_tokens, args.repeats)
    yield {"way": "batch", **found}
    count, rate = args.rounds * windows, found["speed"] / WINDOW_SECONDS
    if "arriving" in args.ways:
        arriving = ArrivingWindows(llm, prompts, num_tokens, count, rate)
        yield {"way": "arriving", **measure_going_on(arriving, num_tokens, args.repeats)}
    if "wav" in args.ways:
        with WavFiles(llm, PROMPT, num_tokens, windows, count) as files:
            yield {"way": "wav", **measure_going_on(files, num_tokens, args.repeats)}
    for way in (way for way in args.ways if way in TRANSCRIBING):
        with Recordings(llm, max(count // 4, windows)) as recordings:
            yield {"way": way, **measure_one(partial(TRANSCRIBING[way], recordings), None, args.repeats, 1)}


def measure_theirs(model: str, rows: Sequence[int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each number of windows: transformers' plain `generate`, which its class for this model ends in."""
    from transformers import AutoConfig, GenerationMixin, WhisperForConditionalGeneration

    config = AutoConfig.for_model(**MODELS[model])
    dtype, device = (torch.float32, "cpu") if args.small else (torch.bfloat16, "cuda")
    with torch.device(device):
        module = WhisperForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    num_tokens = NUM_TOKENS[args.small]

    def transcribe(features: torch.Tensor) -> Count:
        ids = torch.tensor([PROMPT] * len(features), device=device)
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None}
        inputs = {"input_features": features.to(dtype), "decoder_input_ids": ids}
        out = GenerationMixin.generate(module, **inputs, do_sample=False, num_beams=1, **limits)
        return len(features), int(out[:, len(PROMPT) :].numel())

    for windows in rows:
        run = partial(transcribe, make_features(model, windows, args.small))
        yield {
            "engine": THEIRS,
            "windows": windows,
            "way": "batch",
            **measure_one(run, num_tokens, args.repeats),
        }


def measure_one(
    run: Callable[[], Count], num_tokens: int | None, repeats: int, warm_ups: int = 2
) -> dict[str, Any]:
    """Speed of one row; every run must give the tokens that were asked for (None: as many as the last one gave)."""
    counts = [run() for _ in range(warm_ups)]
    seconds = timed(lambda: counts.append(run()), repeats)
    windows, tokens = counts[-1]
    if num_tokens is not None and set(counts) != {(windows, windows * num_tokens)}:
        raise RuntimeError(f"{num_tokens} tokens a window were asked for, the runs gave {counts}")
    speed = WINDOW_SECONDS * windows / median(seconds)
    return {"tokens": tokens, "seconds": seconds, "speed": speed}


def measure_going_on(way: ArrivingWindows | WavFiles, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Speed of all windows, and that at which the middle half leaves; how long a window takes from its arrival."""
    spans: list[float] = []
    latencies: list[tuple[float, float]] = []

    def run() -> Count:
        count = way.run(way.count)
        spans.append(way.middle_seconds())
        if isinstance(way, ArrivingWindows):
            latencies.append(median_and_most(way.latencies))
        return count

    way.run(way.count)  # numbers of windows at once that are new to the encoder are recorded on the way
    found = measure_one(run, num_tokens, repeats, 0)
    found["middle_speed"] = WINDOW_SECONDS * (way.count // 2) / median(spans)
    if latencies:
        found["latency_s"] = [median(values) for values in zip(*latencies, strict=True)]
    return found


def median_and_most(values: Sequence[float]) -> tuple[float, float]:
    """The median and the maximum."""
    return median(values), max(values)


def measure(args: argparse.Namespace) -> Report:
    """Every number of windows by every engine."""
    results, rows = [], args.windows or WINDOWS[args.model]
    for measure_engine in (measure_ours, measure_theirs) if args.peers else (measure_ours,):
        with torch.inference_mode():
            for found in measure_engine(args.model, rows, args):
                results.append(found)
                took = ", ".join(f"{seconds:.3f}" for seconds in found["seconds"])
                print(
                    f"{_label(found)}, {found['windows']} at once: {found['speed']:,.0f} s/s ({took} s)",
                    *(f"latency {seconds:.2f} s" for seconds in found.get("latency_s", ())),
                    *(f"middle half {found[name]:,.0f} s/s" for name in ("middle_speed",) if name in found),
                    flush=True,
                )
        free_memory()
    return {"results": results}


def _label(result: dict[str, Any]) -> str:
    return result["engine"] if result["way"] == "batch" else f"{result['engine']}, {result['way']}"


def _by_windows(report: Report) -> dict[int, dict[str, float]]:
    """Windows at once -> engine and way -> speed."""
    speeds: dict[int, dict[str, float]] = {}
    for result in report["results"]:
        found = speeds.setdefault(result["windows"], {})
        found[_label(result)] = result["speed"]
        if "middle_speed" in result:
            found[f"{_label(result)}, middle half"] = result["middle_speed"]
    return speeds


def show(report: Report) -> None:
    """Windows down, engines and ways across."""
    speeds = _by_windows(report)
    engines = list(dict.fromkeys(label for found in speeds.values() for label in found))
    table = [[windows, *map(found.get, engines)] for windows, found in speeds.items()]
    show_table("seconds of audio in a second", ["windows at once", *engines], table)


def plot(report: Report, path: Path) -> None:
    """A panel for each number of windows, a bar for each engine and way."""
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
        "--encoder-batch",
        type=int,
        help="windows that the encoder takes at once (default: the component's own)",
    )
    parser.add_argument(
        "--encoder-ahead", type=int, help="encoder runs beside the steps (default: the component's own)"
    )
    parser.add_argument("--cross-attention-cache", help="keys_values or hidden_states (default: what suits)")
    parser.add_argument(
        "--cross-attention-dtype", help="of the kept encoder outputs, int8 for one (default: the model's)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=16,
        metavar="N",
        help="times the windows at once, of ways that go on (default: 16)",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["batch"], help="see above")
    small = parser.parse_known_args(argv)[0].small
    parser.set_defaults(model="tiny-speech" if small else "whisper-large-v3-turbo")
    run_script(parser, argv, measure, show, plot)


if __name__ == "__main__":
    main()
