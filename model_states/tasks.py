"""Tasks: what a model does that takes more than one completion, written as programs of requests.

A program is a generator. It yields what it waits for: requests, other programs, and functions, all of which run at the
same time, the requests in one continuous batch with everybody's. It is sent their results, in that order, and returns a
result of its own. So the plugin says what depends on what, and the core owns requests, batches and aborts as for any
other.

It goes on between two steps: it may look at what the model keeps and ask the device for something, and everybody waits
while it does not yield. Where one of what it waits for fails, the others are given up, and the error is raised in the
program at its `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from model_states.speech import Transcript, TranscriptionOptions

# Names under which `ModelState.tasks` may offer a task, and what the core expects there.
TRANSCRIPTION: Final = "transcription"  # a `Transcriber`


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """One completion that a program wants.

    params: names and values of `core_runner.SamplingParams`. model_inputs: as `RequestInputs.model_inputs`.
    """

    prompt_token_ids: Sequence[int]
    params: Mapping[str, Any]
    model_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """What came of a `TaskRequest`.

    token_ids: what was sampled, with the token that ended it, if any. finish_reason: "stop", "length" or "error".
    logprobs: of each sampled token, natural logarithm, in the mode that the params ask for; empty if they ask for none.
    error: why a request with finish reason "error" ended.
    """

    token_ids: Sequence[int]
    finish_reason: str
    logprobs: Sequence[float] = ()
    error: str | None = None


# Yields what it waits for, is sent the results in that order, and returns its own. The result of a `TaskRequest` is a
# `TaskOutput`, that of a program whatever it returned. A function without arguments is run by a thread beside the
# steps, for work of the host that would hold them up; it must not use the device. The program itself goes on between
# two steps, and may use the device and what the model keeps.
Program = Generator[Sequence[Any], Sequence[Any], Any]


class Transcriber(Protocol):
    """The task "transcription"."""

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the audio that `transcribe` takes."""
        ...

    def transcribe(
        self,
        audio: npt.NDArray[np.float32],
        options: TranscriptionOptions,
        tokenizer: Any,
        progress: Callable[[float], None],
    ) -> Generator[Sequence[Any], Sequence[Any], Transcript]:
        """A program whose result is the transcript of mono samples in [-1, 1], of any length.

        tokenizer: transformers' tokenizer of the model. progress: told the seconds of audio that are done, never less
        than before. Raises `ValueError`, saying how to fix it, for options that the model cannot serve, when it is
        called and not when it is run.
        """
        ...
