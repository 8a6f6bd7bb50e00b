"""Training windows: what they say is what is heard in them, and where; and the forward is transformers'."""

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1]
sys.path.insert(0, str(FOLDER))

from clip_pool import TICK_SAMPLES, ClipPool, move, resample  # noqa: E402
from clips import CHUNK_TICKS, MAX_CLIPS, MAX_TOKENS, Chunk  # noqa: E402
from speech_model import Attention, Trainee, attention_loss, build_model, decode, encode  # noqa: E402
from vocabulary import (  # noqa: E402
    END_ID,
    ENGLISH_ID,
    FIRST_TIMESTAMP_ID,
    NO_SPEECH_ID,
    NO_TIMESTAMPS_ID,
    PREVIOUS_ID,
    START_ID,
    TRANSCRIBE_ID,
)
from voices import TICK  # noqa: E402
from windows import IGNORED, WindowMaker, WindowShape  # noqa: E402

CPU = torch.device("cpu")
SHORT, WHOLE = WindowShape(64, 300, 4, 96), WindowShape(24, 1500, 14, 448)


@pytest.fixture(scope="module")
def pool():
    """Clips of a constant sound: each of its tokens is another level."""
    rng = np.random.default_rng(0)
    arrays = {
        name: np.zeros((MAX_CLIPS, *shape), np.int32)
        for name, shape in {
            "starts": (),
            "ticks": (),
            "counts": (),
            "tokens": (MAX_TOKENS,),
            "spans": (MAX_TOKENS, 2),
        }.items()
    }
    audio, frame_tokens, used = np.zeros(CHUNK_TICKS * TICK, np.int16), np.zeros(CHUNK_TICKS, np.int16), 0
    for row in range(100):
        count = int(rng.integers(3, 12))
        bounds = np.cumsum([0, *rng.integers(4, 20, count)])
        arrays["tokens"][row, :count] = rng.integers(0, END_ID, count)
        arrays["spans"][row, :count] = np.stack((bounds[:-1], bounds[1:]), 1)
        arrays["starts"][row], arrays["ticks"][row], arrays["counts"][row] = used, bounds[-1], count
        for token, start, end in zip(arrays["tokens"][row], bounds[:-1], bounds[1:], strict=False):
            frame_tokens[used + start : used + end] = token + 1
        audio[used * TICK : (used + bounds[-1]) * TICK] = 3000
        used += bounds[-1]
    pool = ClipPool(2, CPU)
    chunk = Chunk(audio=audio, frame_tokens=frame_tokens, **arrays, num_clips=100)
    for _ in range(3):  # the third takes the first one's place
        pool.add(move(chunk, CPU))
    assert pool.num_filled == 2
    return pool


def draw(pool, shape, seed=0):
    torch.manual_seed(seed)
    return WindowMaker(pool, shape).draw()


def rows_of(windows):
    """Tokens and labels of each row, from <|startoftranscript|> on, up to the end."""
    for ids, labels, spans, frames, positions in zip(
        windows.input_ids, windows.labels, windows.spans, windows.frame_tokens, windows.positions, strict=True
    ):
        start = ids.tolist().index(START_ID)
        end = labels.tolist().index(END_ID, start)
        yield (
            ids[: end + 1].tolist(),
            labels[: end + 1].tolist(),
            spans[: end + 1],
            frames,
            int(positions[0]),
            start,
        )


@pytest.mark.parametrize("shape", [SHORT, WHOLE])
def test_labels_are_the_next_inputs(pool, shape):
    windows = draw(pool, shape)
    counted = windows.labels[:, :-1] != IGNORED
    follows = windows.labels[:, :-1] == windows.input_ids[:, 1:]
    no_speech = windows.labels[:, :-1] == NO_SPEECH_ID
    assert (follows | no_speech)[counted].all()


@pytest.mark.parametrize("shape", [SHORT, WHOLE])
def test_every_token_is_heard_where_it_says(pool, shape):
    num_heard = 0
    for _, labels, spans, frames, _, _ in rows_of(draw(pool, shape)):
        for label, (first, last) in zip(labels, spans.tolist(), strict=True):
            if 0 <= label < END_ID:
                num_heard += 1
                assert (frames[first:last] == label + 1).all()
                assert 0 <= first < last <= shape.ticks
    assert num_heard > 500


@pytest.mark.parametrize("shape", [SHORT, WHOLE])
def test_timestamps_are_where_speech_begins_and_ends(pool, shape):
    num_timestamps = num_cut = 0
    for ids, labels, _, frames, shift, start in rows_of(draw(pool, shape)):
        times = [label - FIRST_TIMESTAMP_ID - shift for label in labels if label >= FIRST_TIMESTAMP_ID]
        if not times or labels[start] == NO_SPEECH_ID:
            continue
        assert times == sorted(times)
        assert ids[start : start + 3] == [START_ID, ENGLISH_ID, TRANSCRIBE_ID]
        heard = torch.cat((frames, torch.zeros(1))) > 0
        for first, last in zip(times[::2], times[1::2], strict=False):
            assert heard[first:last].all()
            assert not heard[last]
            assert first == 0 or not heard[first - 1]
        num_timestamps += len(times)
        if len(times) % 2:  # the window cuts the last sentence
            num_cut += 1
            assert labels[-2] == times[-1] + FIRST_TIMESTAMP_ID + shift
            assert heard[times[-1] : shape.ticks].all()
        else:
            assert not heard[times[-1] :].any()
    assert num_timestamps > 30
    assert (num_cut > 0) == shape.is_whole


