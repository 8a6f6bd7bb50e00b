"""Sentences as they are written and as they are said, from a seed; split into training and held-out by a hash.

A template is a string whose words may be `written|said`, with `_` for spaces in what is said: numbers are written in
digits and said in words.
"""

import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lexicon import (
    ANIMALS,
    CHORES,
    CITIES,
    COLOURS,
    COUNTED,
    DAYS,
    DEVICES,
    DIGIT_NAMES,
    FOODS,
    MOMENTS,
    MONEY,
    MONTHS,
    MOVES,
    NAMES,
    OPENINGS,
    ORDINALS,
    OTHERS,
    PAST_ACTIONS,
    PAST_MOMENTS,
    PEOPLE,
    PLACEMENTS,
    PLACES,
    ROOMS,
    SITUATIONS,
    SUBJECTS,
    TEENS,
    TENS,
    THINGS,
    TRAITS,
    UNITS,
    WEATHER,
)

HELDOUT_SHARE = 16  # one sentence in so many is held out
STRANGE_SHARE = 0.25  # of training sentences have a word that does not fit


class Sentence(NamedTuple):
    """Words as they are written, and for each what is said, one word or several."""

    written: tuple[str, ...]
    said: tuple[str, ...]

    @property
    def text(self) -> str:
        """What the model is to write."""
        return " ".join(self.written)


def is_heldout(text: str) -> bool:
    """Which side of the split a text is on: a function of the text alone, so no list has to be kept."""
    return zlib.crc32(text.encode()) % HELDOUT_SHARE == 0


