"""Windows of speech that are not all there at the start: arriving at a rate, read from files, or of recordings."""

from __future__ import annotations

import itertools
import tempfile
import time
import wave
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from common import greedy
from tokenizers import Tokenizer as Tokens
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from core_runner import LLM
from core_runner.audio.pool import AudioReader
from core_runner.request import Request
from core_runner.text import Tokenizer
from model_states.tasks import Program, TaskRequest

FILE_RATE = 44100  # samples a second of the files


class GoingOn:
    """Windows that come and leave for a while.

    count: of the windows of a run. ends: of the last run's windows, seconds since it began.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.ends: list[float] = []

    def middle_seconds(self) -> float:
        """Between the end of the first quarter of the windows and that of the third, in the last run."""
        quarter = len(self.ends) // 4
        return self.ends[quarter + len(self.ends) // 2 - 1] - self.ends[quarter - 1]


class ArrivingWindows(GoingOn):
    """Windows that are added one by one at a steady rate, as a server would, while the engine steps.

    latencies: of the last run's windows, seconds since their arrival.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Mapping[str, Any]], num_tokens: int, count: int, rate: float
    ) -> None:
        """prompts: taken in turn. rate: windows a second."""
        self._engine, self._prompts, self._num_tokens = llm.engine, prompts, num_tokens
        super().__init__(count)
        self._rate = rate
        self.latencies: list[float] = []

    def run(self, count: int) -> tuple[int, int]:
        """Windows and tokens, once the last one is done."""
        engine, started, num_added, num_tokens = self._engine, time.perf_counter(), 0, 0
        prompts = islice(cycle(self._prompts), count)
        self.ends, self.latencies = [], []
        while num_added < count or engine.has_unfinished:
            now = time.perf_counter() - started
            for prompt in islice(prompts, max(int(now * self._rate) + 1 - num_added, 0)):
                request = Request(
                    str(num_added), prompt["prompt_token_ids"], greedy(self._num_tokens), seed=0
                )
                request.model_inputs = prompt["model_inputs"]
                engine.add_request(request)
                num_added += 1
            if not engine.has_unfinished:
                time.sleep(max(num_added / self._rate - now, 0.0))
                continue
            for update in engine.step():
                num_tokens += len(update.new_token_ids)
                if update.finish_reason is not None:
                    self._note_end(int(update.request.req_id), time.perf_counter() - started)
        engine.settle()
        return count, num_tokens

    def _note_end(self, index: int, seconds: float) -> None:
        self.ends.append(seconds)
        self.latencies.append(seconds - index / self._rate)


class WavFiles(GoingOn):
    """Stereo WAV files of one window of noise each, in a temporary directory, as programs that read and decode them."""

    def __init__(self, llm: LLM, prompt: Sequence[int], num_tokens: int, num_files: int, count: int) -> None:
        """num_files: taken in turn."""
        super().__init__(count)
        state: Any = llm.engine.runner.model_state
        features = state.encoder.features
        self._llm, self._prompt, self._num_tokens = llm, prompt, num_tokens
        self._num_samples, self._rate = features.num_samples, features.sampling_rate
        self._numbers = itertools.count()
        self._directory = tempfile.TemporaryDirectory()
        frames = -(-self._num_samples * FILE_RATE // self._rate)
        noise = np.random.default_rng(0).normal(0.0, 3000.0, (frames, 2)).astype("<i2")
        self._paths = [self._write(index, np.roll(noise, 997 * index, 0)) for index in range(num_files)]

    def run(self, count: int) -> tuple[int, int]:
        """Windows and tokens, once the last one is done."""
        self.ends, num_tokens, started = [], 0, time.perf_counter()
        with self._llm.audio_files.reader(count) as reader:
            programs = (self._transcribe(reader, path) for path in islice(cycle(self._paths), count))
            for end in self._llm.run(programs):
                if end.error is not None:
                    raise end.error
                self.ends.append(time.perf_counter() - started)
                num_tokens += end.result
        return len(self.ends), num_tokens

    def _transcribe(self, reader: AudioReader, path: Path) -> Program:
        (loaded,) = yield [partial(reader.load, path, self._rate)]
        # A name for each window, as `LLM.transcribe` gives one: equal content would be encoded once.
        inputs = {"audio": loaded[: self._num_samples], "key": f"{path}/{next(self._numbers)}"}
        params = {"temperature": 0.0, "max_tokens": self._num_tokens, "ignore_eos": True}
        (output,) = yield [TaskRequest(self._prompt, params, inputs)]
        return len(output.token_ids)

    def _write(self, index: int, samples: np.ndarray) -> Path:
        return write_wav(Path(self._directory.name, f"{index}.wav"), samples, FILE_RATE)

    def __enter__(self) -> WavFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._directory.cleanup()


class Recordings:
    """Speech-like noise that `LLM.transcribe` is given, with timestamp rules and log-probabilities, as users run it.

    Loud for three seconds, quiet for a half, in turn, so that cuts are found. Random weights rarely end a text, so a
    window says as many tokens as the model's positions allow; whatever they say is accepted at the first temperature.
    What follows the last timestamp of a window is decoded as another one, so windows are counted by what is encoded.
    """

    def __init__(self, llm: LLM, count: int) -> None:
        """count: windows of audio in all."""
        state: Any = llm.engine.runner.model_state
        features, self._runs = state.encoder.features, state.cross_attention.runs
        self._llm, self._count, self._rate = llm, count, features.sampling_rate
        self._window = features.num_samples
        ids = {f" {number}": number for number in range(state.vocab_size)}
        words = Tokens(WordLevel(ids, unk_token=" 0"))
        llm.tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
        noise = np.random.default_rng(0).standard_normal(7 * self._rate, dtype=np.float32)
        noise *= np.where(np.arange(len(noise)) / self._rate % 3.5 < 3.0, 0.1, 0.001)
        self._samples = np.resize(noise, count * self._window)
        self._directory = tempfile.TemporaryDirectory()

    def arrays(self) -> tuple[int, int]:
        """Windows and tokens of a recording for each window, as samples."""
        return self._transcribe(self._parts())

    def files(self) -> tuple[int, int]:
        """Windows and tokens of a WAV file for each window, mono and at the model's rate, read by every run."""
        paths = [Path(self._directory.name, f"{index}.wav") for index in range(self._count)]
        for path, part in zip(paths, self._parts(), strict=True):
            if not path.exists():
                write_wav(path, (part * 32767).astype("<i2")[:, None], self._rate)
        return self._transcribe(paths)

    def long(self) -> tuple[int, int]:
        """Windows and tokens of one recording as long as all windows, cut at quiet points, all decoded at once."""
        return self._transcribe(self._samples, windows="parallel")

    def _parts(self) -> list[np.ndarray]:
        return [self._samples[i * self._window :][: self._window] for i in range(self._count)]

    def _transcribe(self, audio: Any, **options: Any) -> tuple[int, int]:
        windows, tokens = self._runs.num_encoded, self._llm.stats().generated_tokens
        self._llm.transcribe(audio, language="en", temperatures=0.0, **options)
        return self._runs.num_encoded - windows, self._llm.stats().generated_tokens - tokens

    def __enter__(self) -> Recordings:
        return self

    def __exit__(self, *exception: object) -> None:
        self._directory.cleanup()


def write_wav(path: Path, samples: np.ndarray, rate: int) -> Path:
    """Samples int16 [n, channels] as a WAV file; gives its path."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path
