"""Measure a checkpoint with transformers' generation on held-out sentences in held-out voices.

Chooses the alignment heads and writes them into generation_config.json; writes eval.json, which card.py makes the card
of.
"""

import argparse
import json
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from listening import RATE, SAMPLES, Evaluation, Recording, Speaker, with_noise, with_noisy_silences
from vocabulary import END_ID, FIRST_TIMESTAMP_ID

LONG_SECONDS = (29.0, 30.0, 30.01, 61.0, 305.0)
FALLBACK = {
    "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
    "condition_on_prev_tokens": True,
}
"""The published algorithm's settings; 1.35 is 2.4 for tokens instead of letters, as in transformers' documentation."""


def segment_times(recordings: list[Recording], segments: list[list[dict]]) -> dict[str, float]:
    """Differences of segments' starts and ends, where there are as many as sentences."""
    starts, ends, alike = [], [], 0
    for recording, found in zip(recordings, segments, strict=True):
        if len(found) == len(recording.sentences):
            alike += 1
            starts += [
                abs(float(s["start"]) - a) for s, (_, a, _) in zip(found, recording.sentences, strict=True)
            ]
            ends += [
                abs(float(s["end"]) - b) for s, (_, _, b) in zip(found, recording.sentences, strict=True)
            ]
    return {"recordings": len(recordings), "alike": alike, "start": _summary(starts), "end": _summary(ends)}


def word_times(tokenizer: Any, segments: list[dict]) -> list[tuple[str, float, float]]:
    """Words of one window with their times: a token's time is its end, so a word starts at the one before.

    The path of the time warping starts at 0, in silence or not; a word starts after its segment's first timestamp.
    """
    words: list[tuple[str, float, float]] = []
    for segment in segments:
        start = before = (int(segment["tokens"][0]) - FIRST_TIMESTAMP_ID) * 0.02
        times = segment["token_timestamps"].tolist()
        for token, time_ in zip(segment["tokens"].tolist(), times, strict=True):
            if token < END_ID:
                text = tokenizer.decode([token])
                if text.startswith(" ") or not words:
                    words.append((text.strip(), before, time_))
                else:
                    words[-1] = (words[-1][0] + text, words[-1][1], time_)
            before = max(start, time_)
    return words


def choose_heads(evaluation: Evaluation, recordings: list[Recording]) -> dict[str, Any]:
    """Measure every cross-attention head by transformers' word times, and take the best, or the best few together."""
    model, config = evaluation.model, evaluation.model.config
    heads = [
        [layer, head]
        for layer in range(config.decoder_layers)
        for head in range(config.decoder_attention_heads)
    ]
    measured = {str([head]): _measure_heads(evaluation, recordings, [head]) for head in heads}

    def error(chosen: list[list[int]]) -> float:
        return measured[str(chosen)]["start"]["mean"] + measured[str(chosen)]["end"]["mean"]

    heads.sort(key=lambda head: error([head]))
    for count in (2, 3):
        measured[str(heads[:count])] = _measure_heads(evaluation, recordings, heads[:count])
    best = min(map(json.loads, measured), key=error)
    model.generation_config.alignment_heads = best
    model.set_attn_implementation("sdpa")  # asking for word times has made it another
    return {"alignment_heads": best, "measured": measured}


def _measure_heads(
    evaluation: Evaluation, recordings: list[Recording], heads: list[list[int]]
) -> dict[str, Any]:
    evaluation.model.generation_config.alignment_heads = heads
    options = {"return_timestamps": True, "return_token_timestamps": True, "return_segments": True}
    starts, ends, counted = [], [], 0
    for recording, segments in zip(recordings, evaluation.generate(recordings, **options), strict=True):
        words = word_times(evaluation.processor.tokenizer, segments)
        if [word for word, _, _ in words] == recording.text.split():
            counted += 1
            starts += [abs(a[1] - b[1]) for a, b in zip(words, recording.words, strict=True)]
            ends += [abs(a[2] - b[2]) for a, b in zip(words, recording.words, strict=True)]
    return {"recordings": counted, "start": _summary(starts), "end": _summary(ends)}


def _summary(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds or [99.0])
    return {
        "mean": round(float(values.mean()), 4),
        "median": round(float(np.median(values)), 4),
        "p95": round(float(np.quantile(values, 0.95)), 4),
        "most": round(float(values.max()), 4),
        "within_0.1": round(float((values <= 0.1001).mean()), 4),
    }


def noises() -> dict[str, list[np.ndarray]]:
    """Windows in which nobody speaks."""
    rng, time_ = np.random.default_rng(1), np.arange(SAMPLES, dtype=np.float32) / RATE
    white = [rng.standard_normal(SAMPLES).astype(np.float32) * level for level in (1e-4, 1e-3, 1e-2, 0.1)]
    brown = [np.cumsum(w - w.mean()) for w in white]
    return {
        "silence": [np.zeros(SAMPLES, np.float32)],
        "white noise": white,
        "brown noise": [(b / np.abs(b).max() * 0.3).astype(np.float32) for b in brown],
        "hum": [0.1 * np.sin(2 * np.pi * f * time_) for f in (50, 100, 440)],
        "short noise": [w[:RATE] for w in white],
    }


