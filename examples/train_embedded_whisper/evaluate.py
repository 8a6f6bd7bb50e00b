"""Measure a checkpoint with transformers' generation on held-out sentences in held-out voices.

Chooses the alignment heads and writes them into generation_config.json; writes eval.json, which card.py makes the card
of.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from clip_pool import TICK_SAMPLES
from clips import Clip, clips
from recordings import to_16khz
from scoring import error_rates
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from vocabulary import END_ID, NO_SPEECH_ID, START_ID

RATE, SAMPLES = 16000, 480000
LONG_SECONDS = (29.0, 30.0, 30.01, 61.0, 305.0)
FALLBACK = {
    "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
    "condition_on_prev_tokens": True,
}
"""The published algorithm's settings; 1.35 is 2.4 for tokens instead of letters, as in transformers' documentation."""


class Recording(NamedTuple):
    """Audio float32 at 16 kHz; each sentence's text, start and end in seconds; each word's likewise."""

    audio: np.ndarray
    sentences: list[tuple[str, float, float]]
    words: list[tuple[str, float, float]]

    @property
    def text(self) -> str:
        """All that is said."""
        return " ".join(text for text, _, _ in self.sentences)


class Speaker:
    """Makes recordings of held-out clips."""

    def __init__(self, processor: WhisperProcessor, seed: str, heldout: bool = True) -> None:
        self._source: Iterator[Clip] = clips(seed, processor.tokenizer.backend_tokenizer, heldout)
        self._rng = np.random.default_rng(0)

    def single(self) -> Recording:
        """One sentence after a short silence."""
        return self._join([next(self._source)], [int(self._rng.integers(0, 50))])

    def long(self, seconds: float) -> Recording:
        """Sentences with pauses, and silence at the end, so long to the sample."""
        room, taken, gaps = int(seconds * 50) - 5, [], []
        for clip in self._source:
            gap = int(self._rng.integers(10, 60))
            room -= gap + clip.ticks
            if room < 0:
                break
            taken.append(clip)
            gaps.append(gap)
        recording = self._join(taken, gaps)
        missing = round(seconds * RATE) - len(recording.audio)
        return recording._replace(audio=np.pad(recording.audio, (0, missing)))

    def _join(self, taken: list[Clip], gaps: list[int]) -> Recording:
        parts, said, words, now = [], [], [], 0
        for clip, gap in zip(taken, gaps, strict=True):
            now += gap
            parts += [
                np.zeros(gap * TICK_SAMPLES, np.float32),
                to_16khz(clip.audio).astype(np.float32) / 32768,
            ]
            said.append((clip.text, now * 0.02, (now + clip.ticks) * 0.02))
            for word, (start, end) in zip(clip.text.split(), clip.word_spans, strict=True):
                words.append((word, (now + start) * 0.02, (now + end) * 0.02))
            now += clip.ticks
        return Recording(np.concatenate(parts), said, words)


def with_noise(recording: Recording, decibels: float, seed: int) -> Recording:
    """White noise so far below the speech."""
    rng = np.random.default_rng(seed)
    level = np.sqrt(np.square(recording.audio).mean()) * 10 ** (-decibels / 20)
    noise = rng.standard_normal(len(recording.audio)).astype(np.float32) * level
    return recording._replace(audio=recording.audio + noise)


class Evaluation:
    """A loaded checkpoint and the ways of asking it."""

    def __init__(self, folder: Path, dtype: torch.dtype, batch_size: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype, self.batch_size = dtype, batch_size
        self.processor = WhisperProcessor.from_pretrained(folder)
        self.model = (
            WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(self.device).eval()
        )

    def features(self, audios: list[np.ndarray], long: bool = False) -> dict[str, torch.Tensor]:
        """Inputs of `generate`, padded to 30 s or to the longest."""
        options: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
        batch = self.processor(
            audios,
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
            device=str(self.device),
            **options,
        )
        return {
            "input_features": batch["input_features"].to(self.device, self.dtype),
            "attention_mask": batch["attention_mask"].to(self.device),
        }

    @torch.inference_mode()
    def generate(self, recordings: list[Recording], long: bool = False, **options: Any) -> list[Any]:
        """Results of `generate`, one for each recording."""
        results = []
        for start in range(0, len(recordings), self.batch_size):
            batch = recordings[start : start + self.batch_size]
            inputs = self.features([recording.audio for recording in batch], long)
            out = self.model.generate(**inputs, **options)
            results += out["segments"] if isinstance(out, dict) else list(out)
        return results

    def texts(self, recordings: list[Recording], long: bool = False, **options: Any) -> list[str]:
        """What is said in each."""
        decode = self.processor.tokenizer.decode
        found = self.generate(recordings, long, **options)
        return [decode(ids.tolist(), skip_special_tokens=True).strip() for ids in found]

    def errors(self, recordings: list[Recording], long: bool = False, **options: Any) -> dict[str, Any]:
        """Error rates, and the first wrong ones."""
        texts = self.texts(recordings, long, **options)
        pairs = [(recording.text, text) for recording, text in zip(recordings, texts, strict=True)]
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        return error_rates(pairs) | {"wrong": [[a[:200], b[:200]] for a, b in wrong[:4]]}

    @torch.inference_mode()
    def no_speech(self, audios: list[np.ndarray]) -> list[float]:
        """Probability of no speech in windows."""
        probabilities: list[float] = []
        for start in range(0, len(audios), self.batch_size):
            inputs = self.features(audios[start : start + self.batch_size])
            ids = torch.full((len(inputs["input_features"]), 1), START_ID, device=self.device)
            logits = self.model(input_features=inputs["input_features"], decoder_input_ids=ids).logits
            probabilities += logits[:, 0].float().softmax(1)[:, NO_SPEECH_ID].tolist()
        return probabilities


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
    """Words of a transcript with their times: a token's time is its end, so a word starts at the one before."""
    words: list[tuple[str, float, float]] = []
    for segment in segments:
        times, before = segment["token_timestamps"].tolist(), float(segment["start"])
        for token, time_ in zip(segment["tokens"].tolist(), times, strict=True):
            if token < END_ID:
                text = tokenizer.decode([token])
                if text.startswith(" ") or not words:
                    words.append((text.strip(), before, time_))
                else:
                    words[-1] = (words[-1][0] + text, words[-1][1], time_)
            before = time_
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
    heads.sort(key=lambda head: measured[str([head])]["start"]["mean"])
    for count in (2, 3):
        measured[str(heads[:count])] = _measure_heads(evaluation, recordings, heads[:count])
    best = min(measured, key=lambda name: measured[name]["start"]["mean"])
    model.generation_config.alignment_heads = json.loads(best)
    return {"alignment_heads": json.loads(best), "measured": measured}


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


