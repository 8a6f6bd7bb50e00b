"""`LLM.transcribe` around a toy's transcriber: audios in every form, errors, progress, and what is left behind."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.drained import Drained
from support.toy_model import ToyPlugin, ToyTable, save_toy

from core_runner import LLM, RequestError
from model_states.speech import Transcript, TranscriptionOptions
from model_states.tasks import Program, TaskRequest

RATE = 100
TABLE = ToyTable(50, seed=3)


class ToyTranscriber:
    """Says two tokens for each second, which begin with the second's first sample times 100."""

    sampling_rate = RATE

    def transcribe(
        self,
        audio: np.ndarray,
        options: TranscriptionOptions,
        tokenizer: Any,
        progress: Callable[[float], None],
    ) -> Program:
        if options.language == "xx":
            raise ValueError("language='xx' is not one of this model's: yy")
        return self._program(audio, options, tokenizer, progress)

    def _program(self, audio: Any, options: Any, tokenizer: Any, progress: Any) -> Program:
        assert audio.dtype == np.float32
        tokens: list[int] = []
        for start in range(0, len(audio), RATE):
            params = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
            (output,) = yield [TaskRequest([round(100 * float(audio[start]))], params)]
            tokens += output.token_ids
            progress(min(start + RATE, len(audio)) / RATE)
        text = tokenizer.decode(tokens)
        return Transcript(text=text, language=options.language, duration=len(audio) / RATE, segments=())


class SpeakingToy(ToyPlugin):
    def __init__(self) -> None:
        super().__init__(TABLE)
        self.state.tasks = lambda _: {"transcription": ToyTranscriber()}


@pytest.fixture
def llm(tmp_path: Path, drained: Drained) -> LLM:
    llm = drained(
        save_toy(tmp_path / "toy", 50), plugins=[SpeakingToy()], device="cpu", block_size=4, max_num_reqs=4
    )
    # What a transcriber is given is transformers' tokenizer; the toy comes without one.
    hf = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    llm.tokenizer = SimpleNamespace(hf=hf, decode=lambda ids, **_: hf.decode(ids))
    return llm


def samples(first: int, seconds: float) -> np.ndarray:
    """Each second holds a value of its own."""
    values = (first + np.arange(np.ceil(seconds))) / 100
    return np.repeat(values, RATE)[: round(seconds * RATE)].astype(np.float32)


def text_of(first: int, seconds: float) -> str:
    spoken = [TABLE.greedy([first + second], 2) for second in range(int(np.ceil(seconds)))]
    return " ".join(str(token) for tokens in spoken for token in tokens)


def wav_bytes(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((values * 32767).astype("<i2").tobytes())
    return file.getvalue()


def test_results_come_in_the_order_of_the_audios(llm: LLM) -> None:
    audios = [samples(1, 3.0), samples(10, 0.5), samples(20, 1.25)]
    transcripts = llm.transcribe(audios)
    assert [t.text for t in transcripts] == [text_of(1, 3), text_of(10, 1), text_of(20, 2)]
    assert [t.duration for t in transcripts] == [3.0, 0.5, 1.25]
    order = [index for index, _ in llm.transcribe_each(audios)]
    assert order == [1, 2, 0], "each as it is done"


def test_every_form_of_audio(llm: LLM, tmp_path: Path) -> None:
    values = samples(3, 2.0)
    path = tmp_path / "a.wav"
    path.write_bytes(wav_bytes(values))
    forms = [
        values,
        values.astype(np.float64),
        torch.from_numpy(values).requires_grad_(),
        torch.from_numpy(values).bfloat16(),
        str(path),
        path,
        path.read_bytes(),
        memoryview(path.read_bytes()),
        io.BytesIO(path.read_bytes()),
    ]
    for form in forms:
        assert [t.text for t in llm.transcribe(form)] == [text_of(3, 2)], type(form)
    forms[-1].seek(0)
    assert [t.text for t in llm.transcribe(iter(forms))] == [text_of(3, 2)] * len(forms)


def test_nothing_and_empty_audio(llm: LLM) -> None:
    assert llm.transcribe([]) == []
    empty = Transcript(text="", language=None, duration=0.0, segments=())
    assert llm.transcribe(np.zeros(0, np.float32)) == [empty]


def test_a_mapping_is_not_taken_for_the_names_of_its_keys(llm: LLM) -> None:
    with pytest.raises(RequestError, match="audio 0 is of type dict and must be float samples"):
        llm.transcribe({"array": samples(3, 2.0), "sampling_rate": RATE})


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (np.zeros((2, 100), np.float32), "audio 1 has shape [2, 100]"),
        (np.zeros(100, np.int16), "divide 16-bit samples by 32768"),
        (np.array([0.1, np.nan], np.float32), "audio 1 holds values that are not finite"),
        (np.array([np.inf], np.float32), "audio 1 holds values that are not finite"),
        ("/no/such/file.wav", "/no/such/file.wav"),
        (b"no audio at all", "15 bytes"),
        (3, "audio 1 is of type int and must be float samples"),
        ([0.0] * 100, "audio 1 is of type list and must be float samples"),
        ({"array": np.zeros(100, np.float32), "sampling_rate": RATE}, "audio 1 is of type dict"),
        (
            np.array([1000.0, -32768.0], np.float32),
            "audio 1 holds samples of up to 32768, and must be in [-1, 1]",
        ),
        (np.array([1e300]), "audio 1 holds values that are not finite"),
    ],
)
def test_bad_audio_is_raised_or_returned_and_disturbs_no_other(audio: Any, message: str, llm: LLM) -> None:
    good = samples(3, 2.0)
    with pytest.raises(RequestError) as raised:
        llm.transcribe([good, audio, good])
    assert message in str(raised.value)
    first, bad, last = llm.transcribe([good, audio, good], on_bad_audio="return")
    assert first.text == last.text == text_of(3, 2)
    assert message in str(bad.error)
    assert (bad.text, bad.segments, first.error) == ("", (), None)


