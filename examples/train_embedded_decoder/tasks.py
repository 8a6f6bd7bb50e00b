"""The checkable tasks: each generator returns one example with the only right answer.

A generator writes its example either as a line of plain text ("12 + 30 =") or as a chat message ("What is
12 + 30?"). `key` names the content, not the phrasing, so that a held-out sum was seen in training in neither
form, and not with its operands swapped. Examples without a key are for training alone.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import words
from words import ANIMALS, COLOURS, COMMON, DAYS, FIELDS, FOODS, MONTHS, NAMES, OBJECTS


@dataclass(frozen=True)
class Example:
    """A prompt and the only right continuation of it.

    A text example continues with a space, the answer and a newline; a chat example's prompt is the message.
    """

    task: str
    prompt: str
    answer: str
    chat: bool
    key: str | None


def _number(rng: random.Random) -> int:
    """One, two or three digits: a uniform draw would almost never show a short number."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3)))


def pseudo_word(rng: random.Random, low: int = 1, high: int = 3) -> str:
    """A word of `low` to `high` syllables that is in no dictionary."""
    pairs = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(low, high))]
    return "".join(pairs) + rng.choice(("", "", "n", "r", "s", "t", "l", "k"))


def make_sum(rng: random.Random, chat: bool) -> Example:
    """a + b of up to three digits each."""
    a, b = _number(rng), _number(rng)
    key = f"sum:{min(a, b)}+{max(a, b)}"
    if not chat:
        return Example("sum", f"{a} + {b} =", str(a + b), False, key)
    asked = rng.choice(
        ("What is {} + {}?", "How much is {} plus {}?", "Add {} and {}.", "{} + {}", "{} + {} = ?")
    )
    return Example("sum", asked.format(a, b), f"{a} + {b} = {a + b}", True, key)


def make_difference(rng: random.Random, chat: bool) -> Example:
    """a - b with a >= b, so that no answer has a sign."""
    b, a = sorted((_number(rng), _number(rng)))
    key = f"difference:{a}-{b}"
    if not chat:
        return Example("difference", f"{a} - {b} =", str(a - b), False, key)
    asked = rng.choice(("What is {} - {}?", "How much is {} minus {}?", "{} - {}", "{} - {} = ?"))
    return Example("difference", asked.format(a, b), f"{a} - {b} = {a - b}", True, key)


def make_larger(rng: random.Random, chat: bool) -> Example:
    """The larger of two different numbers."""
    a = _number(rng)
    b = _number(rng)
    if a == b:
        b += 1
    key = f"larger:{min(a, b)},{max(a, b)}"
    if not chat:
        return Example("larger", f"larger: {a} or {b} ->", str(max(a, b)), False, key)
    asked = rng.choice(("Which is larger, {} or {}?", "Which number is bigger: {} or {}?"))
    return Example("larger", asked.format(a, b), str(max(a, b)), True, key)


def make_copy(rng: random.Random, chat: bool) -> Example:
    """Repeat words and numbers that no merge of the tokenizer has seen together."""
    items = [pseudo_word(rng) if rng.random() < 0.7 else str(_number(rng)) for _ in range(rng.randint(2, 12))]
    text = " ".join(items)
    if not chat:
        return Example("copy", f"copy: {text} ->", text, False, "copy:" + text)
    asked = rng.choice(("Repeat after me: {}", "Please repeat: {}", "Say this again: {}"))
    return Example("copy", asked.format(text), text, True, "copy:" + text)


def make_reverse(rng: random.Random, chat: bool) -> Example:
    """A word's letters backwards: the model must know how its tokens are spelt."""
    word = rng.choice(COMMON) if rng.random() < 0.4 else pseudo_word(rng, 2, 4)
    if not chat:
        return Example("reverse", f"reverse: {word} ->", word[::-1], False, "reverse:" + word)
    asked = rng.choice(("Spell {} backwards.", "Reverse the word {}.", "What is {} backwards?"))
    return Example("reverse", asked.format(word), word[::-1], True, "reverse:" + word)


def make_reverse_list(rng: random.Random, chat: bool) -> Example:
    """A list of words in the opposite order."""
    items = rng.sample(COMMON, rng.randint(2, 8))
    key = "reverse_list:" + " ".join(items)
    if not chat:
        return Example("reverse_list", f"backwards: {' '.join(items)} ->", " ".join(items[::-1]), False, key)
    asked = rng.choice(("Reverse this list: {}", "Put this list in the opposite order: {}"))
    return Example("reverse_list", asked.format(", ".join(items)), ", ".join(items[::-1]), True, key)


