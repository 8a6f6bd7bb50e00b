"""Where transcripts go: each into a file of its own as soon as it is there, or to stdout in order."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import click

from core_runner.cli.recordings import Recording
from core_runner.cli.text import for_terminal
from core_runner.transcripts import FORMATS, to_object
from model_states.speech import Transcript


class TranscriptOutput:
    """Takes what became of each recording, in any order.

    Entered while it is used; leaving it, also by an exception, completes what is on stdout.
    """

    def __init__(self, recordings: Sequence[Recording], format_name: str, *, as_list: bool) -> None:
        """as_list: on stdout, JSON is a list and texts have headings."""
        self._recordings, self._format, self._as_list = recordings, format_name, as_list
        self._to_stdout = any(recording.target is None for recording in recordings)
        self.to_terminal = self._to_stdout and sys.stdout.isatty()
        self._waiting: dict[int, Transcript] = {}
        self._turn = self._num_shown = 0

    def __enter__(self) -> TranscriptOutput:
        if self._to_stdout and hasattr(sys.stdout, "reconfigure"):
            # A terminal that is not UTF-8 shows a question mark rather than ending the run.
            sys.stdout.reconfigure(errors="replace")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_json_list = self._to_stdout and self._as_list and self._format == "json"
        if is_json_list and not isinstance(error, BrokenPipeError):
            sys.stdout.write("\n]\n" if self._num_shown else "[]\n")
            sys.stdout.flush()

    def put(self, index: int, transcript: Transcript) -> None:
        """Write what can be written now, or say on stderr why there is nothing to write."""
        recording = self._recordings[index]
        if transcript.error is not None:
            # The error of a file that cannot be read names it already.
            named = "" if recording.name in transcript.error else f"{recording.name}: "
            click.echo(f"error: {named}{transcript.error}", err=True)
        elif recording.target is not None:
            _write_file(recording.target, self._render(recording, transcript) + self._end)
        self._waiting[index] = transcript
        while self._to_stdout and self._turn in self._waiting:
            self._show(self._recordings[self._turn], self._waiting.pop(self._turn))
            self._turn += 1

    @property
    def _end(self) -> str:
        return "\n" if self._format == "json" else ""

    def _render(self, recording: Recording, transcript: Transcript) -> str:
        if self._format == "json":
            return json.dumps({"file": recording.name, **to_object(transcript)}, ensure_ascii=False, indent=2)
        return FORMATS[self._format](transcript)

    def _show(self, recording: Recording, transcript: Transcript) -> None:
        if transcript.error is not None:
            return
        text = self._render(recording, transcript)
        if not self._as_list:
            text += self._end
        elif self._format == "json":
            text = (",\n" if self._num_shown else "[\n") + text
        else:
            text = ("\n" if self._num_shown else "") + f"==> {recording.name} <==\n{text}"
        self._num_shown += 1
        sys.stdout.write(for_terminal(text) if self.to_terminal else text)
        sys.stdout.flush()


def _write_file(path: Path, text: str) -> None:
    """At once: a run that is stopped leaves no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    # The name of a recording may be no UTF-8.
    part.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    part.replace(path)
