"""What the hybrid's training promises: a forward that is transformers' own, and recall whose split holds."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1]
SHIPPED = FOLDER.parents[1] / "plugins" / "model_states_mamba" / "embedded_model"
sys.path.insert(0, str(FOLDER))

import paths  # noqa: E402
from distant import (  # noqa: E402
    DISTANCES,
    distant_document,
    distant_examples,
    hybrid_documents,
    measured_distance,
    scatter,
)
from grammar import is_heldout, shipped_examples  # noqa: E402
from hybrid_model import build_config, build_model  # noqa: E402
from ssd import train_in_chunks  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import BambaForCausalLM  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(paths.DECODER_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def pair(tokenizer):
    """The model that is trained, and transformers' own with the same weights; no parameter has its first value."""
    torch.manual_seed(1)
    ours = build_model(tokenizer, torch.device("cpu"))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    theirs = BambaForCausalLM._from_config(build_config(tokenizer), dtype=torch.float32)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("length", [64, 320])
def test_the_chunked_forward_is_transformers_own(pair, length):
    ours, theirs = pair
    ids = torch.randint(2048, (2, length), generator=torch.Generator().manual_seed(length))
    logits, want = (model(ids, use_cache=False).logits for model in (ours, theirs))
    assert want.abs().max() > 1
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_and_so_are_its_gradients(pair):
    ids = torch.randint(2048, (1, 192), generator=torch.Generator().manual_seed(0))
    for model in pair:
        model.zero_grad()
        model(ids, use_cache=False).logits.square().mean().backward()
    for (name, mine), theirs in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
        assert theirs.grad.norm() > 0, name
        error = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-4, f"{name}: {error}"


def test_what_it_would_compute_wrongly_is_refused(tokenizer):
    config = build_config(tokenizer)
    config.time_step_limit = (0.0, 1.0)
    mixer = BambaForCausalLM._from_config(config, dtype=torch.float32).model.layers[0].mamba
    with pytest.raises(ValueError, match=r"BambaMixer has 1 groups and a time step limit of 0.0 to 1.0"):
        train_in_chunks([mixer], 64)


def test_values_of_the_two_splits_differ():
    rng = random.Random(2)
    for heldout in (False, True):
        for _ in range(40):
            assert is_heldout("distant:" + str(scatter(rng, 100, heldout).values)) == heldout


def test_a_question_stands_about_its_distance_behind_the_value(tokenizer):
    for distance in DISTANCES:
        for example in distant_examples(distance, 6):
            assert distance - 16 < measured_distance(tokenizer, example) < distance + 80
            name = example.prompt.rstrip("?").removesuffix(" ->").split(" ")[-1]
            lines = [line for line in example.prompt.split("\n") if line.startswith(name + ": ")]
            assert lines == [f"{name}: {example.answer}"]


def test_the_shipped_file_is_the_grammars():
    rows = json.loads((SHIPPED / "heldout.json").read_text())
    examples = shipped_examples() + [e for d in DISTANCES for e in distant_examples(d, 2, seed=1)]
    assert [(r["task"], r["chat"], r["prompt"], r["answer"]) for r in rows] == [
        (e.task, e.chat, e.prompt, e.answer) for e in examples
    ]


def test_distant_examples_are_the_same_each_time():
    assert distant_examples(128, 4) == distant_examples(128, 4)


def test_distant_documents_fit_a_row_and_tokenize_like_the_whole(tokenizer):
    rng = random.Random(3)
    longest = 0
    for heldout in itertools.islice(itertools.cycle((False, False, True)), 60):
        document = distant_document(rng, heldout)
        parts = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in document]
        whole = tokenizer.encode("".join(text for text, _ in document), add_special_tokens=False).ids
        assert list(itertools.chain(*parts)) == whole
        longest = max(longest, len(whole))
    assert 1024 < longest < 2048


def test_distant_documents_are_among_the_others():
    texts = ["".join(text for text, _ in document) for document in itertools.islice(hybrid_documents(1), 400)]
    assert all(text.endswith("<|endoftext|>") for text in texts)
    assert 4 < sum("recall" in text or "Remember this." in text for text in texts) < 60