def evaluate(evaluation: Evaluation, count: int, long_count: int) -> dict[str, Any]:
    """All figures."""
    report: dict[str, Any] = {"wer": {}, "long": {}}
    speaker = Speaker(evaluation.processor, "evaluation")
    singles = [speaker.single() for _ in range(count)]
    windows = [speaker.long(float(seconds)) for seconds in np.linspace(8, 29.5, max(2, count // 8))]
    known = Speaker(evaluation.processor, "evaluation of known voices", heldout=False)

    def note(name: str, value: Any, part: str | None = None) -> None:
        (report[part] if part else report)[name] = value
        print(name, json.dumps(value)[:1200], flush=True)

    sets = {
        "one sentence": (singles, {}),
        "one sentence, timestamps": (singles, {"return_timestamps": True}),
        "noise 20 dB below": ([with_noise(r, 20, i) for i, r in enumerate(singles)], {}),
        "noise 10 dB below": ([with_noise(r, 10, i) for i, r in enumerate(singles)], {}),
        "known voices and sentences": ([known.single() for _ in range(count)], {}),
        "full window": (windows, {}),
        "full window, timestamps": (windows, {"return_timestamps": True}),
    }
    for name, (recordings, options) in sets.items():
        note(name, evaluation.errors(recordings, **options), "wer")
    segments = evaluation.generate(windows, return_timestamps=True, return_segments=True)
    note("segments", segment_times(windows, segments))
    quiet = {name: evaluation.no_speech(audios) for name, audios in noises().items()}
    speech = evaluation.no_speech([r.audio for r in singles + windows])
    note("no_speech", {"speech": [round(max(speech), 6)]} | {k: [round(min(v), 4)] for k, v in quiet.items()})
    empty = [Recording(audio, [], []) for audios in noises().values() for audio in audios]
    note("said_in_silence", [text for text in evaluation.texts(empty, return_timestamps=True) if text])
    for seconds in LONG_SECONDS:
        files = [
            speaker.long(seconds) for _ in range(max(1, long_count if seconds < 100 else long_count // 4))
        ]
        note(str(seconds), evaluation.errors(files, True, return_timestamps=True), "long")
        if seconds == 61.0:
            result = evaluation.errors(files, True, return_timestamps=True, **FALLBACK)
            note("61.0, with fallback and previous text", result, "long")
    note(
        "alignment", choose_heads(evaluation, singles[: max(8, count // 8)] + windows[: max(2, count // 32)])
    )
    return report


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
    parser.add_argument("--out", type=Path, help="default: eval.json in the checkpoint's folder")
    args = parser.parse_args()
    started = time.perf_counter()
    evaluation = Evaluation(args.checkpoint, getattr(torch, args.dtype), args.batch_size)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if evaluation.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
    }
    report |= evaluate(evaluation, args.count, args.long_count)
    report["seconds"] = round(time.perf_counter() - started, 1)
    (args.out or args.checkpoint / "eval.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.heads:
        path = args.checkpoint / "generation_config.json"
        config = json.loads(path.read_text()) | {"alignment_heads": report["alignment"]["alignment_heads"]}
        path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
