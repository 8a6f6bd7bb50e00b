"""Field reports D-01 and D-03: times of long audio, and what becomes of windows that say nothing sensible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.scripted_speech import RATE, Answer, ScriptedModel, at, loud_stretches, markers

from model_states.speech import Transcript
from model_states.tasks import TaskRequest

LENGTHS = [29, 30, 30.01, 61, 305]
MARKER = 0.3  # seconds
WORD = 40
GOOD = -0.2  # mean logprob
LOOP = [at(0.0), *[7, 8] * 200, at(29.0)]


def marker_times(seconds: float) -> list[float]:
    """Every 2.3 s, but for the half second from 29.5 on of each window that is cut there."""
    times = np.arange(0.7, seconds - MARKER, 2.3)
    return [float(t) for t in times if (t + MARKER + 0.1) % 29.5 > MARKER + 0.2]


def say_markers(request: TaskRequest) -> Answer:
    """A word for each marker, up to 29.5 s; then the window is cut, which two timestamps in a row say."""
    tokens: list[int] = []
    stretches = [(start, end) for start, end in loud_stretches(request) if end <= 29.5]
    for start, end in stretches:
        tokens += [at(start), WORD, at(end)]
    if not tokens:
        return [at(0.0), WORD + 1, at(0.3)], GOOD
    is_full = 3000 in getattr(request.model_inputs.get("input_features"), "shape", ())
    cut = [at(29.5), WORD + 1, at(29.5), at(29.5)] if is_full else []
    return tokens + cut, GOOD


def assert_true_times(transcript: Transcript, seconds: float, times: list[float]) -> None:
    said = [segment for segment in transcript.segments if WORD in segment.token_ids]
    assert len(said) == len(times)
    for segment, time in zip(said, times, strict=True):
        assert abs(segment.start - time) <= 0.1
        assert abs(segment.end - time - MARKER) <= 0.1
    ends = [0.0] + [t for segment in transcript.segments for t in (segment.start, segment.end)]
    assert ends == sorted(ends)
    assert ends[-1] <= transcript.duration == pytest.approx(seconds)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_d01_times_are_the_windows_true_start_and_the_time_in_it(seconds: float) -> None:
    """Ten windows, each cut half a second early, would be 5 s off if they were taken for 30 s each."""
    times = marker_times(seconds)
    model = ScriptedModel(say_markers)
    transcript = model.transcribe(markers(round(seconds * RATE), times))
    assert_true_times(transcript, seconds, times)
    assert len(model.asked) == 1 + int((seconds - 1e-9) // 29.5) or seconds <= 30


@pytest.mark.parametrize("seconds", LENGTHS)
def test_d01_of_parallel_windows(seconds: float) -> None:
    times = marker_times(seconds)
    model = ScriptedModel(say_markers)
    transcript = model.transcribe(markers(round(seconds * RATE), times), windows="parallel")
    assert_true_times(transcript, seconds, times)


def test_times_that_a_model_makes_up_stay_in_the_recording() -> None:
    """A window is padded to 30 s, and the model may place text in what was added."""
    for windows, begin in (("sequential", 1.0), ("parallel", 1.8)):
        model = ScriptedModel(lambda _: ([at(1.0), WORD, at(8.0), at(8.0), WORD, at(29.0)], GOOD))
        transcript = model.transcribe(markers(5 * RATE, [1.0, 3.0, 4.5]), windows=windows)
        times = [(round(s.start, 1), s.end) for s in transcript.segments]
        assert times == [(begin, 5.0), (5.0, 5.0)]


def test_a_window_that_says_nothing_is_not_asked_again() -> None:
    """No rule lets a model say two timestamps first; whatever does it must not be asked for ever."""
    model = ScriptedModel(lambda _: ([at(0.0), at(0.0)], GOOD))
    assert model.transcribe(AUDIO).text == ""
    assert len(model.asked) == 3


# ---- what a window may look like


def scripted(*answers: Answer | Any) -> ScriptedModel:
    """Each window takes the next answer; temperatures do not change it."""
    windows: dict[str, Answer] = {}

    def decode(request: TaskRequest) -> Answer:
        key = request.model_inputs["key"]
        if key not in windows:
            windows[key] = answers[len(windows)]
        return windows[key]

    return ScriptedModel(decode)


def times_and_tokens(transcript: Transcript) -> list[tuple[float, float, list[int]]]:
    return [(round(s.start, 2), round(s.end, 2), list(s.token_ids)) for s in transcript.segments]


AUDIO = markers(70 * RATE, list(np.arange(0.5, 69, 1.5)))


def test_pairs_of_timestamps_move_the_next_window() -> None:
    first = [at(0.0), 1, at(2.0), at(2.0), 2, at(20.0), at(20.0), 3, 3]
    model = scripted((first, GOOD), ([at(0.0), 4, at(30.0)], GOOD), ([at(1.0), 5, at(20.0)], GOOD))
    transcript = model.transcribe(AUDIO)
    assert times_and_tokens(transcript) == [
        (0.0, 2.0, [at(0.0), 1, at(2.0)]),
        (2.0, 20.0, [at(2.0), 2, at(20.0), at(20.0)]),
        (20.0, 50.0, [at(0.0), 4, at(30.0)]),
        (51.0, 70.0, [at(1.0), 5, at(20.0)]),
    ]
    assert transcript.text == "ab ac ae af", "what follows the last pair is said again by the next window"


def test_d03_a_window_that_ends_in_one_timestamp_is_finished() -> None:
    model = scripted(
        ([at(0.0), 1, at(12.0)], GOOD), ([at(0.5), 2, at(3.0)], GOOD), ([at(0.0), 3, at(1.0)], GOOD)
    )
    transcript = model.transcribe(AUDIO)
    assert [(s.start, s.end) for s in transcript.segments] == [(0.0, 12.0), (30.5, 33.0), (60.0, 61.0)]


def test_parallel_windows_go_on_where_speech_is_left() -> None:
    """The part behind a single timestamp, and behind a pair, as often as there is speech in it."""
    model = ScriptedModel(
        lambda request: (
            ([at(0.0), 1, at(12.0)], GOOD)
            if len(request.model_inputs["audio"]) > 20 * RATE
            else ([at(0.0), 2, at(5.0), at(5.0), 3], GOOD)
        )
    )
    transcript = model.transcribe(markers(25 * RATE, list(np.arange(0.5, 24, 1.5))), windows="parallel")
    begin = transcript.segments[0].start
    assert begin == pytest.approx(0.3, abs=0.05), (
        "silence before the first marker is left out, but for a margin"
    )
    starts = [round(s.start - begin, 2) for s in transcript.segments]
    assert starts == [0.0, 12.0, 17.0, 22.0]


def test_a_window_without_timestamps_at_its_end_is_one_segment() -> None:
    short = markers(20 * RATE, [1.0])
    assert times_and_tokens(scripted(([at(0.4), 1, 2], GOOD)).transcribe(short)) == [
        (0.4, 20.0, [at(0.4), 1, 2])
    ]
    assert times_and_tokens(scripted(([at(0.0), 1, 2], GOOD)).transcribe(short)) == [
        (0.0, 20.0, [at(0.0), 1, 2])
    ]


# ---- D-03


@pytest.mark.parametrize("windows", ["sequential", "parallel"])
def test_d03_a_loop_is_retried_at_every_temperature_and_marked(windows: str) -> None:
    model = ScriptedModel(lambda request: (LOOP, GOOD))
    transcript = model.transcribe(AUDIO[: 29 * RATE], windows=windows)
    temperatures = [request.params["temperature"] for request in model.asked]
    assert temperatures == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert len({request.params["seed"] for request in model.asked}) == 6
    assert len({request.model_inputs["key"] for request in model.asked}) == 1
    (segment,) = transcript.segments
    assert segment.suspect
    assert segment.temperature == 1.0
    assert segment.compression_ratio > 10


def test_d03_a_suspect_windows_text_is_shown_to_nobody() -> None:
    model = scripted(
        ([at(0.0), 1, at(30.0)], GOOD),
        (LOOP, GOOD),
        ([at(0.0), 3, at(4.0)], GOOD),
    )
    transcript = model.transcribe(AUDIO)
    assert [s.suspect for s in transcript.segments] == [False, True, False]
    prompts = model.prompts()
    assert prompts[0] == []
    assert prompts[1:7] == [[at(0.0), 1, at(30.0)]] * 6
    assert prompts[7] == []


def test_an_improbable_window_is_retried_until_it_is_not() -> None:
    def decode(request: TaskRequest) -> Answer:
        return [at(0.0), 1, at(9.0)], (-0.9 if request.params["temperature"] == 0.4 else -1.1)

    model = ScriptedModel(decode)
    (segment,) = model.transcribe(AUDIO[: 10 * RATE]).segments
    assert (segment.temperature, segment.suspect) == (0.4, False)
    assert segment.avg_logprob == pytest.approx(-0.9)


def test_text_of_a_hot_window_is_shown_to_nobody_and_that_of_a_warm_one_is() -> None:
    for hottest, shown in ((0.4, True), (0.6, False)):

        def decode(request: TaskRequest, hottest: float = hottest) -> Answer:
            return [at(0.0), 1, at(30.0)], (GOOD if request.params["temperature"] >= hottest else -2.0)

        model = ScriptedModel(decode)
        model.transcribe(AUDIO[: 40 * RATE])
        assert model.prompts()[-1] == ([at(0.0), 1, at(30.0)] if shown else [])


def test_thresholds_can_be_switched_off() -> None:
    off = {"compression_ratio_threshold": None, "logprob_threshold": None, "no_speech_threshold": None}
    model = ScriptedModel(lambda _: (LOOP, -5.0), lambda _: 0.99)
    (segment,) = model.transcribe(AUDIO[: 29 * RATE], **off).segments
    assert (segment.temperature, segment.suspect) == (0.0, False)
    assert segment.no_speech_prob == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("logprob", "no_speech", "threshold", "is_silent"),
    [
        (-1.5, 0.9, -1.0, True),
        (-0.5, 0.9, -1.0, False),
        (-1.5, 0.5, -1.0, False),
        (-0.5, 0.9, None, True),
    ],
)
def test_d03_silence_gives_no_text(
    logprob: float, no_speech: float, threshold: float | None, is_silent: bool
) -> None:
    """And is neither retried nor in the way of the speech on both sides."""

    def decode(request: TaskRequest) -> Answer:
        spoken = bool(loud_stretches(request))
        return ([at(0.0), 1, at(9.0)], GOOD) if spoken else ([at(0.0), 2, 2, at(30.0)], logprob)

    def hear(request: TaskRequest) -> float:
        return 0.01 if loud_stretches(request) else no_speech

    model = ScriptedModel(decode, hear)
    samples = markers(90 * RATE, [0.5, 2.0, 9.0, 60.5, 65.0, 69.0])
    transcript = model.transcribe(samples, logprob_threshold=threshold, temperatures=(0.0, 0.2))
    texts = [segment.text for segment in transcript.segments if not segment.suspect]
    silent = [] if is_silent or logprob < -1.0 else [" ac ac"]
    assert texts == [" ab", *silent, " ab"]
    assert all(segment.suspect for segment in transcript.segments if segment.avg_logprob < -1.0)
    if is_silent:
        assert len(model.asked) == 3


def test_d03_silence_between_speech_is_not_even_decoded_in_parallel() -> None:
    samples = markers(70 * RATE, [1.0, 3.0, 8.0, 61.0, 65.0])
    model = ScriptedModel(say_markers)
    transcript = model.transcribe(samples, windows="parallel")
    assert len(model.asked) == 2
    assert all(np.shares_memory(request.model_inputs["audio"], samples) for request in model.asked)
    assert [round(s.start, 1) for s in transcript.segments] == [1.0, 3.0, 8.0, 61.0, 65.0]


@pytest.mark.parametrize("level", [0.0, 1e-3, 0.1])
def test_d03_silence_and_steady_noise_have_no_parallel_windows(level: float) -> None:
    noise = level * np.random.default_rng(0).standard_normal(30 * RATE)
    model = ScriptedModel(say_markers)
    transcript = model.transcribe(noise.astype(np.float32), windows="parallel", language=None)
    assert (model.asked, transcript.text, transcript.segments) == ([], "", ())


def test_previous_text_is_cut_to_what_fits_and_can_be_left_out() -> None:
    words = list(range(100)) * 2
    answers = [([at(0.0), *words, at(30.0)], GOOD)] * 3
    model = scripted(*answers)
    model.transcribe(AUDIO, compression_ratio_threshold=None)
    assert [len(prompt) for prompt in model.prompts()] == [0, 202, 223]
    assert model.prompts()[2] == [*words, at(30.0), at(0.0), *words, at(30.0)][-223:]
    model = scripted(*answers)
    model.transcribe(AUDIO, compression_ratio_threshold=None, condition_on_previous_text=False)
    assert model.prompts() == [[], [], []]


def test_an_initial_prompt_is_shown_where_there_is_no_text_before() -> None:
    initial = [3, 4, 5]
    options = {"initial_prompt": " ad ae af"}
    model = scripted(([at(0.0), 1, at(30.0)], GOOD), (LOOP, GOOD), ([at(0.0), 3, at(4.0)], GOOD))
    model.transcribe(AUDIO, **options)
    prompts = model.prompts()
    assert (prompts[0], prompts[1]) == (initial, [*initial, at(0.0), 1, at(30.0)])
    assert prompts[-1] == initial
    model = ScriptedModel(say_markers)
    model.transcribe(AUDIO, windows="parallel", **options)
    assert model.prompts() == [initial] * len(model.asked)


def test_a_window_that_cannot_be_decoded_says_where() -> None:
    class Failing(ScriptedModel):
        def _answer(self, item: Any) -> Any:
            output = super()._answer(item)
            if isinstance(item, TaskRequest) and len(self.asked) == 2:
                return type(output)([], "error", (), "the model's logits held NaN")
            return output

    model = Failing(lambda _: ([at(0.0), 1, at(30.0)], GOOD))
    with pytest.raises(ValueError, match=r"the window at 30.00 s could not be decoded: .* NaN"):
        model.transcribe(AUDIO)
