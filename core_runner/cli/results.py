"""The results file of a batch: one flushed line for each finished row, so that no stop loses one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from core_runner.cli.rows import RowId
from core_runner.errors import RequestError


class ResultsFile:
    """Appends rows to `path` while entered, or writes them to stdout where it is None or "-".

    A file that has rows already is refused unless `resume` keeps them or `overwrite` drops them; after a
    resume `done` holds their ids. What is wrong with the path is said at construction; the file changes only
    when it is entered, so that a model that does not load costs no results.
    """

    def __init__(self, path: str | None, *, resume: bool, overwrite: bool) -> None:
        self.done: set[RowId] = set()
        self.to_stdout = path is None or path == "-"
        self._path = Path(path or "-")
        self._file: BinaryIO = sys.stdout.buffer
        # Where whole rows end: a run that was killed may have left half a row.
        self._end = 0
        if self.to_stdout:
            if resume:
                raise RequestError("--resume needs --output FILE: what went to stdout cannot be read again")
            return
        _require_writable(self._path)
        if self._path.is_file() and self._path.stat().st_size > 0 and not overwrite:
            if not resume:
                raise RequestError(f"{path} has rows already; --resume continues it, --overwrite replaces it")
            self._read_done()

    def __enter__(self) -> ResultsFile:
        if not self.to_stdout:
            self._file = self._path.open("ab")
            if self._path.is_file():
                self._file.truncate(self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.to_stdout:
            self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; the system has it once this returns."""
        self._file.write(_encode(row) + b"\n")
        self._file.flush()

    def _read_done(self) -> None:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(line)["id"])
                except (ValueError, KeyError, TypeError) as error:
                    message = (
                        f"{self._path}, line {number}, is no result row; --resume continues such a file only"
                    )
                    raise RequestError(message) from error
                self._end += len(line)


def _require_writable(path: Path) -> None:
    target = path if path.exists() else path.absolute().parent
    if not target.exists():
        raise RequestError(f"--output {path}: the directory {target} does not exist; create it first")
    if not os.access(target, os.W_OK):
        raise RequestError(f"--output {path}: no permission to write there")


def _encode(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # An id may hold half of a surrogate pair, which JSON can escape and UTF-8 cannot hold.
        return json.dumps(row).encode()
