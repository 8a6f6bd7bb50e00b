"""`core-runner transcribe`: which files are read, where transcripts go, and how it ends; without a model."""

from __future__ import annotations

import json

import fake_speech
import pytest
from click.testing import CliRunner

import core_runner
from core_runner import ConfigError
from core_runner.cli import main
from model_states import PluginManager


@pytest.fixture
def speech_class(monkeypatch):
    class Fake(fake_speech.FakeSpeechLLM):
        pass

    monkeypatch.setitem(vars(core_runner), "LLM", Fake)
    return Fake


@pytest.fixture
def hear(speech_class):
    """Run `core-runner transcribe --model m` in this process."""

    def invoke(*arguments, model=("--model", "m"), **options):
        return CliRunner().invoke(main, ["transcribe", *map(str, (*arguments, *model))], **options)

    return invoke


@pytest.fixture
def folder(tmp_path):
    """A directory of recordings, some of them below it, and of other things."""
    for name in ("b.mp3", "a.wav", "sub/c.FLAC", "sub/deep/d.mkv", "notes.txt", ".hidden.wav", ".git/e.wav"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
    return tmp_path / "in"


def test_a_transcript_and_nothing_else_on_stdout(hear, speech_class, folder):
    result = hear(folder / "a.wav")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "a.wav\n& <more>\n", "")
    assert speech_class.last.closed
    assert speech_class.last.calls == [([str(folder / "a.wav")], {})]


def test_several_texts_are_headed_by_their_names_in_order(hear, folder):
    result = hear(folder / "b.mp3", folder / "a.wav")
    assert result.stdout == (
        f"==> {folder / 'b.mp3'} <==\nb.mp3\n& <more>\n\n==> {folder / 'a.wav'} <==\na.wav\n& <more>\n"
    )


def test_a_directory_is_one_batch_of_its_audio_files(hear, speech_class, folder):
    result = hear(folder)
    assert result.exit_code == 0, result.stderr
    names = ["a.wav", "b.mp3", "sub/c.FLAC", "sub/deep/d.mkv"]
    assert speech_class.last.calls[0][0] == [str(folder / name) for name in names]
    assert [line for line in result.stdout.splitlines() if line.startswith("==>")] == [
        f"==> {folder / name} <==" for name in names
    ]
    # A file that is named may be called anything.
    assert hear(folder / "notes.txt").stdout.startswith("notes.txt")


def test_stdin_is_bytes(hear):
    result = hear("-", input=b"\x00\xff" * 500)
    assert (result.exit_code, result.stdout) == (0, "1000 bytes\n& <more>\n")


def test_json_is_an_object_for_one_file_and_a_list_for_several(hear, folder):
    one = json.loads(hear(folder / "a.wav", "--format", "json", "--word-timestamps").stdout)
    assert list(one) == ["file", "text", "language", "duration", "segments"]
    assert one["file"] == str(folder / "a.wav")
    assert one["segments"][0]["words"] == [{"text": " a.wav", "start": 0.5, "end": 2.0, "probability": 0.5}]
    many = json.loads(hear(folder / "b.mp3", folder / "a.wav", "--format", "json").stdout)
    assert [each["text"] for each in many] == [" b.mp3 & <more>", " a.wav & <more>"]
    assert "words" not in many[0]["segments"][0]
    (single,) = json.loads(hear(folder / "sub" / "deep", "--format", "json").stdout)
    assert single["text"] == " d.mkv & <more>"


@pytest.mark.parametrize(
    ("format_name", "begins"),
    [
        ("srt", "1\n00:00:00,500 --> 00:00:02,000\na.wav\n\n2\n"),
        ("vtt", "WEBVTT\n\n00:00:00.500 --> 00:00:02.000\na.wav\n\n"),
        ("tsv", "start\tend\ttext\n500\t2000\ta.wav\n"),
    ],
)
def test_subtitles_and_tables(hear, folder, tmp_path, format_name, begins):
    assert hear(folder / "a.wav", "--format", format_name).stdout.startswith(begins)
    # The suffix of --output says the same.
    out = tmp_path / f"out.{format_name}"
    result = hear(folder / "a.wav", "--output", out)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert out.read_text().startswith(begins)