def cardinal(n: int) -> str:
    """A number from 0 to 9999 in words: 345 is "three hundred and forty five"."""
    if n >= 1000:
        rest = n % 1000
        joint = " and " if 0 < rest < 100 else " "
        return f"{cardinal(n // 1000)} thousand" + (joint + cardinal(rest) if rest else "")
    if n >= 100:
        return f"{DIGIT_NAMES[n // 100]} hundred" + (f" and {cardinal(n % 100)}" if n % 100 else "")
    if n >= 20:
        return TENS[n // 10] + (f" {DIGIT_NAMES[n % 10]}" if n % 10 else "")
    return TEENS[n - 10] if n >= 10 else DIGIT_NAMES[n]


def ordinal(n: int) -> str:
    """A day of the month in words: 23 is "twenty third"."""
    if n <= 20:
        return ORDINALS[n - 1]
    return "thirtieth" if n == 30 else f"{TENS[n // 10]} {ORDINALS[n % 10 - 1]}"


def year(n: int) -> str:
    """A year from 1800 to 2099 in words."""
    if 2000 <= n < 2010:
        return "two thousand" + (f" and {DIGIT_NAMES[n % 10]}" if n % 10 else "")
    first, rest = divmod(n, 100)
    if rest == 0:
        return f"{cardinal(first)} hundred"
    return f"{cardinal(first)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def _pair(written: object, said: str) -> str:
    return f"{written}|{said.replace(' ', '_')}"


def number(rng: random.Random, largest: int = 999) -> str:
    """A whole number from 2; small ones are as likely as large ones."""
    n = rng.randint(2, max(2, min(largest, 10 ** rng.randint(1, 4) - 1)))
    return _pair(n, cardinal(n))


def decimal(rng: random.Random) -> str:
    """A number with one digit behind the point."""
    whole, part = rng.randint(0, 60), rng.randint(1, 9)
    return _pair(f"{whole}.{part}", f"{cardinal(whole)} point {DIGIT_NAMES[part]}")


def digits(rng: random.Random) -> str:
    """A code of three to seven digits, said digit by digit."""
    code = str(rng.randint(0, 9))
    for _ in range(rng.randint(2, 6)):
        code += code[-1] if rng.random() < 0.2 else str(rng.randint(0, 9))
    return _pair(code, " ".join(DIGIT_NAMES[int(digit)] for digit in code))


def clock(rng: random.Random) -> str:
    """A time of day."""
    hour, minute = rng.randint(1, 12), rng.choice((0, 0, rng.randint(1, 59), rng.choice((15, 30, 45))))
    said = "o'clock" if minute == 0 else f"{'oh ' if minute < 10 else ''}{cardinal(minute)}"
    return _pair(f"{hour}:{minute:02}", f"{cardinal(hour)} {said}")


def date(rng: random.Random) -> str:
    """A day of the year in one of two orders, sometimes with the year."""
    month, day = rng.choice(MONTHS), rng.randint(1, 31)
    if rng.random() < 0.5:
        text = f"{month} {_pair(day, ordinal(day))}"
    else:
        text = f"{_pair(day, f'the {ordinal(day)} of')} {month}"
    if rng.random() < 0.4:
        n = rng.randint(1800, 2060)
        text += f" {_pair(n, year(n))}"
    return text


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


Make = Callable[[random.Random], str]
_SLOTS: dict[str, Make] = {
    "name": lambda rng: rng.choice(NAMES),
    "room": lambda rng: rng.choice(ROOMS),
    "device": lambda rng: rng.choice(DEVICES),
    "opening": lambda rng: rng.choice(OPENINGS),
    "place": lambda rng: rng.choice(PLACES),
    "city": lambda rng: rng.choice(CITIES),
    "animal": lambda rng: rng.choice(ANIMALS),
    "a_animal": lambda rng: _a(f"{rng.choice(TRAITS)} {rng.choice(ANIMALS)}"),
    "person": lambda rng: rng.choice(PEOPLE),
    "thing": lambda rng: rng.choice(THINGS),
    "a_thing": lambda rng: _a(f"{rng.choice(COLOURS + TRAITS)} {rng.choice(THINGS)}"),
    "the_thing": lambda rng: f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}",
    "food": lambda rng: rng.choice(FOODS),
    "foods": lambda rng: " and ".join(rng.sample(FOODS, 2)),
    "colour": lambda rng: rng.choice(COLOURS),
    "trait": lambda rng: rng.choice(TRAITS),
    "weather": lambda rng: " and ".join(rng.sample(WEATHER, rng.randint(1, 2))),
    "day": lambda rng: rng.choice(DAYS),
    "subject": lambda rng: rng.choice(SUBJECTS),
    "did": lambda rng: rng.choice(PAST_ACTIONS),
    "moved": lambda rng: rng.choice(MOVES),
    "was": lambda rng: rng.choice(SITUATIONS),
    "where": lambda rng: rng.choice(PLACEMENTS),
    "chore": lambda rng: rng.choice(CHORES),
    "moment": lambda rng: rng.choice(MOMENTS),
    "past": lambda rng: rng.choice(PAST_MOMENTS),
    "unit": lambda rng: rng.choice(UNITS),
    "money": lambda rng: rng.choice(MONEY),
    "counted": lambda rng: rng.choice(COUNTED),
    "n": lambda rng: number(rng),
    "big": lambda rng: number(rng, 9999),
    "few": lambda rng: number(rng, 59),
    "decimal": decimal,
    "digits": digits,
    "clock": clock,
    "date": date,
    "list": lambda rng: ", ".join(rng.sample(OTHERS + THINGS + ANIMALS, rng.randint(2, 5))),
    "numbers": lambda rng: ", ".join(number(rng, 9999) for _ in range(rng.randint(2, 4))),
}