def make_sort(rng: random.Random, chat: bool) -> Example:
    """Numbers in ascending order; the key is the set, so no order of a held-out set is seen in training."""
    items = [_number(rng) for _ in range(rng.randint(3, 8))]
    ordered = [str(n) for n in sorted(items)]
    key = "sort:" + " ".join(ordered)
    texts = [str(n) for n in items]
    if not chat:
        return Example("sort", f"sort: {' '.join(texts)} ->", " ".join(ordered), False, key)
    asked = rng.choice(("Sort these numbers: {}", "Put these numbers in order: {}"))
    return Example("sort", asked.format(", ".join(texts)), ", ".join(ordered), True, key)


def make_sort_words(rng: random.Random, chat: bool) -> Example:
    """Words in alphabetical order."""
    items = rng.sample(COMMON, rng.randint(3, 7))
    ordered = sorted(items)
    key = "sort_words:" + " ".join(ordered)
    if not chat:
        return Example("sort_words", f"alphabetical: {' '.join(items)} ->", " ".join(ordered), False, key)
    asked = rng.choice(("Sort these words: {}", "Put these words in alphabetical order: {}"))
    return Example("sort_words", asked.format(", ".join(items)), ", ".join(ordered), True, key)


def make_count(rng: random.Random, chat: bool) -> Example:
    """How often one word stands in a short list."""
    word, *others = rng.sample(ANIMALS + FOODS, 4)
    items = [word if rng.random() < 0.4 else rng.choice(others) for _ in range(rng.randint(3, 10))]
    answer, text = str(items.count(word)), " ".join(items)
    key = f"count:{word}:{text}"
    if not chat:
        return Example("count", f"count {word}: {text} ->", answer, False, key)
    asked = f"How many times does {word} appear in this list: {', '.join(items)}?"
    return Example("count", asked, answer, True, key)


def make_calendar(rng: random.Random, chat: bool) -> Example:
    """Days and months some steps away; the one-step questions of a first user are for training alone."""
    unit, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    start, steps, sign = rng.randrange(len(names)), rng.randint(1, 30), rng.choice((1, -1))
    if chat and rng.random() < 0.25:
        steps = 1
    first, answer = names[start], names[(start + sign * steps) % len(names)]
    key = f"calendar:{first}:{sign * steps}"
    if not chat:
        return Example(
            "calendar", f"{unit}: {first} {'+' if sign > 0 else '-'} {steps} ->", answer, False, key
        )
    direction = "after" if sign > 0 else "before"
    if steps == 1:
        asked = rng.choice(
            (f"What {unit} comes {direction} {first}?", f"Which {unit} is {direction} {first}?")
        )
        return Example("calendar", asked, f"{answer} comes {direction} {first}.", True, None)
    asked = f"What {unit} is {steps} {unit}s {direction} {first}?"
    return Example("calendar", asked, f"{steps} {unit}s {direction} {first} is {answer}.", True, key)


def make_recall(rng: random.Random, chat: bool) -> Example:
    """One value out of 3 to 60 named ones: about 50 to 500 tokens between a value and its question."""
    keys = list({pseudo_word(rng, 2, 2): None for _ in range(rng.choice((4, 8, 12, 20, 30, 45)))})
    values = {key: str(rng.randrange(10, 1000)) if rng.random() < 0.6 else rng.choice(COMMON) for key in keys}
    asked = rng.choice(keys)
    table = "\n".join(f"{key}: {value}" for key, value in values.items())
    if not chat:
        return Example("recall", f"{table}\nrecall {asked} ->", values[asked], False, "recall:" + table)
    question = f"Here is a list.\n{table}\nWhat is the value of {asked}?"
    return Example("recall", question, values[asked], True, "recall:" + table)


def _record(rng: random.Random) -> dict[str, str | int]:
    names = rng.sample(list(FIELDS), rng.randint(2, 5))
    pools = [(name, FIELDS[name]) for name in names]
    return {name: rng.randint(1, pool) if isinstance(pool, int) else rng.choice(pool) for name, pool in pools}


