"""What is written can be read back, whatever the text holds."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest

from core_runner.transcripts import FORMATS, SUFFIXES, to_json, to_object, to_srt, to_text, to_tsv, to_vtt
from model_states.speech import Segment, Transcript, Word


def segment(start, end, text, **changes):
    fields = {
        "token_ids": [5, 6],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.125,
    }
    return Segment(start=start, end=end, text=text, **{**fields, **changes})


def transcript(*segments, duration=10_000.0):
    return Transcript(
        text="".join(one.text for one in segments), language="en", duration=duration, segments=segments
    )


NASTY = transcript(
    segment(0.0, 1.5, " Fish & chips <b>cost</b> 3 --> 5;"),
    segment(1.5, 1.5, " a\tcolumn, \"quotes\" and 'more'"),
    segment(1.5004, 1.5006, " two\nlines\n\nand\r\nan empty one"),
    segment(59.9996, 3599.9999, " café 👋🏽 你好 &amp; שלום"),
    segment(3600.0, 7325.25, "NOTE this is none"),
    segment(7325.25, 7326.0, " \n "),
    segment(9000.0, 9001.0, "42"),
)
SPOKEN = [" ".join(one.text.split()) for one in NASTY.segments if one.text.strip()]
TIMES_MS = [
    (0, 1500),
    (1500, 1501),
    (1500, 1501),
    (60_000, 3_600_000),
    (3_600_000, 7_325_250),
    (9_000_000, 9_001_000),
]
CLOCK = r"(\d\d):([0-5]\d):([0-5]\d)[.,](\d\d\d)"


def milliseconds(clock):
    hours, minutes, seconds, thousandths = map(int, re.fullmatch(CLOCK, clock).groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 1000 + thousandths


def parse_cues(text):
    """(times line, payload) of blocks that an empty line ends."""
    blocks = [block.splitlines() for block in re.split(r"\n\n+", text.rstrip("\n")) if block]
    for lines in blocks:
        (place,) = [index for index, line in enumerate(lines) if "-->" in line]
        begin, end = lines[place].split(" --> ")
        yield lines[:place], (milliseconds(begin), milliseconds(end)), "\n".join(lines[place + 1 :])


def test_srt_reads_back():
    cues = list(parse_cues(to_srt(NASTY)))
    assert [heading for heading, _, _ in cues] == [[str(number)] for number in range(1, 7)]
    assert [times for _, times, _ in cues] == TIMES_MS
    assert [text for _, _, text in cues] == [text.replace("-->", "->") for text in SPOKEN]
    assert "00:00:00,000 --> 00:00:01,500\n" in to_srt(NASTY)


def test_vtt_reads_back():
    header, _, rest = to_vtt(NASTY).partition("\n\n")
    assert header == "WEBVTT"
    cues = list(parse_cues(rest))
    assert all(heading == [] and "<" not in text for heading, _, text in cues)
    assert [times for _, times, _ in cues] == TIMES_MS
    assert [html.unescape(text) for _, _, text in cues] == SPOKEN
    assert "00:00:00.000 --> 00:00:01.500\n" in to_vtt(NASTY)


def test_tsv_reads_back():
    rows = list(csv.reader(io.StringIO(to_tsv(NASTY)), delimiter="\t", quoting=csv.QUOTE_NONE))
    assert rows[0] == ["start", "end", "text"]
    assert [(int(begin), int(end)) for begin, end, _ in rows[1:]] == TIMES_MS
    assert [text for _, _, text in rows[1:]] == SPOKEN


def test_text_has_a_line_for_each_segment():
    assert to_text(NASTY).splitlines() == SPOKEN
    assert to_text(NASTY).endswith("\n")


def test_json_reads_back():
    words = [Word(text=" Hi", start=0.1, end=0.30000001, probability=np.float32(0.5))]
    odd = segment(30.0 + 1.24, 33.1, " Hi", words=words, avg_logprob=-math.inf, no_speech_prob=math.nan)
    whole = Transcript(text=" Hi", language=None, duration=40, segments=(odd, segment(34.0, 35.0, "\u2028")))
    read = json.loads(to_json(whole))
    assert read == to_object(whole)
    assert read["text"] == " Hi"
    assert read["language"] is None
    assert read["duration"] == 40
    first, second = read["segments"]
    assert (first["start"], first["end"]) == (31.24, 33.1)
    assert first["words"] == [{"text": " Hi", "start": 0.1, "end": 0.3, "probability": 0.5}]
    assert first["avg_logprob"] is None
    assert first["no_speech_prob"] is None
    assert first["suspect"] is False
    assert "words" not in second
    assert second["text"] == "\u2028"


def test_ids_of_any_kind_of_integer_are_written():
    ids = np.array([1, 2], dtype=np.int32)
    whole = transcript(segment(0.0, 1.0, "a", token_ids=ids))
    assert json.loads(to_json(whole))["segments"][0]["token_ids"] == [1, 2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("text", ""), ("srt", ""), ("vtt", "WEBVTT\n"), ("tsv", "start\tend\ttext\n")],
)
def test_nothing_said_is_valid(name, expected):
    assert FORMATS[name](transcript(duration=0.5)) == expected
    assert json.loads(to_json(transcript(duration=0.5)))["segments"] == []


def test_times_never_go_back():
    """Rounded, one after another, the end of each is after its beginning and not after the next one's."""
    random = np.random.default_rng(0)
    edges = np.cumsum(random.uniform(0.02, 2.0, 500))
    whole = transcript(*(segment(a, b, "x") for a, b in pairwise(edges)))
    rows = [tuple(map(int, row.split("\t")[:2])) for row in to_tsv(whole).splitlines()[1:]]
    assert all(begin < end for begin, end in rows)
    assert all(before[1] <= after[0] for before, after in pairwise(rows))


def test_each_format_has_a_suffix_of_its_own():
    assert set(SUFFIXES) == set(FORMATS)
    assert len(set(SUFFIXES.values())) == len(SUFFIXES)
