"""What `transcribe` reads: files, directories of them, stdin; and where each one's transcript goes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from core_runner.errors import RequestError

if TYPE_CHECKING:
    from core_runner.audio import Source


@dataclass(frozen=True, slots=True)
class Recording:
    """One audio to transcribe.

    name: as messages show it. place: its path below an output directory, suffix and all. target: the file that its
    transcript goes to, None for stdout.
    """

    name: str
    place: Path
    target: Path | None = None

    @property
    def source(self) -> Source:
        """What is read."""
        return sys.stdin.buffer if self.name == "-" else self.name


def find_recordings(arguments: Sequence[str]) -> list[Recording]:
    """The files of the command line in its order, those of a directory sorted, at any depth."""
    if list(arguments).count("-") > 1:
        raise click.UsageError("'-' is given more than once, and stdin can be read once only.")
    found: list[Recording] = []
    for argument in arguments:
        if argument == "-":
            found.append(Recording("-", Path("stdin")))
        elif os.path.isdir(argument):
            found += _of_directory(Path(argument))
        else:
            found.append(Recording(argument, Path(Path(argument).name)))
    return found


def _of_directory(directory: Path) -> list[Recording]:
    from core_runner.audio import AUDIO_SUFFIXES

    found = sorted(path for path in _visible_files(directory) if path.suffix.lower() in AUDIO_SUFFIXES)
    if not found:
        raise click.UsageError(
            f"The directory {directory} has no file that is called like audio, such as .wav or .mp3; name the files."
        )
    return [Recording(str(path), path.relative_to(directory)) for path in found]


def _visible_files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def with_targets(
    recordings: Sequence[Recording], output: str | None, suffix: str, *, as_directory: bool
) -> list[Recording]:
    """The same recordings with the files that `--output` has their transcripts in.

    as_directory: also where `output` does not exist yet. A name takes the suffix of its format for its own, and keeps
    its own too where two would be the same ("a.wav.srt"). Raises `RequestError` where they still are, and for a
    transcript that would replace its audio.
    """
    if output in (None, "-"):
        return list(recordings)
    if not (as_directory or output.endswith(os.sep) or os.path.isdir(output)):
        return _checked([replace(recording, target=Path(output)) for recording in recordings])
    if os.path.exists(output) and not os.path.isdir(output):
        raise RequestError(f"--output {output} is a file, and several transcripts need a directory")
    if Path(output).suffix.lower() == suffix and not (output.endswith(os.sep) or os.path.isdir(output)):
        raise RequestError(
            f"--output {output} is called like a file, and several transcripts need a directory; end its name in /"
        )
    short = [recording.place.with_suffix(suffix) for recording in recordings]
    uses = Counter(short)
    places = [
        place if uses[place] == 1 else recording.place.with_name(recording.place.name + suffix)
        for place, recording in zip(short, recordings, strict=True)
    ]
    return _checked(
        [replace(r, target=Path(output, place)) for r, place in zip(recordings, places, strict=True)]
    )


def _checked(recordings: list[Recording]) -> list[Recording]:
    first: dict[Path | None, str] = {}
    for recording in recordings:
        assert recording.target is not None
        other = first.setdefault(recording.target, recording.name)
        if other is not recording.name:
            raise RequestError(
                f"{other} and {recording.name} would both be written to {recording.target}; run them one by one"
            )
        if recording.target.exists() and recording.name != "-" and recording.target.samefile(recording.name):
            raise RequestError(f"--output {recording.target} is the audio itself; name another output")
    return recordings


def skip_written(recordings: Sequence[Recording], *, resume: bool, overwrite: bool) -> list[Recording]:
    """Those whose transcripts have to be written.

    A file is there as a whole or not at all, so `resume` leaves out what exists. Without it and without `overwrite` an
    existing one is a `RequestError`, as is one that could not be written.
    """
    todo = []
    for recording in recordings:
        exists = recording.target is not None and recording.target.exists()
        if exists and not (resume or overwrite):
            raise RequestError(
                f"{recording.target} exists already; --resume leaves out what does, --overwrite replaces it"
            )
        if not (exists and resume):
            todo.append(recording)
    _require_writable(todo)
    return todo


def _require_writable(recordings: Sequence[Recording]) -> None:
    """Before the model is loaded. Directories of an output directory are made when something comes into them."""
    for recording in recordings:
        if recording.target is not None:
            folder = next(path for path in recording.target.absolute().parents if path.exists())
            if not folder.is_dir():
                raise RequestError(f"--output {recording.target}: {folder} is no directory")
            if not os.access(folder, os.W_OK):
                raise RequestError(f"--output {recording.target}: no permission to write in {folder}")
