"""The decoding benchmark runs and has a line of figures for each format."""

from __future__ import annotations

import audio_loading


def test_every_format_is_timed(capsys) -> None:
    audio_loading.main(["--minutes", "0.05", "--files", "2", "--threads", "2"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line[:14].strip() for line in lines] == list(audio_loading.FORMATS)
    for line in lines:
        alone, together, beside = map(float, line[14:].split())
        assert alone > 0
        assert together > 0
        assert beside > 0