def test_an_output_directory_has_a_file_for_each_input(hear, folder, tmp_path):
    out = tmp_path / "new" / "out"
    result = hear(folder, "--output", out, "--format", "srt")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    written = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert written == ["a.srt", "b.srt", "sub/c.srt", "sub/deep/d.srt"]
    # One file, and a directory that is there or is written as one.
    assert hear(folder / "a.wav", "--output", tmp_path).exit_code == 0
    assert hear(folder / "a.wav", "--output", f"{tmp_path}/more/", "--format", "json").exit_code == 0
    assert (tmp_path / "a.txt").read_text() == "a.wav\n& <more>\n"
    assert json.loads((tmp_path / "more" / "a.json").read_text())["text"] == " a.wav & <more>"


def test_names_that_differ_by_suffix_keep_it(hear, folder, tmp_path):
    (folder / "a.mp3").write_bytes(b"")
    assert hear(folder, "--output", tmp_path / "out").exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.mp3.txt", "a.wav.txt", "b.txt", "sub"}


def test_two_inputs_for_one_file_are_refused(hear, speech_class, folder, tmp_path):
    (tmp_path / "a.wav").write_bytes(b"")
    for other in (tmp_path / "a.wav", folder / "a.wav"):
        result = hear(folder / "a.wav", other, "--output", tmp_path / "out")
        assert result.exit_code == 2
        assert "would both be written to" in result.stderr
    assert speech_class.last is None


