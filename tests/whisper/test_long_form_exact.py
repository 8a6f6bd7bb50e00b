"""Long audio, token by token and segment by segment as transformers' sequential long-form generate has it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.drained import Drained
from support.long_audio import (
    ENGLISH,
    GERMAN,
    NO_SPEECH,
    PREVIOUS,
    RATE,
    START,
    TRANSCRIBE,
    WINDOW,
    LetterTokenizer,
    assert_same,
    audio,
    oracle,
    save_long_audio_model,
    whole_features,
)

from core_runner import LLM
from model_states.speech import Transcript

OFF: dict[str, Any] = {
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
    "temperatures": 0.0,
}
# More of the same, some 10 s each; the 305 s of the embedded model are among the others.
SLOW = pytest.mark.slow
LENGTHS = [WINDOW - 160, WINDOW, WINDOW + 160, 2 * WINDOW + 240, 5 * WINDOW + 1077]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, Any]]:
    made = {}
    for seed in range(3):
        directory = tmp_path_factory.mktemp(f"long{seed}")
        made[seed] = str(directory), save_long_audio_model(directory, seed)
    return made


@pytest.fixture
def load(drained: Drained) -> Callable[..., LLM]:
    def make(directory: str, **options: Any) -> LLM:
        probe = {"prompt_token_ids": [START, 5], "model_inputs": {"audio": audio(1, WINDOW)}}
        options = {"device": "cpu", "block_size": 4, "max_num_reqs": 4, **options}
        llm = drained(directory, probe=probe, **options)
        llm.tokenizer = SimpleNamespace(hf=LetterTokenizer(), decode=lambda ids, **_: str(ids))
        return llm

    return make


SEEDS = [
    (0, False),
    (0, True),
    (1, True),
    (2, True),
    *(pytest.param(seed, False, marks=SLOW) for seed in (1, 2)),
]


@pytest.mark.parametrize(("seed", "conditioned"), SEEDS)
def test_segments_equal_those_of_transformers(
    seed: int, conditioned: bool, models: dict[int, tuple[str, Any]], load: Callable[..., LLM]
) -> None:
    """All lengths at once: the recordings share the steps."""
    directory, model = models[seed]
    recordings = [audio(seed + n, n) for n in LENGTHS]
    transcripts = load(directory).transcribe(
        recordings, language="en", condition_on_previous_text=conditioned, **OFF
    )
    for samples, transcript in zip(recordings, transcripts, strict=True):
        expected = oracle(
            model,
            samples,
            language="en",
            task="transcribe",
            temperature=(0.0,),
            condition_on_prev_tokens=conditioned,
        )
        assert_same(transcript, expected)
        assert transcript.duration == len(samples) / RATE
        _assert_true_times(transcript)


def _assert_true_times(transcript: Transcript) -> None:
    before = 0.0
    for segment in transcript.segments:
        assert before <= segment.start <= segment.end <= transcript.duration
        before = segment.end


@pytest.mark.parametrize("seconds", [29, 30, 30.01, 61, pytest.param(305, marks=SLOW)])
def test_windows_of_thirty_seconds(
    seconds: float, tmp_path_factory: pytest.TempPathFactory, load: Callable[..., LLM]
) -> None:
    directory = tmp_path_factory.mktemp("seconds")
    model = save_long_audio_model(directory, 1, window_frames=3000)
    samples = audio(7, round(seconds * RATE))
    (transcript,) = load(str(directory)).transcribe(samples, language="en", **OFF)
    expected = oracle(
        model, samples, language="en", task="transcribe", temperature=(0.0,), condition_on_prev_tokens=True
    )
    assert_same(transcript, expected)
    assert len(transcript.segments) >= seconds / 30
    _assert_true_times(transcript)


@pytest.mark.parametrize("conditioned", [pytest.param(False, marks=SLOW), True])
def test_an_initial_prompt(
    conditioned: bool, models: dict[int, tuple[str, Any]], load: Callable[..., LLM]
) -> None:
    directory, model = models[2]
    samples = audio(3, 5 * WINDOW)
    ids = list(range(20, 36))
    (transcript,) = load(directory).transcribe(
        samples,
        language="en",
        initial_prompt=LetterTokenizer.decode(ids),
        condition_on_previous_text=conditioned,
        **OFF,
    )
    expected = oracle(
        model,
        samples,
        language="en",
        task="transcribe",
        temperature=(0.0,),
        condition_on_prev_tokens=conditioned,
        prompt_ids=torch.tensor([PREVIOUS, *ids]),
    )
    assert_same(transcript, expected)


def test_a_language_is_detected_in_the_first_window(
    models: dict[int, tuple[str, Any]], load: Callable[..., LLM]
) -> None:
    found = set()
    for directory, model in models.values():
        llm = load(directory)
        for seed in range(2):
            samples = audio(seed, WINDOW)
            (transcript,) = llm.transcribe(samples, **OFF)
            found.add(transcript.language)
            expected = oracle(
                model, samples, task="transcribe", temperature=(0.0,), condition_on_prev_tokens=True
            )
            assert_same(transcript, expected)
            (again,) = llm.transcribe(
                samples, language={"en": "English", "de": "german"}[transcript.language], **OFF
            )
            assert again == transcript
    assert found == {"en", "de"}


def test_silence_is_skipped_as_there(models: dict[int, tuple[str, Any]], load: Callable[..., LLM]) -> None:
    """Thresholds that part the windows of a random model; at one temperature, so that nothing is drawn."""
    directory, model = models[0]
    samples = audio(5, 6 * WINDOW)
    llm = load(directory)
    (everything,) = llm.transcribe(samples, language="en", condition_on_previous_text=False, **OFF)
    unlikely = float(np.median([segment.avg_logprob for segment in everything.segments]))
    speechless = float(np.median([segment.no_speech_prob for segment in everything.segments]))
    options = {"logprob_threshold": unlikely + 1e-3, "no_speech_threshold": speechless + 1e-6}
    (transcript,) = llm.transcribe(
        samples, language="en", condition_on_previous_text=False, **{**OFF, **options}
    )
    expected = oracle(
        model,
        samples,
        language="en",
        task="transcribe",
        temperature=(0.0,),
        condition_on_prev_tokens=False,
        **options,
    )
    assert_same(transcript, expected)
    assert 0 < len(transcript.segments) < len(everything.segments)
    for segment in transcript.segments:
        assert segment.suspect == (segment.avg_logprob < unlikely + 1e-3)


def test_a_window_is_retried_as_there(models: dict[int, tuple[str, Any]], load: Callable[..., LLM]) -> None:
    """At temperatures so small that nothing else than the likeliest is drawn."""
    directory, model = models[0]
    samples = audio(5, 5 * WINDOW)
    temperatures = (0.0, 1e-4, 2e-4)
    thresholds = {"compression_ratio_threshold": 1.35}
    (transcript,) = load(directory).transcribe(
        samples,
        language="en",
        condition_on_previous_text=False,
        **{**OFF, **thresholds, "temperatures": temperatures},
    )
    expected = oracle(
        model,
        samples,
        language="en",
        task="transcribe",
        temperature=temperatures,
        condition_on_prev_tokens=False,
        **thresholds,
    )
    assert_same(transcript, expected)
    assert {segment.temperature for segment in transcript.segments} == {0.0, 2e-4}
    for segment in transcript.segments:
        assert segment.suspect == (segment.compression_ratio > 1.35) == (segment.temperature > 0)


def test_the_figures_of_a_segment(models: dict[int, tuple[str, Any]], load: Callable[..., LLM]) -> None:
    directory, model = models[1]
    samples = audio(2, 2 * WINDOW)
    (transcript,) = load(directory).transcribe(
        samples, language="de", condition_on_previous_text=False, **OFF
    )
    expected = oracle(
        model,
        samples,
        language="de",
        task="transcribe",
        temperature=(0.0,),
        condition_on_prev_tokens=False,
        return_dict_in_generate=True,
        logprob_threshold=-100.0,
    )
    assert_same(transcript, expected)
    features = whole_features(model, samples)
    for segment, wanted in zip(transcript.segments, expected, strict=True):
        scores = wanted.result["scores"]
        tokens = wanted.result["sequences"][-len(scores) :]
        assert segment.avg_logprob == pytest.approx(
            float(model._retrieve_avg_logprobs(scores, tokens, 0.0)), abs=1e-4
        )
        ratio = model._retrieve_compression_ratio(tokens, model.config.vocab_size)
        assert segment.compression_ratio == pytest.approx(ratio)
    with torch.no_grad():
        start = torch.tensor([[START]])
        logits = model(input_features=features[:, :, :40], decoder_input_ids=start).logits[0, 0]
    assert transcript.segments[0].no_speech_prob == pytest.approx(
        float(logits.softmax(0)[NO_SPEECH]), rel=1e-3
    )


def test_features_of_a_recording_equal_those_of_the_extractor(models: dict[int, tuple[str, Any]]) -> None:
    from model_states_whisper.features import FeatureConfig, LogMel

    _, model = models[0]
    config = FeatureConfig(feature_size=8, num_frames=40)
    log_mel = LogMel(config, torch.device("cpu"))
    for num_samples in (400, 401, 560, 1599, 1600, 1601, 48_000, 310 * RATE + 17):
        samples = audio(num_samples, num_samples)
        features = log_mel.of_recording(samples)
        assert features.shape == (8, num_samples // 160)
        np.testing.assert_allclose(features, whole_features(model, samples)[0].numpy(), atol=2e-5)
    assert log_mel.of_recording(np.zeros(3, np.float32)).shape == (8, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "fr"}, "language='fr' is not one of this model's: de, en"),
        ({"initial_prompt": "zz"}, "initial_prompt='zz' holds special tokens"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(
    options: dict[str, Any], message: str, models: dict[int, tuple[str, Any]], load: Callable[..., LLM]
) -> None:
    with pytest.raises(ValueError, match=message):
        load(models[0][0]).transcribe(audio(1, 100), **options)


def test_prompts_of_the_windows(models: dict[int, tuple[str, Any]], load: Callable[..., LLM]) -> None:
    """The short form of the first window equals what `generate` gives for the same prompt."""
    directory, _ = models[0]
    llm = load(directory)
    samples = audio(4, WINDOW)
    (transcript,) = llm.transcribe(samples, language="de", **OFF)
    assert (ENGLISH, GERMAN, TRANSCRIBE) == (152, 153, 154)
    prompt = {"prompt_token_ids": [START, GERMAN, TRANSCRIBE], "model_inputs": {"audio": samples}}
    params = llm.default_sampling_params.__class__(
        temperature=0.0, max_tokens=None, logits_processors={"whisper": {"timestamps": True}}
    )
    ids = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert ids[: len(transcript.segments[0].token_ids)] == list(transcript.segments[0].token_ids)
