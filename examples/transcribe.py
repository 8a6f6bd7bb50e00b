"""Subtitles for every recording in a folder, beside the recordings.

    pip install "core-runner[audio]"
    python examples/transcribe.py FOLDER [MODEL]

MODEL is a hub name or a directory, such as openai/whisper-small. Without it, it is the embedded model, which
understands synthetic speech only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core_runner import LLM
from core_runner.audio import AUDIO_SUFFIXES
from core_runner.transcripts import to_srt


def main(folder: str, model: str = "embedded:whisper") -> None:
    """Transcribe all files in one batch, and write each one's subtitles as soon as it is done."""
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in AUDIO_SUFFIXES)
    with LLM(model) as llm:
        # Windows are cut at quiet points and decoded at once; an unreadable file is no reason to stop.
        results = llm.transcribe_each(paths, windows="parallel", on_bad_audio="return")
        for index, transcript in results:
            if transcript.error is not None:
                print(transcript.error, file=sys.stderr)
                continue
            subtitles = paths[index].with_suffix(".srt")
            subtitles.write_text(to_srt(transcript), encoding="utf-8")
            print(f"{subtitles}: {transcript.duration:.0f} s, {len(transcript.segments)} segments")


if __name__ == "__main__":
    main(*sys.argv[1:])
