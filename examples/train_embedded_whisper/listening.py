"""Recordings of held-out speech, and a checkpoint that is asked what it hears, through transformers' generation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from clip_pool import TICK_SAMPLES
from clips import Clip, clips
from recordings import to_16khz
from scoring import error_rates
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from vocabulary import NO_SPEECH_ID, START_ID

RATE, SAMPLES = 16000, 480000


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

    def apart(self, seconds: float) -> Recording:
        """Sentences that begin late or stand far apart, silences up to 25 s before and between them."""
        room, taken, gaps = int(seconds * 50) - 5, [], []
        for clip in self._source:
            most = 1250 if not taken or self._rng.random() < 0.5 else 60
            gap = int(self._rng.integers(10, most if taken else min(most, room - clip.ticks)))
            room -= gap + clip.ticks
            if room < 0:
                break
            taken.append(clip)
            gaps.append(gap)
        return self._join(taken, gaps)

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


def with_noisy_silences(recording: Recording, level: float, seed: int) -> Recording:
    """White noise of a root mean square, full scale being 1, in 30 s wherever nobody speaks."""
    noise = np.random.default_rng(seed).standard_normal(SAMPLES).astype(np.float32) * level
    for _, start, end in recording.sentences:
        noise[round(start * RATE) : round(end * RATE)] = 0
    audio = np.pad(recording.audio, (0, SAMPLES - len(recording.audio)))
    return recording._replace(audio=audio + noise)


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
