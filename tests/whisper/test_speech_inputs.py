"""What a request may bring: audio or features of any kind, and what is refused before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_states_whisper.features import FeatureConfig, LogMel, load_feature_config
from support.encoder_decoder import (
    NUM_FRAMES,
    NUM_MELS,
    OPTIONS,
    SpeechModel,
    ask,
    encoder_runs,
    features,
    reference,
    save_speech_model,
)
from support.reference import assert_wholly_exact

from core_runner import LLM, SamplingParams
from core_runner.errors import RequestError
from model_states import CapabilityError, CheckpointError
from model_states.loading import load_checkpoint_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
MakeLLM = Callable[..., LLM]


def _audio(num_samples: int, seed: int = 0) -> np.ndarray:
    time = np.arange(num_samples) / 16000
    noise = np.random.default_rng(seed).standard_normal(num_samples)
    return (0.4 * np.sin(2 * np.pi * 440 * time) + 0.05 * noise).astype(np.float32)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_equal_those_of_transformers(num_mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    clips = [_audio(480_000), _audio(31_007, 1), np.zeros(16_000, np.float32)]
    expected = extractor(clips, sampling_rate=16000, return_tensors="pt").input_features
    batch = torch.stack([torch.from_numpy(np.pad(clip, (0, 480_000 - len(clip)))) for clip in clips])
    log_mel = LogMel(FeatureConfig(feature_size=num_mels, num_frames=3000), torch.device("cpu"))
    torch.testing.assert_close(log_mel(batch), expected, rtol=0, atol=1e-4)


def test_audio_gives_what_its_features_give(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    llm = speech_llm()
    log_mel = LogMel(FeatureConfig(feature_size=NUM_MELS, num_frames=NUM_FRAMES), torch.device("cpu"))
    clips = [_audio(6400, 3), _audio(2100, 4)]
    padded = torch.stack([torch.from_numpy(np.pad(clip, (0, 6400 - len(clip)))) for clip in clips])
    prompts = [{"prompt_token_ids": [3, 9], "model_inputs": {"audio": clip}} for clip in clips]
    # Between two of features, so that both kinds are in one batch.
    outputs = llm.generate([prompts[0], ask(5, [3]), prompts[1], ask(6, [3])], GREEDY)
    for output, mel in zip(outputs[::2], log_mel(padded), strict=True):
        assert_wholly_exact(output.outputs[0], reference(speech.model, [3, 9], 8, input_features=mel[None]))
    for output, seed in zip(outputs[1::2], (5, 6), strict=True):
        assert_wholly_exact(output.outputs[0], speech.reference(seed, [3], 8))


def test_short_features_are_padded_as_in_transformers(speech: SpeechModel, speech_llm: MakeLLM) -> None:
    short = features(1, 13)
    padded = torch.from_numpy(np.pad(short, ((0, 0), (0, NUM_FRAMES - 13))))[None]
    (output,) = speech_llm().generate(
        {"prompt_token_ids": [3], "model_inputs": {"input_features": torch.from_numpy(short).double()}},
        GREEDY,
    )
    assert_wholly_exact(output.outputs[0], reference(speech.model, [3], 8, input_features=padded))


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "has nothing; give model_inputs="),
    ({"sound": 1}, "has 'sound'; give"),
    ({"audio": _audio(10), "input_features": features(0)}, "has 'audio', 'input_features'"),
    ({"input_features": features(0).T}, r"shape \[40, 8\], and this model takes up to \[8, 40\]"),
    ({"input_features": features(0, NUM_FRAMES + 1)}, r"shape \[8, 41\]"),
    ({"audio": _audio(6401)}, r"shape \[6401\]"),
    ({"audio": np.zeros((2, 5), np.float32)}, r"shape \[2, 5\]"),
    ({"audio": np.zeros(0, np.float32)}, r"shape \[0\]"),
    ({"audio": np.zeros(5, np.int16)}, "int16; give floating-point"),
    ({"audio": torch.zeros(5, dtype=torch.int32)}, "int32; give floating-point"),
    ({"audio": torch.ones(5).to_sparse()}, "torch.sparse_coo on cpu; give a dense one"),
    ({"audio": torch.ones(5, device="meta")}, "torch.strided on meta; give a dense one with data"),
    ({"audio": np.array([0.0, np.nan], np.float32)}, "not finite"),
    ({"audio": [[1.0], [1.0, 2.0]]}, "no array of numbers"),
    ({"audio": _audio(10), "key": 3}, "key=3 must be a string"),
]


def test_bad_inputs_are_refused_by_name(speech_llm: MakeLLM) -> None:
    llm = speech_llm()
    runs = encoder_runs(llm)
    for inputs, message in BAD:
        with pytest.raises(RequestError, match=rf"request '.*': .*{message}"):
            llm.generate([ask(0, [3]), {"prompt_token_ids": [3], "model_inputs": inputs}], GREEDY)
    assert encoder_runs(llm) == runs, "nothing has started"
    good, bad = llm.generate([ask(0, [3]), [3, 4]], GREEDY, on_bad_prompt="return")
    assert (good.outputs[0].finish_reason, bad.outputs[0].finish_reason) == ("length", "error")


def test_more_entries_than_memory_holds_are_refused(speech: SpeechModel) -> None:
    with pytest.raises(CapabilityError, match=r"1099511627776 encoder outputs of .* lower model_options"):
        LLM(speech.directory, **OPTIONS, model_options={"encoder_entries": 1 << 40})


@pytest.mark.parametrize("style", ["processor_config.json", "preprocessor_config.json"])
def test_both_styles_of_processor_files_load(style: str, tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor

    save_speech_model(tmp_path)
    extractor = WhisperFeatureExtractor(
        feature_size=NUM_MELS, sampling_rate=800, hop_length=20, n_fft=50, chunk_length=1
    )
    fields = json.loads(extractor.to_json_string())
    nested = {"feature_extractor": fields, "processor_class": "WhisperProcessor"}
    (tmp_path / style).write_text(json.dumps(nested if style[:4] == "proc" else fields), encoding="utf-8")
    expected = FeatureConfig(
        feature_size=NUM_MELS, num_frames=NUM_FRAMES, sampling_rate=800, hop_length=20, n_fft=50
    )
    assert load_feature_config(load_checkpoint_config(str(tmp_path))) == expected
    fields["feature_size"] = 80
    (tmp_path / style).write_text(json.dumps(nested if style[:4] == "proc" else fields), encoding="utf-8")
    with pytest.raises(CheckpointError, match="features of 80 bands"):
        load_feature_config(load_checkpoint_config(str(tmp_path)))


# Tokens of a prompt, three that start one with timestamps or four without, and text; and most tokens to generate.
GRID = list(
    product(
        [start + text for start in (3, 4) for text in (0, 1, 222, 223, 224, 400)], (None, 1, 220, 224, 448)
    )
)
# Every length and every limit, the shortest and the longest prompts with all limits, and one with room for a token.
EDGES = [(5, None), (225, 220), (226, 220), (227, 224), (228, None), (403, 220), (447, 1), (3, None)]
EDGES += [case for case in GRID if case[0] in (4, 404)]


@pytest.mark.parametrize("cases", [EDGES, pytest.param(GRID, marks=pytest.mark.slow)], ids=["edges", "grid"])
def test_the_decoder_ends_at_its_last_position(
    cases: list[tuple[int, int | None]], tmp_path: Path, drained: Callable[..., LLM]
) -> None:
    """Field report D-02: whatever prompt and limit, position 447 is the last, or the request is refused; and whoever
    runs beside others is what it is alone.
    """
    save_speech_model(tmp_path, max_target_positions=448, max_length=20)
    options = {**OPTIONS, "max_num_reqs": 16, "max_num_batched_tokens": 512, "block_size": 16}
    llm = drained(str(tmp_path), probe=ask(99, [3, 5, 6]), **options)
    params = [SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True) for _, limit in cases]
    prompts = [
        ask(i % 5, [3, *((7 * i + j) % 190 + 5 for j in range(length - 1))])
        for i, (length, _) in enumerate(cases)
    ]
    for i, output in enumerate(llm.generate(prompts, params)):
        (completion,), (length, limit) = output.outputs, cases[i]
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == min(limit or 448, 448 - length), (length, limit)
        if i % 6 == 3:
            (alone,) = llm.generate(prompts[i], params[i])
            assert alone.outputs[0].token_ids == completion.token_ids, (length, limit)
    with pytest.raises(RequestError, match="a prompt of 448 tokens and one output exceed max_model_len=448"):
        llm.generate(ask(1, [3] * 448), SamplingParams(max_tokens=1))
