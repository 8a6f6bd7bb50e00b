"""Transcripts as files: text, JSON, subtitles (SRT, WebVTT) and tables (TSV).

Times are rounded to milliseconds. A cue is at least one long, since players drop those that end where they begin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from html import escape
from numbers import Integral, Real
from typing import Any, Final

from model_states.speech import Transcript


def to_text(transcript: Transcript) -> str:
    """A line for each segment."""
    return "".join(f"{line}\n" for _, _, line in _cues(transcript))


def to_json(transcript: Transcript) -> str:
    """One object on several lines; see `to_object`."""
    return json.dumps(to_object(transcript), ensure_ascii=False, indent=2) + "\n"


def to_object(transcript: Transcript) -> dict[str, Any]:
    """The fields of `Transcript`, `Segment` and `Word` for JSON; "words" and "error" only where there are any.

    What is no finite number is None: JSON has no other word for it.
    """
    fields = {name: _plain(value) for name, value in asdict(transcript).items()}
    for holder, name in ((fields, "error"), *((segment, "words") for segment in fields["segments"])):
        if holder[name] is None:
            del holder[name]
    return fields


def to_srt(transcript: Transcript) -> str:
    """SubRip: numbered cues, a comma before the milliseconds."""
    return "\n".join(
        # The format has no escapes, and an arrow would be taken for times.
        f"{number}\n{_clock(begin, ',')} --> {_clock(end, ',')}\n{line.replace('-->', '->')}\n"
        for number, (begin, end, line) in enumerate(_cues(transcript), 1)
    )


def to_vtt(transcript: Transcript) -> str:
    """WebVTT; `&`, `<` and `>` are escaped, and with that arrows too."""
    cues = (
        f"{_clock(begin, '.')} --> {_clock(end, '.')}\n{escape(line, quote=False)}\n"
        for begin, end, line in _cues(transcript)
    )
    return "\n".join(["WEBVTT\n", *cues])


def to_tsv(transcript: Transcript) -> str:
    """A table with the columns start, end (milliseconds) and text."""
    rows = (f"{begin}\t{end}\t{line}\n" for begin, end, line in _cues(transcript))
    return "".join(["start\tend\ttext\n", *rows])


FORMATS: Final[Mapping[str, Callable[[Transcript], str]]] = {
    "text": to_text,
    "json": to_json,
    "srt": to_srt,
    "vtt": to_vtt,
    "tsv": to_tsv,
}
SUFFIXES: Final[Mapping[str, str]] = {name: ".txt" if name == "text" else f".{name}" for name in FORMATS}


def _cues(transcript: Transcript) -> Iterator[tuple[int, int, str]]:
    """Begin and end in milliseconds, and text on one line: a line break would end a cue, and a tab a column."""
    for segment in transcript.segments:
        begin, end = (round(1000 * seconds) for seconds in (segment.start, segment.end))
        line = " ".join(segment.text.split())
        if line:
            yield begin, max(end, begin + 1), line


def _clock(milliseconds: int, point: str) -> str:
    seconds, thousandths = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{thousandths:03}"


def _plain(value: Any) -> Any:
    """Numbers as Python's own, floats to four places, sequences as lists, NaN and infinity as None."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return round(float(value), 4) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value]