def test_a_failing_model_is_an_error_of_its_audio(llm: LLM) -> None:
    bad, good = llm.transcribe([samples(50, 1.0), samples(3, 2.0)], on_bad_audio="return")
    assert "outside the vocabulary" in str(bad.error)
    assert bad.duration == 1.0
    assert good.text == text_of(3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "xx"}, "language='xx' is not one of"),
        ({"language": 3}, "language=3 must be a string"),
        ({"task": "sing"}, "task='sing' must be one of 'transcribe', 'translate'"),
        ({"windows": "many"}, "windows='many'"),
        ({"temperatures": ()}, "temperatures=() must be"),
        ({"temperatures": (0.0, -1.0)}, "0 or more"),
        ({"temperatures": float("nan")}, "temperatures=nan"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"word_timestamps": "yes"}, "word_timestamps='yes' must be True or False"),
        ({"logprob_threshold": "low"}, "logprob_threshold='low' must be a number"),
        ({"beams": 5}, "there is no 'beams'; there are language, task, windows,"),
        ({"options": "fast"}, "options='fast' must be TranscriptionOptions"),
        ({"options": TranscriptionOptions(), "seed": 1}, "give options, or seed"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(
    options: dict[str, Any], message: str, llm: LLM
) -> None:
    with pytest.raises(RequestError, match="options") as raised:
        llm.transcribe("/no/such/file.wav", **options)
    assert message in str(raised.value)


def test_an_unknown_way_with_bad_audio_is_refused_before_the_first_result_is_asked_for(llm: LLM) -> None:
    with pytest.raises(RequestError, match="on_bad_audio='skip' is not one of 'raise', 'return'"):
        llm.transcribe_each(samples(3, 2.0), on_bad_audio="skip")


def test_options_come_as_an_object_or_by_keyword(llm: LLM) -> None:
    audio = samples(3, 1.0)
    (by_keyword,) = llm.transcribe(audio, language="yy", temperatures=0)
    (by_object,) = llm.transcribe(audio, TranscriptionOptions(language="yy", temperatures=[0]))
    assert by_keyword == by_object
    assert by_keyword.language == "yy"


def test_progress_is_in_seconds_and_never_goes_back(llm: LLM) -> None:
    seen: list[tuple[float, float]] = []
    audios = [samples(1, 3.0), samples(10, 0.5), samples(20, 1.25), samples(50, 2.0)]
    llm.transcribe(audios, progress=lambda *state: seen.append(state), on_bad_audio="return")
    assert seen[-1] == (6.75, 6.75)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == len(set(seen)) > 4


def test_an_error_of_progress_is_the_callers(llm: LLM) -> None:
    def fail(done: float, total: float) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="terminal"):
        llm.transcribe([samples(1, 3.0)], progress=fail, on_bad_audio="return")


def test_closing_gives_up_the_rest(llm: LLM) -> None:
    each = llm.transcribe_each([samples(1, 1.0)] + [samples(2, 40.0)] * 30)
    assert next(each)[0] == 0
    each.close()
    assert llm.stats().running == llm.stats().waiting == 0


def test_a_model_without_transcription_and_one_without_tokenizer_say_so(
    tmp_path: Path, drained: Drained
) -> None:
    options = {"device": "cpu", "block_size": 4}
    llm = drained(save_toy(tmp_path, 50), plugins=[ToyPlugin(TABLE)], **options)
    with pytest.raises(RequestError, match=r"offers no transcription \(model state 'toy-logits'\)"):
        llm.transcribe(samples(1, 1.0))
    speaking = drained(save_toy(tmp_path, 50), plugins=[SpeakingToy()], **options)
    with pytest.raises(RequestError, match="no tokenizer"):
        speaking.transcribe(samples(1, 1.0))
