"""The two recordings that ship with the model: held-out sentences in held-out voices, as 16 kHz mono WAV files."""

import json
import sys
import wave
from pathlib import Path

import numpy as np
import torch
from clip_pool import resample
from sentences import Sentence, sentences
from voices import TICK, Voice, load_espeak

GAP = 15  # ticks between two sentences

RECORDINGS: dict[str, tuple[Voice, tuple[str, ...]]] = {
    "alarm.wav": (Voice("en-us", "linda", rate=150, pitch=55), ("Wake me up at ",)),
    "lights.wav": (Voice("en-gb-x-rp", "m6", rate=165, pitch=45), ("Turn on the ", "Thank you, ")),
}
"""File name -> voice, and how its sentences begin; the first ones of the held-out stream that do are spoken."""


def find(beginning: str) -> Sentence:
    """The first held-out sentence that begins so."""
    return next(
        sentence for sentence in sentences("recordings", heldout=True) if sentence.text.startswith(beginning)
    )


def to_16khz(audio: np.ndarray) -> np.ndarray:
    """int16 samples at espeak's rate to int16 at 16 kHz."""
    padded = np.pad(audio, (0, -len(audio) % TICK))
    return resample(torch.from_numpy(padded)).numpy()


def record(name: str) -> tuple[np.ndarray, str]:
    """Samples at 16 kHz and the text of a recording."""
    voice, beginnings = RECORDINGS[name]
    gap = np.zeros(GAP * TICK, np.int16)
    parts, texts = [gap], []
    for sentence in map(find, beginnings):
        parts += [load_espeak().say(sentence, voice).audio, gap]
        texts.append(sentence.text)
    return to_16khz(np.concatenate(parts)), " ".join(texts)


def write_recordings(folder: Path) -> dict[str, str]:
    """Write the files, and recordings.json with what is said in each."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    for name in RECORDINGS:
        samples, texts[name] = record(name)
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.astype("<i2").tobytes())
    (folder / "recordings.json").write_text(json.dumps(texts, indent=1) + "\n")
    return texts


if __name__ == "__main__":
    print(write_recordings(Path(sys.argv[1])))
