"""Windows of speech that are not all there at the start: arriving at a rate, or read from files."""

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

from core_runner import LLM
from core_runner.audio import AudioPool
from core_runner.request import Request
from model_states.tasks import Program, TaskRequest

FILE_RATE = 44100  # samples a second of the files


class ArrivingWindows:
    """Windows that are added one by one at a steady rate, as a server would, while the engine steps."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Mapping[str, Any]], num_tokens: int, count: int, rate: float
    ) -> None:
        """prompts: taken in turn, `count` times. rate: windows a second."""
        self._engine, self._prompts, self._num_tokens = llm.engine, prompts, num_tokens
        self._count, self._rate = count, rate

    def run(self) -> tuple[int, int]:
        """Windows and tokens, once the last one is done."""
        engine, started, num_added, num_tokens = self._engine, time.perf_counter(), 0, 0
        prompts = islice(cycle(self._prompts), self._count)
        while num_added < self._count or engine.has_unfinished:
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
            num_tokens += sum(len(update.new_token_ids) for update in engine.step())
        engine.settle()
        return self._count, num_tokens


class WavFiles:
    """Stereo WAV files of one window of noise each, in a temporary directory, as programs that read and decode them."""

    def __init__(self, llm: LLM, prompt: Sequence[int], num_tokens: int, num_files: int, count: int) -> None:
        """num_files: taken in turn, `count` times."""
        state: Any = llm.engine.runner.model_state
        features = state.encoder.features
        self._llm, self._prompt, self._num_tokens, self._count = llm, prompt, num_tokens, count
        self._num_samples, self._rate = features.num_samples, features.sampling_rate
        self._numbers = itertools.count()
        self._directory = tempfile.TemporaryDirectory()
        frames = -(-self._num_samples * FILE_RATE // self._rate)
        noise = np.random.default_rng(0).normal(0.0, 3000.0, (frames, 2)).astype("<i2")
        self._paths = [self._write(index, np.roll(noise, 997 * index, 0)) for index in range(num_files)]

    def run(self) -> tuple[int, int]:
        """Windows and tokens, once the last one is done; begins with no process to read with."""
        with AudioPool() as pool:
            programs = (self._transcribe(pool, path) for path in islice(cycle(self._paths), self._count))
            ends = list(self._llm.run(programs))
        for end in ends:
            if end.error is not None:
                raise end.error
        return len(ends), sum(end.result for end in ends)

    def _transcribe(self, pool: AudioPool, path: Path) -> Program:
        (loaded,) = yield [partial(pool.load, path, self._rate)]
        samples = loaded[: self._num_samples].copy()
        samples[0] = (
            next(self._numbers) * 2.0**-24
        )  # no two are equal, or the encoder would run once for both
        params = {"temperature": 0.0, "max_tokens": self._num_tokens, "ignore_eos": True}
        (output,) = yield [TaskRequest(self._prompt, params, {"audio": samples})]
        return len(output.token_ids)

    def _write(self, index: int, samples: np.ndarray) -> Path:
        path = Path(self._directory.name, f"{index}.wav")
        with wave.open(str(path), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(FILE_RATE)
            file.writeframes(samples.tobytes())
        return path

    def __enter__(self) -> WavFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._directory.cleanup()