def test_existing_files_are_kept_resumed_or_replaced(hear, speech_class, folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "b.txt").write_text("mine")
    result = hear(folder, "--output", out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--resume" in result.stderr
    assert "--overwrite" in result.stderr
    assert speech_class.last is None
    result = hear(folder, "--output", out, "--resume")
    assert (result.exit_code, result.stderr) == (0, "1 of 4 are written already\n")
    assert str(folder / "b.mp3") not in speech_class.last.calls[0][0]
    assert (out / "b.txt").read_text() == "mine"
    speech_class.last = None
    assert hear(folder, "--output", out, "--resume").stderr == "4 of 4 are written already\n"
    assert speech_class.last is None, "no model is loaded for nothing"
    assert hear(folder, "--output", out, "--overwrite").exit_code == 0
    assert (out / "b.txt").read_text() == "b.mp3\n& <more>\n"


def test_an_output_never_replaces_its_audio(hear, folder):
    for arguments in (("notes.txt", folder), ("notes.txt", folder / "notes.txt")):
        result = hear(folder / arguments[0], "--output", arguments[1], "--overwrite")
        assert result.exit_code == 2
        assert "is the audio itself" in result.stderr
    assert (folder / "notes.txt").read_bytes() == b"1234"


def test_files_that_cannot_be_read_are_named_and_the_others_transcribed(hear, folder, tmp_path):
    for name in ("bad.wav", "odd.wav"):
        (folder / name).write_bytes(b"")
    result = hear(folder, "--format", "json")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"error: {folder / 'odd.wav'}: the logits hold NaN",
        f"error: {folder / 'bad.wav'}: is no audio (damaged)",
    ]
    assert len(json.loads(result.stdout)) == 4
    result = hear(folder, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert len(list((tmp_path / "out").rglob("*.txt"))) == 4
    result = hear(folder / "bad.wav")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(hear(folder / "bad.wav", folder / "bad.wav", "--format", "json").stdout) == []


def test_ctrl_c_keeps_what_is_written(hear, speech_class, folder, tmp_path):
    speech_class.interrupt_after = 2
    result = hear(folder, "--output", tmp_path / "out")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()} == {"c.txt", "d.txt"}
    result = hear(folder, "--format", "json")
    assert result.exit_code == 130
    assert json.loads(result.stdout) == [], "the first two are not there yet, and what is shown is whole"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument"),
        (("no-such-file.wav",), "'no-such-file.wav' does not exist"),
        (("{in}/sub/deep/../../../in2",), "does not exist"),
        (("-", "-"), "'-' is given more than once"),
        (("{empty}",), "no file that is called like audio"),
        (("{a}", "--format", "doc"), "'doc' is not one of"),
        (("{a}", "--output", ""), "--output is empty"),
        (("{a}", "--vad", "--windows", "sequential"), "leave --windows sequential out"),
        (("{a}", "--resume"), "are for --output"),
        (("{a}", "--output", "-", "--overwrite"), "are for --output"),
        (("{a}", "--output", "x", "--resume", "--overwrite"), "not both"),
        (("{a}", "--word-timestamps"), "not as text; give --format json"),
        (("{a}", "--word-timestamps", "--output", "x.srt"), "not as srt; give --format json"),
        (("{a}", "{a}", "--format", "srt"), "--format srt of several files needs --output DIR"),
        (("{in}", "--format", "vtt"), "needs --output DIR"),
        (("{a}", "{a}", "--output", "{a}"), "several transcripts need a directory"),
        (("{in}", "--output", "{empty}/x.srt"), "x.srt is called like a file, and several transcripts need"),
        (("{a}", "--output", "{a}/x.txt"), "is no directory"),
        (("{a}", "--task", "sing"), "'sing' is not one of"),
        (("{a}", "--temperature", "-1"), "temperatures=(-1.0,)"),
        (("{a}", "--no-speech-threshold", "nan"), "no_speech_threshold=nan"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    hear, speech_class, folder, tmp_path, arguments, says
):
    (tmp_path / "empty").mkdir()
    places = {"in": folder, "a": folder / "a.wav", "empty": tmp_path / "empty"}
    result = hear(*(argument.format(**places) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in " ".join(result.stderr.split())
    assert speech_class.last is None


def test_options_reach_the_model_and_the_transcription(hear, speech_class, folder):
    arguments = (
        "--language de --task translate --word-timestamps --windows parallel --initial-prompt Hello --no-previous-text "
        "--temperature 0 --temperature 0.5 --compression-ratio-threshold inf --logprob-threshold -inf "
        "--no-speech-threshold 0.5 --seed 7 --format json --device cpu --dtype float32 --max-num-reqs 3"
    ).split()
    assert hear(folder / "a.wav", *arguments).exit_code == 0
    assert speech_class.last.calls[0][1] == {
        "language": "de",
        "task": "translate",
        "word_timestamps": True,
        "windows": "parallel",
        "initial_prompt": "Hello",
        "condition_on_previous_text": False,
        "temperatures": (0.0, 0.5),
        "compression_ratio_threshold": float("inf"),
        "logprob_threshold": float("-inf"),
        "no_speech_threshold": 0.5,
        "seed": 7,
    }
    given = {name: value for name, value in speech_class.last.options.items() if name != "progress"}
    assert given == {"model": "m", "device": "cpu", "dtype": "float32", "max_num_reqs": 3}
    assert hear(folder / "a.wav", "--vad").exit_code == 0
    assert speech_class.last.calls[0][1] == {"windows": "parallel"}


def test_without_a_model_it_is_the_tasks_own_and_says_so(hear, speech_class, folder, monkeypatch):
    monkeypatch.setattr(
        PluginManager, "embedded_for_task", lambda self, task: (f"embedded:{task}", "hears bells only")
    )
    result = hear(folder / "a.wav", model=())
    assert (result.exit_code, result.stdout) == (0, "a.wav\n& <more>\n")
    assert result.stderr == "warning: the embedded model hears bells only\n"
    assert speech_class.last.options["model"] == "embedded:transcription"


def test_stats_say_how_fast_it_was(hear, folder):
    result = hear(folder, "--stats")
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["load", "audio", "time"]
    assert "40.0 s in 4 files" in result.stderr


def test_user_errors_are_one_line(hear, speech_class, folder):
    speech_class.refusal = "model 'm' offers no transcription; load a speech model"
    result = hear(folder / "a.wav")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: model 'm' offers no transcription; load a speech model\n"
    speech_class.load_error = ConfigError("no")
    assert hear(folder / "a.wav").stderr == "error: no\n"
