"""Readable short stories from templates: a hero, a lost thing, a helper, an ending.

Every choice is recorded, so that a story's key names it and the train and held-out splits cannot share one.
Names, objects and places come back later in a story: a model that loses track of its context shows it here.
"""

import random

from words import ANIMALS, COLOURS, NAMES, OBJECTS, PLACES, TRAITS, TREATS, WEATHER

OPENINGS = (
    "Once upon a time, there was a {trait} {animal} named {hero} who lived near the {home}.",
    "Once upon a time, a {trait} {animal} named {hero} lived by the {home}.",
    "Once upon a time, in a small house near the {home}, there lived a {trait} {animal} called {hero}.",
    "There was once a {trait} {animal} named {hero} who lived near the {home}.",
    "{hero} was a {trait} {animal} who lived close to the {home}.",
    "Long ago, a {trait} {animal} named {hero} made a home near the {home}.",
)

TREASURES = (
    "{hero} had a {colour} {thing} and took it everywhere.",
    "More than anything, {hero} loved a little {colour} {thing}.",
    "{hero}'s best friend {friend} had given {hero} a {colour} {thing}.",
    "Every day, {hero} played with a {colour} {thing}.",
)

TROUBLES = (
    "One {weather} day, the {thing} was gone.",
    "But one {weather} morning, {hero} could not find the {thing}.",
    "One {weather} evening, {hero} came home and saw that the {thing} was missing.",
    "Then, on a {weather} afternoon, {hero} lost the {thing} near the {place}.",
)

FEELINGS = (
    "{hero} was very sad.",
    "{hero} sat down and began to cry.",
    '"Oh no!" said {hero}. "Where is my {thing}?"',
    "{hero} looked under the bed and behind the door, but it was not there.",
    '"I must find it before dark," {hero} said.',
)

SEARCHES = (
    "So {hero} walked to the {place} to look for it.",
    "{hero} went to the {place} and asked everyone there.",
    "{hero} packed some {food} and set out for the {place}.",
    "All day long, {hero} searched the {place}.",
)

MEETINGS = (
    "There {hero} met {friend}, a {helper_trait} {helper}.",
    "At the {place}, a {helper_trait} {helper} named {friend} was waiting.",
    "A {helper_trait} {helper} called {friend} saw {hero} and came closer.",
)

TALKS = (
    '"Why are you so sad?" asked {friend}. "I have lost my {colour} {thing}," said {hero}.',
    '"Can I help you?" asked {friend}. "Yes, please," said {hero}. "I am looking for a {colour} {thing}."',
    '"Have you seen a {colour} {thing}?" asked {hero}. "Let us look together," said {friend}.',
)

FINDINGS = (
    "They looked behind a big stone, and there was the {colour} {thing}!",
    "{friend} climbed a tall tree and found the {thing} in a nest.",
    "{friend} pointed at the water. The {colour} {thing} was lying by the shore.",
    "Together they looked in every corner, and at last {friend} found the {thing} in an old box.",
    "Just before dark, {hero} saw something {colour} in the grass. It was the {thing}!",
)

THANKS = (
    '"Thank you, {friend}!" said {hero}. "You are a true friend."',
    "{hero} was so happy that they danced all the way home.",
    '{hero} smiled and said, "Let us share some {food}."',
    "{hero} gave {friend} some {food} to say thank you.",
)

ENDINGS = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "And {hero} never lost the {colour} {thing} again.",
    "That night, {hero} slept well, with the {thing} close by.",
    "They went back to the {home} and lived happily ever after.",
    "And so the {animal} and the {helper} learned that it is good to help each other.",
)

PARTS = (OPENINGS, TREASURES, TROUBLES, FEELINGS, SEARCHES, MEETINGS, TALKS, FINDINGS, THANKS, ENDINGS)
SLOTS = {
    "trait": TRAITS, "helper_trait": TRAITS, "colour": COLOURS, "thing": OBJECTS, "weather": WEATHER,
    "food": TREATS,
}  # fmt: skip


def make_story(rng: random.Random, animal: str | None = None) -> tuple[str, str]:
    """One story: its text and its key; `animal` fixes the hero's kind when a user asked for one."""
    hero, friend = rng.sample(NAMES, 2)
    first, helper = rng.sample(ANIMALS, 2)
    home, place = rng.sample(PLACES, 2)
    if animal is not None:
        first, helper = animal, rng.choice([other for other in ANIMALS if other != animal])
    slots = {name: rng.choice(values) for name, values in SLOTS.items()}
    slots |= {"hero": hero, "friend": friend, "animal": first, "helper": helper, "home": home, "place": place}
    lines = [rng.choice(part) for part in PARTS]
    if rng.random() < 0.3:
        del lines[3]  # the feeling is the one part that a story can do without
    text = " ".join(lines).format(**slots)
    return _fix_articles(text), "story:" + text


def _fix_articles(text: str) -> str:
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}").replace(f" A {vowel}", f" An {vowel}")
    return text
