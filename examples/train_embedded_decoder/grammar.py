"""Training and held-out text: documents drawn from the tasks and stories, split by a hash of their content.

A document is a list of segments. Each segment is tokenized by itself, which gives the tokens of the whole
because a segment never ends inside a word, and weighs its tokens in the loss: answers and stories count in
full, prompts little (a random number cannot be predicted, and a small model should not try).
"""

import random
import sys
import zlib
from collections.abc import Iterator

from stories import make_story
from tasks import CHECKED, Example, make_talk
from words import ANIMALS

END = "<|endoftext|>"
PROMPT_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0
HELDOUT_SHARE = 16  # one key in so many is held out
STORY_SHARE, CHAT_SHARE = 0.13, 0.45

Segment = tuple[str, float]
Document = list[Segment]

_NAMES = list(CHECKED)
_SHARES = [share for _, share in CHECKED.values()]


def is_heldout(key: str) -> bool:
    """Which side of the split a key is on: a function of the key alone, so no list has to be kept."""
    return zlib.crc32(key.encode()) % HELDOUT_SHARE == 0


def make_example(rng: random.Random, task: str, chat: bool, heldout: bool) -> Example:
    """An example on the asked side of the split: draw until one is."""
    generator = CHECKED[task][0]
    while True:
        example = generator(rng, chat)
        if example.key is None:
            if not heldout:
                return example
        elif is_heldout(example.key) == heldout:
            return example


def text_prompt(example: Example) -> str:
    """What is handed to the model, chat markup included (chat_template.jinja renders the same)."""
    if not example.chat:
        return example.prompt
    return f"<|im_start|>user\n{example.prompt}<|im_end|>\n<|im_start|>assistant\n"


def turn(message: str, answer: str) -> Document:
    """A user's message and the answer to it, with the markup of chat_template.jinja."""
    return [
        ("<|im_start|>user\n", 0.0),
        (message, PROMPT_WEIGHT),
        ("<|im_end|>\n<|im_start|>assistant\n", 0.0),
        (answer + "<|im_end|>", ANSWER_WEIGHT),
        ("\n", 0.0),
    ]


def _chat_document(rng: random.Random, heldout: bool) -> Document:
    document: Document = []
    if rng.random() < 0.15:
        system = rng.choice(
            ("You are a helpful assistant.", "You are a small and friendly model.", "Be brief.")
        )
        document.append((f"<|im_start|>system\n{system}<|im_end|>\n", 0.0))
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not heldout and rng.random() < 0.08:
            example = make_talk(rng, True)
        else:
            example = make_example(rng, rng.choices(_NAMES, _SHARES)[0], True, heldout)
        document += turn(example.prompt, example.answer)
    return document


def _story(rng: random.Random, animal: str | None, heldout: bool) -> str:
    while True:
        text, key = make_story(rng, animal)
        if is_heldout(key) == heldout:
            return text


def story_document(rng: random.Random, heldout: bool) -> Document:
    """A story by itself, or as the answer to a wish for one."""
    if rng.random() < 0.65:
        return [(_story(rng, None, heldout), ANSWER_WEIGHT)]
    animal = rng.choice(ANIMALS)
    article = "an" if animal[0] in "aeiou" else "a"
    about = rng.choice((f" about {article} {animal}", f" about {article} {animal}", ""))
    wish = rng.choice(("Tell me a story", "Write a story", "Please tell me a story", "Tell me a short story"))
    text = _story(rng, animal if about else None, heldout)
    return turn(wish + about + rng.choice((".", ".", "")), text)


def _text_document(rng: random.Random, heldout: bool) -> Document:
    task = rng.choices(_NAMES, _SHARES)[0]
    document: Document = []
    for _ in range(1 if task == "recall" else rng.choice((1, 1, 2, 4))):
        example = make_example(rng, task, False, heldout)
        document += [(example.prompt, PROMPT_WEIGHT), (f" {example.answer}\n", ANSWER_WEIGHT)]
    return document


def documents(seed: int, heldout: bool = False) -> Iterator[Document]:
    """An endless stream of documents; every one ends in the end-of-text token."""
    rng = random.Random(seed)
    while True:
        draw = rng.random()
        if draw < STORY_SHARE:
            document = story_document(rng, heldout)
        elif draw < STORY_SHARE + CHAT_SHARE:
            document = _chat_document(rng, heldout)
        else:
            document = _text_document(rng, heldout)
        yield [*document, (END, ANSWER_WEIGHT)]


def stories(seed: int, heldout: bool) -> Iterator[Document]:
    """Stories alone, as plain text: what the held-out loss of prose is measured on."""
    rng = random.Random(seed)
    while True:
        yield [(_story(rng, None, heldout), ANSWER_WEIGHT), (END, ANSWER_WEIGHT)]


def heldout_examples(task: str, count: int = 20, seed: int = 0) -> list[Example]:
    """The same held-out examples on every machine: half as text, half as chat, none twice.

    A task with few possible examples (the calendar) may give fewer than `count`.
    """
    rng = random.Random(f"heldout:{task}:{seed}")
    found: dict[str, Example] = {}
    for attempt in range(count * 20):
        example = make_example(rng, task, attempt % 2 == 1, heldout=True)
        found.setdefault(text_prompt(example), example)
        if len(found) == count:
            break
    return list(found.values())


def shipped_examples(per_task: int = 4, max_prompt_chars: int = 1200) -> list[Example]:
    """The held-out examples that the package ships: few enough to read, and every task in text and in chat."""
    chosen = []
    for task in CHECKED:
        short = [e for e in heldout_examples(task, 40, seed=1) if len(e.prompt) <= max_prompt_chars]
        kinds = ([e for e in short if not e.chat], [e for e in short if e.chat])
        chosen += [example for kind in kinds for example in kind[: (per_task + 1) // 2]]
    return chosen


if __name__ == "__main__":
    for _task in CHECKED:
        for _example in heldout_examples(_task, int(sys.argv[1]) if len(sys.argv) > 1 else 2):
            print(f"[{_task}] {text_prompt(_example)!r} -> {_example.answer!r}")
