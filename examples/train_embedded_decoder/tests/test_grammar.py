"""The grammar's promises: a split that holds, answers that are right, segments that tokenize like the whole."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[1]
SHIPPED = FOLDER.parents[1] / "plugins" / "model_states_decoder" / "embedded_model"
sys.path.insert(0, str(FOLDER))

from data import batches  # noqa: E402
from grammar import documents, heldout_examples, is_heldout, make_example, shipped_examples  # noqa: E402
from tasks import CHECKED  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.mark.parametrize("task", CHECKED)
def test_splits_share_no_key(task):
    rng = random.Random(1)
    trained = [make_example(rng, task, chat, heldout=False).key for chat in (False, True) for _ in range(100)]
    assert not any(key and is_heldout(key) for key in trained)
    assert all(is_heldout(example.key) for example in heldout_examples(task))


def test_heldout_examples_are_the_same_each_time():
    assert heldout_examples("sort") == heldout_examples("sort")


def test_a_sum_and_its_swap_are_on_one_side():
    for example in heldout_examples("sum", 50):
        if not example.chat:
            a, b = (int(part) for part in example.prompt.removesuffix(" =").split(" + "))
            assert int(example.answer) == a + b
            assert example.key == f"sum:{min(a, b)}+{max(a, b)}"


def test_shipped_file_is_the_grammars():
    rows = json.loads((SHIPPED / "heldout.json").read_text())
    examples = shipped_examples()
    assert [(r["task"], r["chat"], r["prompt"], r["answer"]) for r in rows] == [
        (e.task, e.chat, e.prompt, e.answer) for e in examples
    ]


def test_segments_tokenize_like_the_whole(tokenizer):
    for document in itertools.islice(documents(5), 500):
        parts = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in document]
        whole = tokenizer.encode("".join(text for text, _ in document), add_special_tokens=False).ids
        assert list(itertools.chain(*parts)) == whole


def test_rows_start_with_a_document_and_padding_weighs_nothing(tokenizer):
    pad = tokenizer.token_to_id("<|pad|>")
    ids, weights = next(batches(tokenizer, documents(2), 4, 513))
    assert ids.shape == weights.shape == (4, 513)
    assert (weights[ids == pad] == 0).all()
    assert (ids[:, 0] != pad).all()
