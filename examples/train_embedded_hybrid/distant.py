"""Recall over a distance: a few named values, hundreds of tokens of stories between, and a question about one.

An attention layer sees the value for as long as its keys and values are kept; a recurrent layer has to carry it in
its state. Values are held out by a hash of all that is remembered, and so is every story between them.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import paths  # noqa: F401  (finds the decoder's modules)
from grammar import ANSWER_WEIGHT, END, PROMPT_WEIGHT, Document, documents, is_heldout, stories, turn
from tasks import Example, pseudo_word
from tokenizers import Tokenizer
from words import COMMON

DISTANCES = (64, 128, 256, 512, 1024, 1500)
"""Tokens between a value and its question, at which recall is measured."""
DISTANT_SHARE = 0.03  # of the documents; of the tokens about a fifth
CHARS_PER_TOKEN = 4.2  # of a story
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")


@dataclass(frozen=True)
class Scattered:
    """Values by name, and the text that they are scattered over; the first stands at its start."""

    values: dict[str, str]
    text: str


def _values(rng: random.Random, heldout: bool) -> dict[str, str]:
    while True:
        names = {pseudo_word(rng, 2, 2): None for _ in range(rng.randint(1, 6))}
        values = {
            name: str(rng.randrange(10, 1000)) if rng.random() < 0.6 else rng.choice(COMMON) for name in names
        }
        if is_heldout("distant:" + str(values)) == heldout:
            return values


def _sentences(rng: random.Random, chars: float, heldout: bool) -> list[str]:
    """Sentences of stories, together about so many characters."""
    found: list[str] = []
    for (text, _), _ in stories(rng.getrandbits(32), heldout):
        for sentence in _SENTENCE_END.split(text):
            if chars <= 0:
                return found
            found.append(sentence)
            chars -= len(sentence) + 1
    raise AssertionError("stories never end")


def scatter(rng: random.Random, num_tokens: float, heldout: bool) -> Scattered:
    """A few values over about `num_tokens` tokens."""
    values = _values(rng, heldout)
    first, *others = (f"{name}: {value}\n" for name, value in values.items())
    names_chars = sum(map(len, others))
    sentences = _sentences(rng, num_tokens * CHARS_PER_TOKEN - names_chars, heldout)
    places = sorted(rng.randrange(len(sentences) + 1) for _ in others)
    pieces, start = [first], 0
    for other, place in zip(others, places, strict=True):
        pieces += [" ".join(sentences[start:place]) + "\n" if place > start else "", other]
        start = place
    pieces.append(" ".join(sentences[start:]) + "\n" if start < len(sentences) else "")
    return Scattered(values, "".join(pieces))


def _message(scattered: Scattered, name: str) -> str:
    return f"Remember this.\n{scattered.text}What is the value of {name}?"


def distant_document(rng: random.Random, heldout: bool) -> Document:
    """Scattered values and one to four questions about them, as text or as chat."""
    scattered = scatter(rng, 24 * (1700 / 24) ** rng.random(), heldout)
    names = list(scattered.values)
    asked = rng.choices(names, k=rng.randint(1, 4))
    if rng.random() < 0.5:
        document: Document = [(scattered.text, PROMPT_WEIGHT)]
        for name in asked:
            document += [
                (f"recall {name} ->", PROMPT_WEIGHT),
                (f" {scattered.values[name]}\n", ANSWER_WEIGHT),
            ]
        return document
    document = turn(_message(scattered, asked[0]), scattered.values[asked[0]])
    for name in asked[1:]:
        document += turn(f"What is the value of {name}?", scattered.values[name])
    return document


def hybrid_documents(seed: int, heldout: bool = False) -> Iterator[Document]:
    """The embedded decoder's documents, and some with distant values among them; an endless stream."""
    rng = random.Random(f"distant:{seed}")
    for document in documents(seed, heldout):
        if rng.random() < DISTANT_SHARE:
            yield [*distant_document(rng, heldout), (END, ANSWER_WEIGHT)]
        yield document


def distant_examples(distance: int, count: int, seed: int = 0) -> list[Example]:
    """Held-out questions about the first value, about `distance` tokens after it: half text, half chat."""
    rng = random.Random(f"heldout:distant:{distance}:{seed}")
    examples = []
    for chat in itertools.islice(itertools.cycle((False, True)), count):
        scattered = scatter(rng, distance, heldout=True)
        name, value = next(iter(scattered.values.items()))
        prompt = _message(scattered, name) if chat else f"{scattered.text}recall {name} ->"
        examples.append(Example("distant", prompt, value, chat, "distant:" + str(scattered.values)))
    return examples


def measured_distance(tokenizer: Tokenizer, example: Example) -> int:
    """Tokens from the end of the first value to the end of the prompt's text."""
    value_end = example.prompt.index("\n", example.prompt.index(": ")) + 1
    return len(tokenizer.encode(example.prompt[value_end:], add_special_tokens=False).ids)
