"""The words that the embedded Whisper knows; all of it written for this repository.

Of words that sound alike only one is here ("son" would be "sun" to a listener without the sense of a sentence);
"to", "two", "for" and "four" are told apart by their places.
"""


def _words(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


NAMES = _words(
    "Anna Ben Clara Daniel Ella Frank Grace Henry Iris Jack Kate Leo Martha Nora Oscar Paul Robert Sarah Thomas "
    "Victor Wendy George Emma David"
)

ROOMS = _words("kitchen|bedroom|bathroom|garage|garden|office|hallway|living room|basement|library", "|")

DEVICES = _words("light|lamp|heater|radio|fan|television|oven|music|alarm|computer|camera|door bell", "|")

OPENINGS = _words("window|door|gate|curtain|cupboard|drawer", "|")

PLACES = _words(
    "station|market|school|hospital|museum|airport|bakery|bridge|beach|forest|river|village|castle|harbour|hotel|"
    "church|park|farm|theatre|lake|mountain|city|island|bank",
    "|",
)

CITIES = _words(
    "London Paris Berlin Madrid Dublin Vienna Oslo Boston Chicago Toronto Sydney Lisbon Athens Cairo"
)

ANIMALS = _words("dog cat horse rabbit fox bird mouse cow duck sheep lion tiger elephant spider frog goat")

PEOPLE = _words(
    "farmer|teacher|doctor|sailor|baker|painter|driver|singer|student|soldier|gardener|nurse|captain|lawyer|"
    "brother|sister|mother|father|uncle|neighbour|friend|children|old man|young woman",
    "|",
)

THINGS = _words(
    "book letter box basket bottle chair table ladder hammer bicycle umbrella blanket candle mirror pencil picture "
    "suitcase ticket clock cup plate knife spoon key coat hat shirt bag phone camera guitar drum ball rope"
)

FOODS = _words(
    "bread milk butter cheese rice sugar salt apples oranges bananas potatoes tomatoes onions carrots eggs coffee tea "
    "honey soup fish chicken chocolate lemons mushrooms"
)

COLOURS = _words("green yellow black white brown orange purple silver golden grey")

TRAITS = _words(
    "old small large happy quiet clever tired hungry brave famous strange heavy broken empty beautiful"
)

WEATHER = _words("sunny cloudy windy foggy rainy stormy warm cold")

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = _words("January February March April May June July August September October November December")

SUBJECTS = _words("history science music geography chemistry painting swimming dancing cooking")

PAST_ACTIONS = _words(
    "found|carried|painted|dropped|repaired|lost|washed|forgot|borrowed|cleaned|opened|sold|stole|moved|covered",
    "|",
)

MOVES = _words("walked|travelled|drove|ran|returned|hurried|sailed|climbed|wandered", "|")

SITUATIONS = _words("slept|waited|played|laughed|worked|danced|was hiding|was singing|was sitting", "|")

PLACEMENTS = _words("under|behind|beside|near|in front of|on top of|inside", "|")

CHORES = _words(
    "water the plants|feed the cat|call the dentist|buy a ticket|clean the kitchen|send the letter|pay the bill|"
    "wash the car|cook the dinner|walk the dog|visit the doctor|finish the report|charge the phone|"
    "collect the parcel|lock the door",
    "|",
)

MOMENTS = _words(
    "today|tomorrow|tonight|this morning|this evening|this afternoon|next week|after lunch|at noon", "|"
)

PAST_MOMENTS = _words(
    "yesterday|last night|last week|last summer|in the morning|before breakfast|a long time ago", "|"
)

UNITS = _words("metres|kilometres|miles|kilograms|litres|degrees|percent", "|")

MONEY = _words("dollars|euros|pounds|cents", "|")

COUNTED = _words(
    "books|chairs|bottles|tickets|horses|windows|letters|people|students|boxes|pictures|bridges", "|"
)

OTHERS = _words(
    "water fire stone paper metal glass summer winter spring autumn north south east west left question answer "
    "evening number circle square corner shadow thunder flower desert valley engine button needle pocket planet "
    "rocket journey secret treasure magic simple narrow perfect early later never always sometimes"
)
"""Words that only lists use, so that sound alone says what they are."""

DIGIT_NAMES = _words("zero one two three four five six seven eight nine")

TEENS = _words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")

TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")

ORDINALS = _words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
