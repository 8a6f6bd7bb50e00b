"""Word timestamps on tiny random models: attention and times equal to transformers', words within their segments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_states_whisper.alignment import AlignedWindow, WordAligner, token_positions
from model_states_whisper.listening import Listener, Spoken
from model_states_whisper.time_warping import sharpen
from support.drained import Drained
from support.encoder_decoder import NUM_FRAMES, OPTIONS, ask, encoder_runs, features
from support.tiny_words import ALIGNMENT_HEADS, END, FIRST_TIMESTAMP, PROMPT, make_tokenizer, save_word_model

from core_runner import LLM
from model_states import CheckpointError
from model_states.speech import Segment, Word

TOKENIZER = make_tokenizer()
NUM_POSITIONS = NUM_FRAMES // 2
TEXTS = ([5], [0, 40, 41, 6, 90, 90], list(range(3, 60, 2)), [1, 2, 3])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("words")
    return str(directory), save_word_model(directory)


def _open(model: str, drained: Drained, **options: Any) -> LLM:
    return drained(model, probe=ask(99, [3, 5, 6]), **{**OPTIONS, **options})


def _spoken(seed: int, text: list[int], num_positions: int = NUM_POSITIONS) -> Spoken:
    inputs = {"input_features": features(seed)}
    return Spoken(prompt=PROMPT, text=text, model_inputs=inputs, num_positions=num_positions)


@torch.no_grad()
def _forced(model: Any, seed: int, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' attention [heads, tokens, positions] of the alignment heads, and probabilities of the text."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*PROMPT, *text, END]])
    out = model(
        input_features=torch.from_numpy(features(seed))[None], decoder_input_ids=ids, output_attentions=True
    )
    weights = torch.stack([out.cross_attentions[layer][0, head] for layer, head in ALIGNMENT_HEADS])
    first = len(PROMPT) - 1
    probabilities = out.logits[0, first : first + len(text), :END].softmax(-1)
    return weights, probabilities.gather(1, torch.tensor(text)[:, None])[:, 0]


def test_attention_equals_transformers(checkpoint: tuple[str, Any], drained: Drained) -> None:
    llm = _open(checkpoint[0], drained)
    asked = [_spoken(seed, text) for seed, text in enumerate(TEXTS)]
    heard = list(Listener(llm.engine.runner.model_state).listen(asked))
    for seed, (text, listening) in enumerate(zip(TEXTS, heard, strict=True)):
        weights, probabilities = _forced(checkpoint[1], seed, text)
        torch.testing.assert_close(listening.weights, weights, atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(listening.probabilities, probabilities, atol=1e-6, rtol=1e-3)


def test_attention_is_cut_to_the_audio_before_it_is_normalised(
    checkpoint: tuple[str, Any], drained: Drained
) -> None:
    llm = _open(checkpoint[0], drained)
    (heard,) = Listener(llm.engine.runner.model_state).listen([_spoken(0, TEXTS[1], num_positions=7)])
    assert heard.weights.shape == (len(ALIGNMENT_HEADS), len(PROMPT) + len(TEXTS[1]) + 1, 7)
    torch.testing.assert_close(heard.weights.sum(-1), torch.ones(heard.weights.shape[:2]))
    whole, _ = _forced(checkpoint[1], 0, TEXTS[1])
    expected = whole[..., :7] / whole[..., :7].sum(-1, keepdim=True)
    torch.testing.assert_close(heard.weights, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_token_times_equal_transformers(seed: int, checkpoint: tuple[str, Any], drained: Drained) -> None:
    """transformers warps the queries of the sampled tokens alone, so that its first token always ends at 0.00."""
    directory, model = checkpoint
    count = 12
    out = model.generate(
        input_features=torch.from_numpy(features(seed))[None],
        decoder_input_ids=torch.tensor([PROMPT]),
        return_token_timestamps=True,
        return_dict_in_generate=True,
        max_new_tokens=count,
        suppress_tokens=[*range(END, 211)],
        return_timestamps=False,
    )
    ids = out["sequences"][0].tolist()
    text = ids[ids.index(PROMPT[-1]) + 1 :] if PROMPT[0] in ids else ids
    theirs = out["token_timestamps"][0].tolist()[-len(text) :]
    llm = _open(directory, drained)
    (heard,) = Listener(llm.engine.runner.model_state).listen([_spoken(seed, text)])
    rows = heard.weights[:, len(PROMPT) : len(PROMPT) + len(text) - 1]
    ours = 0.02 * token_positions(sharpen(rows))
    np.testing.assert_allclose(ours, theirs[:-1], atol=0.02 + 1e-6)


def _window(
    seed: int, segments: list[tuple[float, float, list[int]]], start: float = 0.0, duration: float = 0.4
) -> AlignedWindow:
    made = [
        Segment(
            start=start + first,
            end=start + last,
            text=TOKENIZER.decode(text),
            token_ids=[FIRST_TIMESTAMP, *text, FIRST_TIMESTAMP + 3],
            temperature=0.0,
            avg_logprob=0.0,
            compression_ratio=1.0,
            no_speech_prob=0.0,
        )
        for first, last, text in segments
    ]
    inputs = {"input_features": features(seed)}
    return AlignedWindow(
        segments=made, prompt=PROMPT, model_inputs=inputs, start=start, duration=duration, language="en"
    )


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    assert max(ids) < END
    return ids


WINDOWS = [
    _window(0, [(0.0, 0.2, _ids(" the cat sat.")), (0.2, 0.4, _ids(' then, "it" ran'))]),
    _window(1, [(0.06, 0.3, _ids(" the"))], start=30.0),
    _window(2, [], start=60.0),
    _window(3, [(0.0, 0.1, []), (0.1, 0.14, _ids(" at the end of the audio"))], start=90.0, duration=0.14),
]


def _check(windows: list[AlignedWindow], found: list[list[list[Word]]]) -> None:
    for window, segments in zip(windows, found, strict=True):
        last = window.start
        for segment, words in zip(window.segments, segments, strict=True):
            assert "".join(word.text for word in words) == segment.text
            for word in words:
                assert max(last, segment.start) <= word.start <= word.end <= segment.end
                assert 0.0 < word.probability < 1.0
                last = word.end


def _times(words: Sequence[Word]) -> list[tuple[str, float, float]]:
    return [(word.text, word.start, word.end) for word in words]


def _find_words(llm: LLM, windows: list[AlignedWindow]) -> list[list[list[Word]]]:
    state: Any = llm.engine.runner.model_state
    aligner = WordAligner(state)
    return aligner.find_words(windows, aligner.listen(windows), TOKENIZER)


def test_words_lie_within_their_segments_in_order(checkpoint: tuple[str, Any], drained: Drained) -> None:
    llm = _open(checkpoint[0], drained)
    found = _find_words(llm, WINDOWS)
    _check(WINDOWS, found)
    assert [word.text for word in found[0][1]] == [" then,", ' "it"', " ran"]
    alone = [_find_words(llm, [window])[0] for window in WINDOWS]
    for one, other in zip(found, alone, strict=True):
        for words, expected in zip(one, other, strict=True):
            assert _times(words) == _times(expected)


def test_segments_are_given_their_words_as_part_of_a_program(
    checkpoint: tuple[str, Any], drained: Drained
) -> None:
    llm = _open(checkpoint[0], drained)
    state: Any = llm.engine.runner.model_state
    aligner = WordAligner(state)
    programs = (aligner.add_words(window, TOKENIZER) for window in WINDOWS)
    found = {end.index: end.result for end in llm.run(programs)}
    expected = _find_words(llm, WINDOWS)
    for index, window in enumerate(WINDOWS):
        assert [replace(segment, words=None) for segment in found[index]] == list(window.segments)
        assert [_times(segment.words) for segment in found[index]] == [*map(_times, expected[index])]


@pytest.mark.parametrize("windows", ["sequential", "parallel"])
def test_transcripts_have_words_where_they_are_asked_for(
    windows: str, checkpoint: tuple[str, Any], tmp_path: Path, drained: Drained
) -> None:
    save_word_model(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    llm = _open(str(tmp_path), drained)
    audio = np.random.default_rng(5).normal(0.0, 0.2, 3 * 6400 + 900).astype(np.float32)
    audio[6000:8000] *= 1e-3  # a pause, by which speech is told from noise
    options: Any = {"language": "en", "windows": windows, "temperatures": (0.0,), "no_speech_threshold": None}
    (plain,) = llm.transcribe(audio, **options)
    (found,) = llm.transcribe(audio, word_timestamps=True, **options)
    assert all(segment.words is None for segment in plain.segments)
    assert [replace(segment, words=None) for segment in found.segments] == list(plain.segments)
    last = 0.0
    assert found.segments
    for segment in found.segments:
        assert "".join(word.text for word in segment.words) == segment.text
        for word in segment.words:
            assert max(last, segment.start) <= word.start <= word.end <= segment.end
            last = word.end


def test_kept_encoder_outputs_are_used_and_others_computed_again(
    checkpoint: tuple[str, Any], drained: Drained
) -> None:
    llm = _open(checkpoint[0], drained, model_options={"encoder_entries": 2}, max_num_reqs=2)
    state = llm.engine.runner.model_state
    asked = [_spoken(seed, TEXTS[2]) for seed in range(4)]
    fresh = list(Listener(state).listen(asked))
    encoded: list[int] = []
    stage = state.encoder.stage
    state.encoder.stage = lambda inputs: (encoded.append(len(inputs)), stage(inputs))[1]
    llm.generate([ask(seed, PROMPT) for seed in (1, 2)])
    state.encoder.stage = lambda inputs: (encoded.append(-len(inputs)), stage(inputs))[1]
    before = encoder_runs(llm)
    again = list(Listener(state).listen(asked))
    assert sum(count for count in encoded if count > 0) == 2
    assert [count for count in encoded if count < 0] == [-2]
    assert encoder_runs(llm) == before
    for one, other in zip(fresh, again, strict=True):
        torch.testing.assert_close(one.weights, other.weights, atol=1e-6, rtol=1e-5)


def test_text_that_fills_the_decoder(checkpoint: tuple[str, Any], drained: Drained) -> None:
    llm = _open(checkpoint[0], drained)
    state = llm.engine.runner.model_state
    text = [7] * (state.tokens.max_target_positions - len(PROMPT))
    (heard,) = Listener(state).listen([_spoken(0, text)])
    assert heard.weights.shape[1] == state.tokens.max_target_positions
    window = _window(0, [(0.0, 0.4, text)])
    _check([window], _find_words(llm, [window]))


@pytest.mark.parametrize("none", [None, []])
def test_later_half_of_the_heads_where_none_are_named(none: Any, tmp_path: Path, drained: Drained) -> None:
    save_word_model(tmp_path, alignment_heads=none)
    llm = _open(str(tmp_path), drained)
    (heard,) = Listener(llm.engine.runner.model_state).listen([_spoken(0, TEXTS[0])])
    assert len(heard.weights) == 4


@pytest.mark.parametrize("heads", [[[2, 0]], [[0, 4]], [[-1, 0]], [3], [[0, 1, 2]], "all"])
def test_heads_that_are_not_there(heads: Any, tmp_path: Path, drained: Drained) -> None:
    save_word_model(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alignment_heads": heads}))
    llm = _open(str(tmp_path), drained)
    with pytest.raises(CheckpointError, match="alignment_heads"):
        WordAligner(llm.engine.runner.model_state)