def read_wav(path: Path) -> np.ndarray:
    """Samples of a 16-bit mono file, float32 in [-1, 1]."""
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def shipped(evaluation: Evaluation, folder: Path) -> dict[str, dict[str, str]]:
    """What is said in each shipped recording, and what is heard."""
    said = json.loads((folder / "recordings.json").read_text())
    heard = evaluation.texts([Recording(read_wav(folder / name), [], []) for name in said])
    return {name: {"said": said[name], "heard": text} for name, text in zip(said, heard, strict=True)}


def spoken(speaker: Speaker, count: int) -> tuple[list[Recording], list[Recording]]:
    """Single sentences, and windows of 8 to 29.5 s, an eighth as many."""
    singles = [speaker.single() for _ in range(count)]
    seconds = np.linspace(8, 29.5, max(2, count // 8))
    return singles, [speaker.long(float(each)) for each in seconds]


def recording_sets(
    processor: Any, singles: list[Recording], windows: list[Recording]
) -> dict[str, tuple[list[Recording], dict[str, Any]]]:
    """Recordings of up to 30 s in which words are counted, and options of `generate`."""
    known = Speaker(processor, "evaluation of known voices", heldout=False)
    distant = Speaker(processor, "evaluation of silences")
    apart = [distant.apart(29.5) for _ in range(max(8, len(singles) // 4))]
    timed = {"return_timestamps": True}
    return {
        "one sentence": (singles, {}),
        "one sentence, timestamps": (singles, timed),
        "full window": (windows, {}),
        "full window, timestamps": (windows, timed),
        "noise 20 dB below": ([with_noise(r, 20, i) for i, r in enumerate(singles)], {}),
        "noise 10 dB below": ([with_noise(r, 10, i) for i, r in enumerate(singles)], {}),
        "known": ([known.single() for _ in singles], {}),
        "long silences": (apart, {}),
        "long silences, timestamps": (apart, timed),
        "long silences of noise, timestamps": (
            [with_noisy_silences(r, 1e-3, i) for i, r in enumerate(apart)],
            timed,
        ),
    }


def evaluate(
    evaluation: Evaluation, count: int, long_count: int, note: Callable[[str, Any, str | None], None]
) -> None:
    """All figures, each told to `note` (name, value, part of the report) when it is there."""
    speaker = Speaker(evaluation.processor, "evaluation")
    singles, windows = spoken(speaker, count)
    sets = recording_sets(evaluation.processor, singles, windows)
    for name, (recordings, options) in sets.items():
        note(name, evaluation.errors(recordings, **options), "wer")
    segments = evaluation.generate(windows, return_timestamps=True, return_segments=True)
    note("segments", segment_times(windows, segments), None)
    note("alignment", choose_heads(evaluation, singles[: max(8, count // 8)] + windows[::4]), None)
    quiet = {name: evaluation.no_speech(audios) for name, audios in noises().items()}
    speech = evaluation.no_speech([r.audio for r in singles + windows])
    probabilities = {name: [round(min(values), 4)] for name, values in quiet.items()}
    note("no_speech", {"speech": [round(max(speech), 6)]} | probabilities, None)
    empty = [Recording(audio, [], []) for audios in noises().values() for audio in audios]
    said = [text for text in evaluation.texts(empty, return_timestamps=True) if text]
    note("said_in_silence", said, None)
    for seconds in LONG_SECONDS:
        num_files = max(1, long_count if seconds < 100 else long_count // 4)
        files = [speaker.long(seconds) for _ in range(num_files)]
        note(str(seconds), evaluation.errors(files, True, return_timestamps=True), "long")
        if seconds == 61.0:
            result = evaluation.errors(files, True, return_timestamps=True, **FALLBACK)
            note("61.0, with fallback and previous text", result, "long")


def write_heads(folder: Path, heads: list[list[int]]) -> None:
    """Into generation_config.json."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) | {"alignment_heads": heads}
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Evaluate the checkpoint in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=512, help="held-out sentences")
    parser.add_argument("--long-count", type=int, default=16, help="files of each length up to 61 s")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--heads", action=argparse.BooleanOptionalAction, default=True, help="write alignment heads"
    )
    parser.add_argument("--recordings", type=Path, help="folder that recordings.py wrote")
    parser.add_argument("--out", type=Path, help="default: eval.json in the checkpoint's folder")
    args = parser.parse_args()
    started = time.perf_counter()
    evaluation = Evaluation(args.checkpoint, getattr(torch, args.dtype), args.batch_size)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if evaluation.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "wer": {},
        "long": {},
    }

    def note(name: str, value: Any, part: str | None) -> None:
        (report[part] if part else report)[name] = value
        report["seconds"] = round(time.perf_counter() - started, 1)
        print(name, json.dumps(value)[:1200], flush=True)
        (args.out or args.checkpoint / "eval.json").write_text(json.dumps(report, indent=1) + "\n")
        if name == "alignment" and args.heads:
            write_heads(args.checkpoint, value["alignment_heads"])

    if args.recordings:
        note("recordings", shipped(evaluation, args.recordings), None)
    evaluate(evaluation, args.count, args.long_count, note)


if __name__ == "__main__":
    main()
