"""What is kept of encoder outputs: how much memory it takes, for whom, and which options exclude each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_states_whisper.listening import Listener, Spoken
from support.drained import Drained
from support.encoder_decoder import OPTIONS, SpeechModel, ask, features
from support.tiny_words import PROMPT, save_word_model

from core_runner import LLM, SamplingParams
from model_states import CapabilityError

HIDDEN_STATES = {"cross_attention_cache": "hidden_states"}


def test_an_entry_of_hidden_states_is_one_for_all_layers(speech: SpeechModel) -> None:
    sizes = []
    for options in ({}, HIDDEN_STATES):
        with LLM(speech.directory, **OPTIONS, model_options=options) as llm:
            sizes.append(llm.engine.runner.model_state.cross_attention.kept.entry_bytes)
    assert sizes == [2 * 2 * 20 * 48 * 4, 20 * 48 * 4], "keys and values of two layers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_attention_cache": "keys"}, "='keys' must be 'auto', 'keys_values' or 'hidden_states'"),
        ({"cross_attention_cache": ""}, "='' must be 'auto'"),
        (
            {**HIDDEN_STATES, "cross_attention_dtype": "int8"},
            "='hidden_states' and cross_attention_dtype='int8' exclude each other",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, speech: SpeechModel) -> None:
    with pytest.raises(CapabilityError, match=f"cross_attention_cache{message}"):
        LLM(speech.directory, **OPTIONS, model_options=options)


def test_words_are_found_alike(tmp_path: Path, drained: Drained) -> None:
    save_word_model(tmp_path)
    spoken = [
        Spoken(
            prompt=PROMPT, text=text, model_inputs={"input_features": features(seed)}, num_positions=20 - seed
        )
        for seed, text in enumerate(([5], [0, 40, 41, 6, 90]))
    ]
    heard = []
    for options in ({}, HIDDEN_STATES):
        llm = drained(str(tmp_path), probe=ask(99, [3, 5]), model_options=options, **OPTIONS)
        llm.generate(ask(1, PROMPT), SamplingParams(temperature=0.0, max_tokens=2))  # one of the two is kept
        heard.append([*Listener(llm.engine.runner.model_state).listen(spoken)])
    for expected, found in zip(*heard, strict=True):
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.probabilities, expected.probabilities, rtol=1e-4, atol=1e-5)
