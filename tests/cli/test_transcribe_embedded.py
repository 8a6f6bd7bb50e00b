"""The command, the example and the README with the real engine, the embedded speech model and its recordings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import model_states_whisper
import pytest
from click.testing import CliRunner
from support.recordings import encode

from core_runner.audio import load_audio
from core_runner.cli import main

ROOT = Path(__file__).parents[2]
RECORDINGS = Path(model_states_whisper.__file__).parent / "embedded_model" / "examples"
TEXTS = json.loads((RECORDINGS / "recordings.json").read_text())
WARNING = "warning: the embedded model understands synthetic speech only; give --model openai/whisper-small\n"


def words_of(text):
    return text.split()


def test_a_process_writes_down_the_recordings_and_warns():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")])}
    command = [sys.executable, "-m", "core_runner.cli", "transcribe", "--device", "cpu", str(RECORDINGS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, WARNING)
    heard = {Path(name).name: text for name, text in _headed(done.stdout)}
    assert {name: words_of(text) for name, text in heard.items()} == {
        name: words_of(text) for name, text in TEXTS.items()
    }


def _headed(stdout):
    for part in stdout.split("==> ")[1:]:
        name, _, text = part.partition(" <==\n")
        yield name, text


def test_the_recordings_need_no_decoder(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    name = "lights.wav"
    result = CliRunner().invoke(main, ["transcribe", "--device", "cpu", str(RECORDINGS / name)])
    assert (result.exit_code, result.stderr) == (0, WARNING)
    assert words_of(result.stdout) == words_of(TEXTS[name])


def test_any_format_of_the_recordings_says_the_same_with_times(tmp_path):
    """Both recordings as people would have them, to subtitles and to words."""
    formats = {"alarm.wav": ("mp3", "libmp3lame", ".mp3"), "lights.wav": ("webm", "libopus", ".webm")}
    for name, (container, codec, suffix) in formats.items():
        samples = load_audio(RECORDINGS / name, 48_000)
        (tmp_path / name).with_suffix(suffix).write_bytes(encode(samples[None], 48_000, container, codec))
    result = CliRunner().invoke(
        main,
        ["transcribe", "--device", "cpu", "--format", "json", "--vad", "--word-timestamps", str(tmp_path)],
    )
    assert (result.exit_code, result.stderr) == (0, WARNING)
    for read, name in zip(json.loads(result.stdout), sorted(formats), strict=True):
        assert read["language"] == "en"
        assert words_of(read["text"]) == words_of(TEXTS[name])
        spoken = [word for segment in read["segments"] for word in segment["words"]]
        assert words_of("".join(word["text"] for word in spoken)) == words_of(TEXTS[name])
        times = [moment for word in spoken for moment in (word["start"], word["end"])]
        assert times == sorted(times)
        assert 0.0 <= times[0] < times[-1] <= read["duration"] + 1e-3


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import transcribe

    yield transcribe.main
    sys.modules.pop("transcribe", None)


def test_the_example_writes_subtitles_beside_the_recordings(example, tmp_path, capsys):
    for name in TEXTS:
        shutil.copy(RECORDINGS / name, tmp_path)
    (tmp_path / "noise.mp3").write_bytes(b"no audio" * 99)
    example(str(tmp_path))
    shown = capsys.readouterr()
    assert shown.err.startswith(f"{tmp_path / 'noise.mp3'}: is no audio")
    assert sorted(path.name for path in tmp_path.glob("*.srt")) == ["alarm.srt", "lights.srt"]
    for name, text in TEXTS.items():
        lines = (tmp_path / name).with_suffix(".srt").read_text().splitlines()
        assert lines[0] == "1"
        assert lines[1].startswith("00:00:00,")
        assert words_of(" ".join(lines[2::4])) == words_of(text)
    assert shown.out.count("segments") == 2
