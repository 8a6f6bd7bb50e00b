"""Audio in, transcripts out: files are read beside the steps, and the model's own programs do the rest."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import fields as fields_of
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from core_runner.errors import CoreRunnerError, RequestError
from core_runner.programs import ProgramEnd
from model_states import ModelState
from model_states.speech import Transcript, TranscriptionOptions
from model_states.tasks import TRANSCRIPTION, Program, Transcriber

if TYPE_CHECKING:
    import torch

    from core_runner.audio import AudioPool, Samples

    Load = Callable[[Any, int], Samples]

OnBadAudio = Literal["raise", "return"]
# progress(done, total), seconds of audio.
AudioProgress = Callable[[float, float], None]
RunPrograms = Callable[[Iterator[Program], Callable[[], None]], Generator[ProgramEnd, None, None]]

_FORMS = "float samples (1-D array or tensor), path, bytes or binary file"
# 30 dB over full scale, which no sound reaches: larger numbers are integer samples that were never divided.
_LOUDEST = 32.0
_PART = 1 << 17  # samples


def as_many_audios(audio: Any) -> list[Any]:
    """One audio or several, as a list. A mapping, which is no form of audio, counts as one, not as its keys."""
    if _is_source(audio) or _is_array(audio) or isinstance(audio, Mapping):
        return [audio]
    try:
        return list(audio)
    except TypeError as error:
        raise RequestError(f"audio={audio!r} must be one or many of {_FORMS}") from error


def as_options(options: TranscriptionOptions | None, fields: dict[str, Any]) -> TranscriptionOptions:
    """An options object, or one of keyword options; `RequestError` for both, and for what cannot be."""
    if options is not None and fields:
        raise RequestError(f"give options, or {', '.join(fields)}, and not both")
    if options is not None and not isinstance(options, TranscriptionOptions):
        raise RequestError(f"options={options!r} must be TranscriptionOptions")
    known = [field.name for field in fields_of(TranscriptionOptions)]
    for name in fields.keys() - known:
        raise RequestError(f"transcription options: there is no {name!r}; there are {', '.join(known)}")
    try:
        return options or TranscriptionOptions(**fields)
    except (TypeError, ValueError) as error:
        raise RequestError(f"transcription options: {error}") from error


def transcriber_of(state: ModelState) -> Transcriber:
    """What the model state offers; `RequestError` where that is no transcription."""
    tasks = state.tasks()
    if TRANSCRIPTION not in tasks:
        model = state.config.checkpoint.model
        raise RequestError(
            f"model {model!r} offers no transcription (model state {state.name!r}); load a speech model"
        )
    transcriber: Transcriber = tasks[TRANSCRIPTION]
    return transcriber


def audio_pool(device: torch.device) -> AudioPool:
    """What reads files for a model on `device`."""
    from core_runner.audio import AudioPool
    from model_states.staged_rows import host_array  # brings torch

    return AudioPool(allocate=partial(host_array, device=device))


class Transcription:
    """One call: its audios, how far each of them is, and the programs that transcribe them.

    Every audio is read when its turn comes, so a list may be longer than memory.
    """

    def __init__(
        self,
        audio: Any,
        transcriber: Transcriber,
        options: TranscriptionOptions,
        tokenizer: Any,
        progress: AudioProgress | None,
        files: AudioPool,
    ) -> None:
        """audio: one or many. tokenizer: transformers'. files: what reads them.

        Raises `RequestError` for what is no audio, and for options that the model cannot serve.
        """
        self._audios, self._transcriber, self._options = as_many_audios(audio), transcriber, options
        self._tokenizer, self._progress, self._files = tokenizer, progress, files
        self._durations = [0.0] * len(self._audios)
        self._done = [0.0] * len(self._audios)
        self._shown: tuple[float, float] | None = None
        try:  # what it refuses, it refuses before it begins
            self._begin(0, np.zeros(0, dtype=np.float32)).close()
        except ValueError as error:
            raise RequestError(f"transcription options: {error}") from error

    def run(
        self, run_programs: RunPrograms, on_bad_audio: OnBadAudio
    ) -> Generator[tuple[int, Transcript], None, None]:
        """Place and transcript of each audio, as it is done. Closing gives up the rest."""
        if on_bad_audio not in get_args(OnBadAudio):
            raise RequestError(f"on_bad_audio={on_bad_audio!r} is not one of 'raise', 'return'")
        return self._run(run_programs, on_bad_audio)

    def _run(
        self, run_programs: RunPrograms, on_bad_audio: OnBadAudio
    ) -> Generator[tuple[int, Transcript], None, None]:
        programs = (self._transcribe(index) for index in range(len(self._audios)))
        # The readers are closed first: programs that are given up would wait for what they are in the middle of.
        with (
            closing(run_programs(programs, self._show_progress)) as ends,
            self._files.reader(len(self._audios)) as self._reader,
        ):
            for end in ends:
                self._done[end.index] = self._durations[end.index]
                yield end.index, self._result(end, on_bad_audio)
            self._show_progress()

    def _result(self, end: ProgramEnd, on_bad_audio: OnBadAudio) -> Transcript:
        if end.error is None:
            assert isinstance(end.result, Transcript)
            return end.result
        if on_bad_audio == "raise":
            raise end.error
        duration = self._durations[end.index]
        return Transcript(text="", language=None, duration=duration, segments=(), error=_explain(end.error))

    def _transcribe(self, index: int) -> Program:
        audio, rate = self._audios[index], self._transcriber.sampling_rate
        if _is_array(audio) and hasattr(audio, "detach"):
            # numpy has no bfloat16.
            audio = (audio.float() if audio.is_floating_point() else audio).detach().cpu()
        (samples,) = yield [partial(_read, audio, rate, self._reader.load, f"audio {index}")]
        self._durations[index] = duration = len(samples) / rate
        if not len(samples):
            return Transcript(text="", language=None, duration=duration, segments=())
        program = self._begin(index, samples)
        del samples  # theirs now: who needs them no more lets go of them
        (transcript,) = yield [program]
        return transcript

    def _begin(self, index: int, samples: Samples) -> Program:
        note = partial(self._note, index)
        return self._transcriber.transcribe(samples, self._options, self._tokenizer, note)

    def _note(self, index: int, done: float) -> None:
        self._done[index] = done

    def _show_progress(self) -> None:
        state = sum(self._done), sum(self._durations)
        if self._progress is not None and state != self._shown:
            self._shown = state
            self._progress(*state)


def _read(audio: Any, sampling_rate: int, load: Load, name: str) -> Samples:
    """Samples float32 [n] of an array or host tensor of floats, or of whatever `load` takes."""
    if _is_source(audio):
        return load(audio, sampling_rate)
    if not _is_array(audio):
        raise RequestError(f"{name} is of type {type(audio).__name__} and must be {_FORMS}")
    array = np.asarray(audio)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise RequestError(
            f"{name} has shape {list(array.shape)} and type {array.dtype}, and must be floats in one dimension, in "
            "[-1, 1]: mix channels down, and divide 16-bit samples by 32768"
        )
    with np.errstate(over="ignore"):
        samples = array.astype(np.float32, copy=False)
    peak = _peak(samples)
    if not np.isfinite(peak):
        raise RequestError(f"{name} holds values that are not finite; give numbers only")
    if peak > _LOUDEST:
        raise RequestError(
            f"{name} holds samples of up to {peak:.6g}, and must be in [-1, 1]: divide 16-bit samples by 32768"
        )
    return samples


def _peak(samples: Samples) -> float:
    """Largest absolute value, 0 without any, NaN where one is."""
    # In parts that stay in a cache between the two passes over them.
    parts = (samples[first : first + _PART] for first in range(0, len(samples), _PART))
    return float(np.max([max(part.max(), -part.min()) for part in parts], initial=0.0))


def _is_source(audio: Any) -> bool:
    """A path, bytes or a file, for `load_audio` to read."""
    in_memory = isinstance(audio, str | bytes | bytearray | memoryview)
    return in_memory or hasattr(audio, "read") or hasattr(audio, "__fspath__")


def _is_array(audio: Any) -> bool:
    """Of numpy or torch."""
    return hasattr(audio, "dtype")


def _explain(error: Exception) -> str:
    return str(error) if isinstance(error, CoreRunnerError) else f"{type(error).__name__}: {error}"