def silences(windows):
    """Ticks before the first token of each window in which one is spoken, and between tokens."""
    leads, gaps = [], []
    for frames in windows.frame_tokens:
        heard = frames.nonzero().flatten()
        if len(heard):
            leads.append(int(heard[0]))
            gaps += (heard.diff() - 1).tolist()
    return leads, gaps


@pytest.mark.slow
def test_whole_windows_have_long_silences_before_and_between_sentences(pool):
    draws = [draw(pool, WHOLE, seed) for seed in range(8)]
    leads, gaps = (list(chain(*both)) for both in zip(*map(silences, draws), strict=True))
    for lengths in (leads, gaps):
        assert sum(length > 500 for length in lengths) > 10
        assert max(lengths) < 1450
    assert 0.5 < sum(lead < 100 for lead in leads) / len(leads) < 0.9, "most begin as before"


def test_noise_comes_and_goes_in_whole_windows_alone(pool):
    torch.manual_seed(0)
    whole, short = (WindowMaker(pool, shape)._comes_and_goes() for shape in (WHOLE, SHORT))
    assert short.all()
    assert whole.shape == (WHOLE.rows, WHOLE.ticks)
    changing = whole[~whole.all(1)]
    assert 1 < len(changing) < WHOLE.rows / 2
    assert (changing.diff(dim=1).sum(1) <= 2).all()


def test_texts_without_timestamps_hold_whole_sentences(pool):
    num_plain = 0
    for ids, labels, _, frames, _, start in rows_of(draw(pool, WHOLE)):
        if ids[start + 3 : start + 4] == [NO_TIMESTAMPS_ID] and labels[start] != NO_SPEECH_ID:
            num_plain += 1
            assert max(labels[start + 3 : -1]) < END_ID
            said = frames[frames.nonzero()].flatten()
            last = said[-1].item() - 1
            assert labels[-2] == last
    assert num_plain > 3


def test_silence_is_labelled_as_no_speech(pool):
    silent = [
        row for seed in range(6) for row in rows_of(draw(pool, SHORT, seed)) if row[1][0] == NO_SPEECH_ID
    ]
    assert silent
    for ids, labels, _, frames, _, _ in silent:
        assert not frames.any()
        timestamps = ids[3] != NO_TIMESTAMPS_ID
        expected = [FIRST_TIMESTAMP_ID, END_ID] if timestamps else [END_ID]
        assert [label for label in labels[1:] if label != IGNORED] == expected


def test_previous_text_counts_for_nothing(pool):
    windows = draw(pool, WHOLE)
    conditioned = [row for row in rows_of(windows) if row[0][0] == PREVIOUS_ID]
    assert 0 < len(conditioned) < WHOLE.rows
    for ids, labels, spans, _, _, start in conditioned:
        assert 1 < start <= 224
        assert START_ID not in ids[:start]
        assert set(labels[:start]) == {IGNORED}
        assert not spans[: start - 1].any()


def test_features_are_finite_and_scaled(pool):
    for shape in (SHORT, WHOLE):
        features = draw(pool, shape).features
        assert features.shape == (shape.rows, 80, 2 * shape.ticks)
        assert features.isfinite().all()
        assert features.abs().max() < 4


def test_resampling_keeps_a_tone():
    seconds = np.arange(441 * 100) / 22050
    tone = (10000 * np.sin(2 * np.pi * 1000 * seconds)).astype(np.int16)
    expected = 10000 * np.sin(2 * np.pi * 1000 * np.arange(TICK_SAMPLES * 100) / 16000)
    assert np.abs(resample(torch.from_numpy(tone)).numpy() - expected).max() < 3


def test_forward_is_transformers(pool):
    windows = draw(pool, WindowShape(2, 1500, 4, 64))
    model = build_model().eval()
    with torch.no_grad():
        expected = model(input_features=windows.features, decoder_input_ids=windows.input_ids).logits
        encoded = encode(model, windows.features, windows.positions)
        hidden, _ = decode(model, windows.input_ids, encoded)
        assert (hidden @ model.proj_out.weight.T - expected).abs().max() < 1e-4


def test_attention_loss_is_the_cross_entropy_with_an_even_spread():
    torch.manual_seed(0)
    head = Attention(torch.randn(2, 3, 64), torch.randn(2, 7, 64))
    spans = torch.tensor([[[0, 2], [3, 7], [0, 0]], [[-2, 2], [5, 9], [1, 2]]])
    labels = torch.tensor([[5, 6, 7], [8, IGNORED, 9]])
    logprobs = (head.queries @ head.keys.transpose(1, 2) / 8).log_softmax(2)
    parts = [logprobs[0, 0, 0:2], logprobs[0, 1, 3:7], logprobs[1, 0, 0:2], logprobs[1, 2, 1:2]]
    expected = -torch.stack([part.mean() for part in parts]).mean()
    assert torch.allclose(attention_loss(head, spans, labels), expected, atol=1e-5)


def test_a_step_of_training_lowers_the_losses(pool):
    windows = draw(pool, WindowShape(4, 100, 1, 32))
    trainee = Trainee(build_model())
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=1e-3)
    before = trainee(windows)
    sum(before).backward()
    optimizer.step()
    after = trainee(windows)
    assert all(new < old for new, old in zip(after, before, strict=True))
