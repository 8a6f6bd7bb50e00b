"""Word lists and small facts that the grammar draws from; all of it written for this repository."""


def _words(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split("|"))


NAMES = _words(
    "Ana Ben Clara Dan Ella Finn Grace Hugo Iris Jack Kate Leo Mira Noah Olga Paul Rosa Sam Tara Umar "
    "Vera Will Yara Zoe Adam Bella Carl Dora Emil Fay Gus Hana Ivan Jane Kim Lena Max Nina Oscar Pia "
    "Quinn Ruth Sven Tom Una"
)

ANIMALS = _words(
    "fox bear rabbit mouse owl cat dog horse duck frog hen goat sheep cow pig wolf deer otter beaver "
    "squirrel hedgehog badger crow swan goose turtle snail bee donkey pony"
)

PLACES = _words(
    "forest|village|old mill|river|harbour|meadow|lighthouse|castle|hill|garden|market|library|bakery|"
    "school|lake"
    "valley|farm|bridge|mountain|orchard",
    "|",
)

COLOURS = _words("red blue green yellow white black brown orange purple grey pink silver golden")

OBJECTS = _words(
    "kite ball hat book key lamp boat drum bell cup coat map stone coin ring basket spoon clock flute "
    "ladder blanket candle mirror wagon whistle brush box pencil scarf shell"
)

FOODS = _words(
    "apple pear plum bread soup cake cheese honey nut berry carrot pie milk egg rice bean corn melon"
)

TREATS = _words("bread soup cake cheese honey pie milk rice nuts berries apples plums carrots")

TRAITS = _words(
    "kind brave curious shy clever quiet cheerful patient small gentle proud lonely busy honest young"
)

WEATHER = _words("sunny rainy windy snowy foggy cold warm cloudy")

COMMON = _words(
    "apple river stone house garden window table chair bread water light night morning summer winter "
    "spring autumn paper letter music song dance story friend mother father sister brother teacher "
    "doctor farmer baker sailor king queen prince crown castle tower bridge road path forest tree leaf "
    "root flower grass seed cloud rain snow wind storm thunder sun moon star sky earth sand beach ocean "
    "wave island ship boat train wheel engine metal gold iron copper glass wood cotton silk shirt shoe "
    "button pocket needle thread knife fork plate bottle sugar salt pepper butter lemon orange grape "
    "cherry peach potato onion tomato garlic chicken turkey rabbit tiger lion zebra camel monkey "
    "elephant spider eagle parrot pigeon salmon whale dolphin shark planet rocket number circle square "
    "corner market street city country village valley desert jungle north south east west left right "
    "early late quick slow happy sad angry brave clever gentle honest simple narrow wide deep high low "
    "warm cold sharp heavy empty full open close begin finish listen speak write read learn think dream "
    "sleep wake walk run jump swim climb carry build break mend paint draw count measure follow gather "
    "answer question reason secret treasure journey picture pencil basket blanket candle mirror ladder "
    "hammer lantern whistle feather pebble shadow silver velvet"
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = _words("January February March April May June July August September October November December")

CAPITALS = _pairs(
    "France=Paris|Italy=Rome|Spain=Madrid|Germany=Berlin|Norway=Oslo|Sweden=Stockholm|Finland=Helsinki|"
    "Denmark=Copenhagen|Poland=Warsaw|Austria=Vienna|Greece=Athens|Portugal=Lisbon|Ireland=Dublin|"
    "Japan=Tokyo|China=Beijing|India=New Delhi|Egypt=Cairo|Kenya=Nairobi|Peru=Lima|Chile=Santiago|"
    "Canada=Ottawa|Cuba=Havana|Hungary=Budapest|Belgium=Brussels|Russia=Moscow|Thailand=Bangkok|"
    "England=London|Iceland=Reykjavik"
)

OPPOSITES = _pairs(
    "hot=cold|big=small|up=down|left=right|day=night|early=late|open=closed|full=empty|old=young|"
    "happy=sad|high=low|fast=slow|light=dark|wet=dry|strong=weak|rich=poor|near=far|long=short|"
    "wide=narrow|hard=soft|loud=quiet|clean=dirty|first=last|inside=outside|win=lose|true=false|"
    "black=white|north=south|east=west"
)

SOUNDS = _pairs(
    "dog=woof|cat=meow|cow=moo|sheep=baa|duck=quack|pig=oink|horse=neigh|frog=ribbit|bee=buzz|lion=roar|"
    "crow=caw|mouse=squeak|wolf=howl|hen=cluck"
)

YOUNG = _pairs(
    "dog=puppy|cat=kitten|cow=calf|sheep=lamb|duck=duckling|pig=piglet|horse=foal|frog=tadpole|bear=cub|"
    "goat=kid|hen=chick|deer=fawn|goose=gosling|swan=cygnet"
)

THING_COLOURS = _pairs(
    "sky=blue|grass=green|snow=white|banana=yellow|coal=black|blood=red|carrot=orange|chocolate=brown"
)

FIELDS = {
    "name": NAMES,
    "city": sorted(set(CAPITALS.values())),
    "pet": ANIMALS,
    "colour": COLOURS,
    "food": FOODS,
    "day": DAYS,
    "item": OBJECTS,
    "age": 99,
    "id": 9999,
    "count": 500,
}
"""JSON fields: a list of strings to choose from, or the largest integer."""

GREETINGS = ("Hello!", "Hello", "Hi", "Hi!", "Hey there", "Good morning!", "Good evening", "Hi there!")

INTRODUCTION = (
    "I am a very small language model that ships with core-runner for tests and first steps. "
    "I can do short sums, days and months, lists, small JSON objects and simple stories."
)

UNKNOWN = "I am a very small model, and I do not know that. Try a sum, a day of the week, a list or a story."

IDENTITY_QUESTIONS = (
    "Who are you?", "What are you?", "What can you do?", "What is your name?", "Tell me about yourself.",
    "Are you a person?", "How can you help me?", "Help", "What do you know?", "Introduce yourself.",
)  # fmt: skip

UNKNOWN_QUESTIONS = (
    "Who wrote {w}?", "What is the meaning of {w}?", "Explain {w} to me.", "How do I cook {w}?",
    "What is the price of {w}?", "Who invented the {w}?", "Why is {w} important?", "Write code for a {w}.",
    "Translate {w} into French.", "What is the history of {w}?",
    "How does a {w} work?", "When was the {w} built?",
    "What do you think about {w}?", "Can you recommend a good {w}?", "Who is the president of {w}?",
    "What is quantum {w}?", "How many {w}s are there in the world?", "Define {w}.",
)  # fmt: skip

FACTS: tuple[tuple[dict[str, str], str, str], ...] = (
    (
        CAPITALS,
        "What is the capital of {}?|Name the capital of {}.|Capital of {}?",
        "{1} is the capital of {0}.",
    ),
    (
        OPPOSITES,
        "What is the opposite of {}?|Name the opposite of {}.|Opposite of {}?",
        "{1} is the opposite of {0}.",
    ),
    (
        SOUNDS,
        "What does a {} say?|What sound does a {} make?|Which sound comes from a {}?",
        "A {0} says {1}.",
    ),
    (
        YOUNG,
        "What is a young {} called?|What is a baby {} called?|Name a baby {}.",
        "A young {0} is called a {1}.",
    ),
    (
        THING_COLOURS,
        "What colour is {}?|What color is {}?|Tell me the colour of {}.",
        "The colour of {0} is {1}.",
    ),
)
"""Subject -> answer tables, their phrasings (the first is always trained) and the sentence that answers."""
