"""`WhisperTokens`: prompts of languages and tasks as transformers makes them, and language detection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states_whisper import WhisperTokens
from support.drained import Drained
from support.encoder_decoder import OPTIONS, ask, features, save_speech_model

from core_runner import SamplingParams
from model_states import CheckpointError

LANGUAGES = {"<|en|>": 100, "<|de|>": 101, "<|fr|>": 102}
TASKS = {"translate": 110, "transcribe": 111}
MULTILINGUAL: dict[str, Any] = {"no_timestamps_token_id": 120, "lang_to_id": LANGUAGES, "task_to_id": TASKS}


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({"language": "de"}, [3, 101, 111, 120]),
        ({"language": "German", "task": "translate"}, [3, 101, 110, 120]),
        ({"language": "fr", "timestamps": True}, [3, 102, 111]),
        ({"language": "en", "previous": [50, 51]}, [118, 50, 51, 3, 100, 111, 120]),
        ({"language": "en", "previous": list(range(40))}, [118, *range(9, 40), 3, 100, 111, 120]),
    ],
)
def test_prompts(asked: dict[str, Any], prompt: list[int], tmp_path: Path) -> None:
    model = save_speech_model(tmp_path, **MULTILINGUAL)
    tokens = WhisperTokens.load(str(tmp_path))
    assert tokens.prompt(**asked) == prompt
    assert tokens.first_timestamp_id == 121
    if "previous" not in asked:
        config = model.generation_config
        config.language, config.task = asked["language"], asked.get("task", "transcribe")
        config.return_timestamps = asked.get("timestamps", False)
        ids = model._retrieve_init_tokens(None, 1, config, model.config, 40, {})
        assert ids[0].tolist() == prompt


def test_forced_ids_of_the_old_kind(tmp_path: Path) -> None:
    save_speech_model(tmp_path, no_timestamps_token_id=120, forced_decoder_ids=[[1, 100], [2, 111], [3, 120]])
    tokens = WhisperTokens.load(str(tmp_path))
    assert tokens.prompt() == [3, 100, 111, 120]
    assert tokens.prompt(timestamps=True) == [3, 100, 111]
    save_speech_model(tmp_path, forced_decoder_ids=[[2, 111]])
    with pytest.raises(CheckpointError, match="names positions"):
        WhisperTokens.load(str(tmp_path))


def test_suppressed_tokens_of_config_json_count_where_there_is_no_generation_config(tmp_path: Path) -> None:
    save_speech_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "suppress_tokens": [5], "eos_token_id": 2}))
    assert WhisperTokens.load(str(tmp_path)).suppressed_ids == ()
    (tmp_path / "generation_config.json").unlink()
    assert WhisperTokens.load(str(tmp_path)).suppressed_ids == (5,)


def test_english_only(tmp_path: Path) -> None:
    save_speech_model(tmp_path, no_timestamps_token_id=120)
    tokens = WhisperTokens.load(str(tmp_path))
    assert tokens.prompt() == tokens.prompt(language="en") == tokens.prompt(language="English") == [3, 120]
    for asked, message in (({"language": "de"}, "English only"), ({"task": "translate"}, "English only")):
        with pytest.raises(ValueError, match=message):
            tokens.prompt(**asked)
    with pytest.raises(ValueError, match="one language"):
        tokens.detection_prompt()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "language is to be detected"),
        ({"language": "tlh"}, "is not one of this model's: de, en, fr"),
        ({"language": "en", "task": "sing"}, "task='sing' is not one of"),
        ({"task": "translate"}, "needs a language"),
    ],
)
def test_bad_wishes(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_speech_model(tmp_path, **MULTILINGUAL)
    with pytest.raises(ValueError, match=message):
        WhisperTokens.load(str(tmp_path)).prompt(**asked)


def test_language_is_detected_as_transformers_does(tmp_path: Path, drained: Drained) -> None:
    model = save_speech_model(tmp_path, **MULTILINGUAL)
    llm = drained(str(tmp_path), probe=ask(99, [3, 5, 6]), **OPTIONS)
    tokens = llm.engine.runner.model_state.tokens
    prompt, options = tokens.detection_prompt()
    seeds = range(8)
    outputs = llm.generate([ask(seed, prompt) for seed in seeds], SamplingParams(**options))
    batch = torch.stack([torch.from_numpy(features(seed)) for seed in seeds])
    expected = model.detect_language(input_features=batch).tolist()
    assert [output.outputs[0].token_ids for output in outputs] == [[token] for token in expected]
    assert {tokens.language_of(token) for token in expected} <= {"en", "de", "fr"}
    with pytest.raises(ValueError, match="token 5 names no language"):
        tokens.language_of(5)
