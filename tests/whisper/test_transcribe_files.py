"""Files through the real engine: the command line and `LLM.transcribe` say of each what its samples say."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.long_audio import (
    END,
    FIRST_TIME,
    NUM_MELS,
    RATE,
    WINDOW,
    WINDOW_FRAMES,
    audio,
    save_long_audio_model,
)
from support.recordings import encode, wav

from core_runner import LLM, AudioError
from core_runner.cli import main
from core_runner.transcripts import to_object, to_srt

SMALL = {"device": "cpu", "block_size": 4, "max_num_reqs": 4}
SMALL_OPTIONS = ["--device", "cpu", "--block-size", "4", "--max-num-reqs", "4", "--language", "en"]


def save_tokenizer(directory: Path) -> None:
    """A word for each id; the special ones are called by their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" if i < END else f"<|{i}|>" for i in range(FIRST_TIME + WINDOW_FRAMES // 2 + 1)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[END]).save_pretrained(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_long_audio_model(directory, 1)
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def recordings():
    """Samples that 16 bits hold exactly, of a window or two."""
    lengths = {"a": WINDOW + 77, "b": WINDOW // 2, "c": 2 * WINDOW}
    return {
        name: np.round(audio(seed, length) * 32767).clip(-32767, 32767).astype(np.float32) / 32768
        for seed, (name, length) in enumerate(lengths.items())
    }


@pytest.fixture(scope="module")
def expected(model, recordings):
    """Transcripts of the samples, each alone."""
    with LLM(model, **SMALL) as llm:
        return {name: llm.transcribe(samples, language="en")[0] for name, samples in recordings.items()}


@pytest.fixture(scope="module")
def folder(recordings, tmp_path_factory):
    """The same in three containers, one file that is none, and a note."""
    path = tmp_path_factory.mktemp("files")
    stereo = np.stack([recordings["c"]] * 2)
    (path / "a.wav").write_bytes(_as_wav(recordings["a"]))
    (path / "b.flac").write_bytes(encode(recordings["b"][None], RATE, "flac", "flac"))
    (path / "c.mkv").write_bytes(encode(stereo, RATE, "matroska", "pcm_f32le"))
    (path / "d.mp3").write_bytes(b"no audio at all" * 99)
    (path / "notes.txt").write_text("not listened to")
    return path


def _as_wav(samples: np.ndarray) -> bytes:
    return wav(samples[None] * 32768 / 32767, RATE, "i2")


def transcribe(model, *arguments, **options):
    return CliRunner().invoke(
        main, ["transcribe", "--model", model, *SMALL_OPTIONS, *map(str, arguments)], **options
    )


def assert_same(read, wanted):
    """Two transcripts as objects, whose scores may differ in the last places: a batch adds up in another order."""
    assert [list(each) for each in (read, *read["segments"])] == [
        list(each) for each in (wanted, *wanted["segments"])
    ]
    for mine, theirs in zip((read, *read["segments"]), (wanted, *wanted["segments"]), strict=True):
        for name, value in mine.items():
            if name != "segments":
                assert value == (
                    pytest.approx(theirs[name], abs=2e-4) if isinstance(value, float) else theirs[name]
                )


def test_the_samples_say_something(expected):
    assert NUM_MELS == 8
    assert sum(len(transcript.segments) for transcript in expected.values()) > 3
    assert all(transcript.error is None for transcript in expected.values())


def test_a_folder_on_the_command_line(model, folder, expected):
    result = transcribe(model, folder, "--format", "json")
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {folder / 'd.mp3'}: is no audio that can be read (Invalid data found when processing input)\n"
    )
    read = json.loads(result.stdout)
    assert [Path(each.pop("file")).stem for each in read] == ["a", "b", "c"]
    for each, name in zip(read, "abc", strict=True):
        assert_same(each, to_object(expected[name]))


def test_files_and_stdin(model, folder, expected, tmp_path):
    result = transcribe(model, folder / "c.mkv", "--output", tmp_path / "c.srt")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "c.srt").read_text(encoding="utf-8") == to_srt(expected["c"])
    result = transcribe(model, "-", "--format", "srt", input=(folder / "b.flac").read_bytes())
    assert (result.exit_code, result.stdout) == (0, to_srt(expected["b"]))


def test_every_kind_of_source_in_python(model, folder, recordings, expected):
    with LLM(model, **SMALL) as llm, (folder / "c.mkv").open("rb") as file:
        sources = [
            str(folder / "a.wav"),
            (folder / "b.flac").read_bytes(),
            file,
            recordings["a"],
            folder / "b.flac",
        ]
        progress = []
        transcripts = llm.transcribe(sources, language="en", progress=lambda *state: progress.append(state))
        for transcript, name in zip(transcripts, "abcab", strict=True):
            assert_same(to_object(transcript), to_object(expected[name]))
        total = sum(transcript.duration for transcript in transcripts)
        assert progress[-1] == pytest.approx((total, total))
        assert all(before[0] <= after[0] for before, after in pairwise(progress))

        with pytest.raises(AudioError, match=r"d\.mp3: is no audio"):
            llm.transcribe([folder / "a.wav", folder / "d.mp3"], language="en")
        good, bad = llm.transcribe([folder / "a.wav", folder / "d.mp3"], language="en", on_bad_audio="return")
        assert_same(to_object(good), to_object(expected["a"]))
        assert bad.error.startswith(f"{folder / 'd.mp3'}: is no audio")


def test_a_model_without_the_task_is_refused(folder):
    result = CliRunner().invoke(
        main, ["transcribe", "--model", "embedded:decoder", "--device", "cpu", str(folder / "a.wav")]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert "offers no transcription" in result.stderr
    assert result.stderr.count("\n") == 1