def make_json(rng: random.Random, chat: bool) -> Example:
    """A small JSON object from a list of fields."""
    record = _record(rng)
    answer = json.dumps(record)
    fields = ", ".join(f"{name}={value}" for name, value in record.items())
    if not chat:
        return Example("json", f"json: {fields} ->", answer, False, "json:" + answer)
    asked = rng.choice(("Write this as JSON: {}", "Make a JSON object: {}", "Turn this into JSON: {}"))
    return Example("json", asked.format(fields), answer, True, "json:" + answer)


def make_json_read(rng: random.Random, chat: bool) -> Example:
    """One field out of a small JSON object."""
    record = _record(rng)
    field, text = rng.choice(list(record)), json.dumps(record)
    key = f"json_read:{field}:{text}"
    if not chat:
        return Example("json_read", f"{text} {field} ->", str(record[field]), False, key)
    return Example("json_read", f"What is the {field} in {text}?", str(record[field]), True, key)


def make_passage(rng: random.Random, chat: bool) -> Example:
    """Who has what: a question about a passage of two to five sentences."""
    count = rng.randint(2, 5)
    people, things = rng.sample(NAMES, count), rng.sample(OBJECTS, count)
    colours = [rng.choice(COLOURS) for _ in range(count)]
    verbs = [rng.choice(("has", "found", "bought", "lost")) for _ in range(count)]
    rows = list(zip(people, verbs, colours, things, strict=True))
    passage = " ".join(f"{who} {verb} the {colour} {thing}." for who, verb, colour, thing in rows)
    who, verb, colour, thing = rng.choice(rows)
    did = {"has": "have", "found": "find", "bought": "buy", "lost": "lose"}[verb]
    question, answer = rng.choice(
        (
            (f"Who {verb} the {thing}?", who),
            (
                f"What did {who} {did}?" if verb != "has" else f"What does {who} have?",
                f"the {colour} {thing}",
            ),
            (f"What colour is the {thing}?", colour),
        )
    )
    key = f"passage:{passage} {question}"
    if not chat:
        return Example("passage", f"{passage}\nQuestion: {question}\nAnswer:", answer, False, key)
    return Example("passage", f"{passage} {question}", answer, True, key)


def make_fact(rng: random.Random, chat: bool) -> Example:
    """A short fact. Facts cannot be held out, only phrasings of them; the first is always trained."""
    table, texts, sentence = rng.choice(words.FACTS)
    phrasings = texts.split("|")
    subject = rng.choice(list(table))
    phrasing = rng.randrange(len(phrasings))
    question, answer = phrasings[phrasing].format(subject), sentence.format(subject, table[subject])
    answer = answer[0].upper() + answer[1:]
    key = f"fact:{question}:{chat}" if phrasing else None
    if not chat:
        return Example("fact", f"Question: {question}\nAnswer:", answer, False, key)
    return Example("fact", question, answer, True, key)


def make_talk(rng: random.Random, chat: bool) -> Example:
    """Greetings, what this is, and honest answers to what it cannot know: training alone, always chat."""
    question, answer = rng.choice(
        (
            (rng.choice(words.GREETINGS), "Hello! How can I help you?"),
            (rng.choice(words.IDENTITY_QUESTIONS), words.INTRODUCTION),
            (rng.choice(("Thank you!", "Thanks", "Thanks!", "Thank you very much.")), "You are welcome!"),
            (rng.choice(("Goodbye", "Bye!", "Good night!", "See you later")), "Goodbye!"),
            (rng.choice(("How are you?", "How are you today?", "Are you well?")), "I am fine, thank you."),
            (rng.choice(words.UNKNOWN_QUESTIONS).format(w=rng.choice(COMMON)), words.UNKNOWN),
        )
    )
    return Example("talk", question, answer, True, None)


Generator = Callable[[random.Random, bool], Example]

CHECKED: dict[str, tuple[Generator, float]] = {
    "sum": (make_sum, 18),
    "difference": (make_difference, 10),
    "larger": (make_larger, 3),
    "copy": (make_copy, 4),
    "reverse": (make_reverse, 12),
    "reverse_list": (make_reverse_list, 4),
    "sort": (make_sort, 8),
    "sort_words": (make_sort_words, 8),
    "count": (make_count, 6),
    "calendar": (make_calendar, 8),
    "recall": (make_recall, 4),
    "json": (make_json, 4),
    "json_read": (make_json_read, 3),
    "passage": (make_passage, 5),
    "fact": (make_fact, 4),
}
"""Task -> its generator and its share of the training examples; harder tasks get more."""