TEMPLATES = (
    "Turn on the {device} in the {room}.",
    "Turn off the {device} in the {room} at {clock}.",
    "Please close the {opening} in the {room}.",
    "Open the {opening}, please.",
    "Set a timer for {few} minutes.",
    "Set the {device} to {n} {unit}.",
    "Wake me up at {clock} on {day}.",
    "Remind me to {chore} {moment}.",
    "Do not forget to {chore} on {day}.",
    "Add {foods} to the shopping list.",
    "Call {name} at {clock}.",
    "Send a message to {name} and {name}.",
    "Play some music in the {room}.",
    "Stop the {device} now.",
    "What is the weather in {city} {moment}?",
    "How many {counted} are there in the {place}?",
    "Where is the nearest {place}?",
    "When does the train to {city} leave?",
    "Who {did} {the_thing}?",
    "Can you help me with the {thing}?",
    "The code is {digits}.",
    "My phone number is {digits}.",
    "The number of the ticket is {digits}.",
    "The codes are {digits} and {digits}.",
    "It is {clock} now.",
    "The {place} opens at {clock} and closes at {clock}.",
    "The number of the room is {n}.",
    "The answer is {big}.",
    "The temperature is {decimal} degrees.",
    "It costs {n} {money}.",
    "The {thing} costs {few} {money} and the {thing} costs {n} {money}.",
    "There are {n} {counted} in the {place}.",
    "The {place} is {decimal} {unit} from the {place}.",
    "We need {few} {counted} and {few} {counted}.",
    "The meeting is on {date} at {clock}.",
    "{name} was born on {date}.",
    "The train to {city} leaves at {clock} from platform {few}.",
    "Today is {day}, {date}.",
    "It was {weather} in {city} {past}.",
    "It will be {weather} on {day}.",
    "{name} {did} {the_thing} {past}.",
    "The {person} {did} {a_thing} {where} the {place}.",
    "The {trait} {person} {moved} to the {place} {past}.",
    "{name} and {name} {moved} from {city} to {city}.",
    "The {animal} {was} {where} the {thing}.",
    "I saw {a_animal} {where} the {place}.",
    "My {person} likes {foods}.",
    "I would like some {food} and {a_thing}.",
    "The {person} gave {a_thing} to {name}.",
    "{name} is learning {subject} with {name}.",
    "We will {chore} {moment}.",
    "She has {few} {counted} and {a_animal}.",
    "The {colour} {thing} is {where} the {colour} {thing}.",
    "They {moved} {n} {unit} {past}.",
    "Yes, {name} is here.",
    "No, that is not the {thing}.",
    "Thank you, {name}.",
    "Good morning, {name}.",
    "The words are {list}.",
    "Repeat after me, {list}.",
    "The numbers are {numbers}.",
)


_ANY = sorted(
    word
    for words in (
        NAMES, CITIES, DAYS, MONTHS, ROOMS, DEVICES, OPENINGS, PLACES, ANIMALS, PEOPLE, THINGS, FOODS, COLOURS, TRAITS,
        WEATHER, SUBJECTS, PAST_ACTIONS, MOVES, UNITS, MONEY, COUNTED, OTHERS,
    )
    for word in words
    if " " not in word
)  # fmt: skip


def make_strange(rng: random.Random, marked: str) -> str:
    """Put any word in place of one: who only knows what fits would not hear what is said."""
    words = marked.split()
    place = rng.randrange(1, len(words))
    end = words[place][len(words[place].rstrip(".,?")) :]
    return " ".join([*words[:place], rng.choice(_ANY) + end, *words[place + 1 :]])


def fill(rng: random.Random, template: str) -> str:
    """A template with its slots filled."""
    return re.sub(r"\{(\w+)\}", lambda match: _SLOTS[match[1]](rng), template)


def parse(marked: str) -> Sentence:
    """The two sides of a filled template; punctuation stands on both."""
    written, said = [], []
    for word in marked.split():
        left, bar, right = word.partition("|")
        end = right[len(right.rstrip(".,?")) :]
        written.append(left + end)
        said.append(right.replace("_", " ") if bar else left)
    return Sentence(tuple(written), tuple(said))


def sentences(seed: int | str, heldout: bool = False) -> Iterator[Sentence]:
    """An endless stream of sentences of one side of the split; those to train on are strange at times."""
    rng = random.Random(seed)
    while True:
        marked = fill(rng, rng.choice(TEMPLATES))
        if not heldout and rng.random() < STRANGE_SHARE:
            marked = make_strange(rng, marked)
        sentence = parse(marked)
        if is_heldout(sentence.text) == heldout:
            yield sentence


if __name__ == "__main__":
    for _, _sentence in zip(range(int(sys.argv[1]) if len(sys.argv) > 1 else 20), sentences(0), strict=False):
        print(f"{_sentence.text}   <- {' '.join(_sentence.said)}")
