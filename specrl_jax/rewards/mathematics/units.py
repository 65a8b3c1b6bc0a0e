"""Units and counted things that may stand after a number: the words that the reward `math` knows."""

import re
from typing import NamedTuple

Unit = tuple[tuple[str, int], ...]  # names with their powers, sorted: cm^2 is (("centimeter", 2),)

# One line a unit: its name, then other spellings.
_UNITS = """
meter metre m|centimeter centimetre cm|millimeter millimetre mm|kilometer kilometre km|inch inches in|foot feet ft
yard yd|mile mi|unit|gram g|kilogram kg|milligram mg|pound lb|ounce oz|ton tonne|liter litre L|milliliter ml mL
gallon gal|quart|pint|cup|second sec s|minute min|hour hr h|day|week|month|year yr|decade|century centuries
degree deg|radian rad|dollar USD usd|cent|euro EUR|rupee|yuan|yen|quarter|dime|nickel|penny pennies
percent|mph|kmh kph|newton|joule|watt|kilowatt|volt|ampere|hertz Hz|kelvin|pascal|mole
bit|byte|acre|hectare|calorie|digit|point|pt|bushel|teaspoon|tablespoon
"""
_THINGS = """
apple orange banana pear peach grape egg cookie cake pie pizza slice candy candies sandwich sandwiches cupcake muffin
people person man men woman women child children boy girl student teacher worker player friend member guest customer
passenger employee kid adult baby babies family families couple team class classes book page word letter chapter
pencil pen crayon marker paper sheet card stamp sticker ticket coin bill box boxes bag bottle can jar basket bucket
bowl plate glass glasses spoon piece part pair set group row column seat chair table room house building floor
car truck bus buses bike bicycle wheel tire boat train plane dog cat puppy puppies kitten cow chicken duck pig sheep
goat horse bird fish rabbit bee ant animal pet leg tree flower rose plant seed leaf leaves shirt shoe sock hat dress
marble ball balloon toy doll game match matches win goal medal stone rock shell bead block brick tile stick
way time arrangement combination permutation outcome possibility possibilities choice path route step move handshake
solution root integer number value pair triple subset element term factor divisor multiple prime zero
triangle rectangle circle line segment side edge vertex vertices face cube diagonal angle region term
question problem test exam lesson song movie video picture photo message email call trip lap mile job task shift order
""".replace("\n", " ")


_IRREGULAR = "person people|man men|woman women|child children|leaf leaves|vertex vertices|puppy puppies|baby babies"
_GROUPS = [line.split() for line in _UNITS.strip().replace("\n", "|").split("|")]
_NAMES = {word: word for word in _THINGS.split()}
_NAMES |= {word: group[0] for group in [*_GROUPS, *(pair.split() for pair in _IRREGULAR.split("|"))] for word in group}
_MEASURES = frozenset(group[0] for group in _GROUPS)
# Number words multiply what stands before them.
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SPELLINGS = [
    (r"\\text\{([^{}]*)\}", r" \1 "),
    (r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1 "),
    (r"\.", " "),
    (r"\b(?:square|sq) +([a-z]+)", r"\1^2"),
    (r"\b(?:cubic|cu) +([a-z]+)", r"\1^3"),
    (r"([a-z]) +squared\b", r"\1^2"),
    (r"([a-z]) +cubed\b", r"\1^3"),
    (r"\bper\b", "/"),
]


_CURRENCIES = {"\\$": "dollar", "\\euro": "euro", "\\pounds": "pound sterling"}
_BEFORE = re.compile(r"(-?)\s*(\\\$|\\euro|\\pounds)\s*(.*)", re.DOTALL)
_DEGREE = re.compile(r"(.*?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*([CF]?)", re.DOTALL)
_UNIT = r"\\text\{[^{}]*\}(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_AFTER = re.compile(rf"(.*?)\s*({_UNIT}(?:\s*(?:/\s*)?{_UNIT})*)", re.DOTALL)


class Quantity(NamedTuple):
    unit: Unit = ()
    known: bool = True  # whether all words are known
    scale: int = 1  # of "million"
    percent: bool = False


PLAIN = Quantity()


def split_unit(text: str) -> tuple[str, Quantity]:
    """Return what stands before percent, number words and unit, and these. Raises ValueError for half a unit."""
    if before := _BEFORE.fullmatch(text):  # "$5 per hour"
        front, quantity = split_unit(before[1] + before[3])
        if quantity.percent:
            raise ValueError("percent of a currency")
        return front, quantity._replace(unit=tuple(sorted([(_CURRENCIES[before[2]], 1), *quantity.unit])))
    for sign, name in _CURRENCIES.items():
        if text.endswith(sign):
            return text.removesuffix(sign), Quantity(((name, 1),))
    if percent := re.fullmatch(r"(.*?)\s*\\?%\s*", text, re.DOTALL):
        return percent[1], Quantity(percent=True)
    if (degree := _DEGREE.fullmatch(text)) and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return degree[1], Quantity(((f"degree{degree[2]}", 1),))
    after = _AFTER.fullmatch(text)
    return (after[1], _read_words(after[2])) if after else (text, PLAIN)


def _read_words(text: str) -> Quantity:
    """Read the words of "9 million people", "cm^2", "sq. feet", "miles per hour", "percent"."""
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
    scale, powers, known = 1, dict[str, int](), True
    if number := re.match(rf"\s*({'|'.join(SCALES)})s?\b", text, re.IGNORECASE):
        scale, text = SCALES[number[1].casefold()], text[number.end() :]
    if text.strip().casefold() in ("percent", "pct"):
        return Quantity(scale=scale, percent=True)
    parts = text.split("/") if text.strip() else []
    for i, part in enumerate(parts):
        if i == 0 and len(parts) > 1 and not part.strip():
            continue  # "$5 per hour"
        match = re.fullmatch(r"\s*([A-Za-z]+(?: +[A-Za-z]+)*)\s*(?:\^(-?\d))?\s*", part)
        if not match or any(word.casefold().removesuffix("s") in SCALES for word in match[1].split()):
            raise ValueError("no unit")
        powers[unit_name(match[1])] = (-1 if i else 1) * int(match[2] or 1)
        known &= is_unit(match[1])
    return Quantity(tuple(sorted(powers.items())), known, scale)


def is_unit(word: str) -> bool:
    """Return whether the word is known to follow a number: a unit, a counted thing, a number word."""
    return unit_name(word) in _NAMES or is_measure(word)


def is_measure(word: str) -> bool:
    """Return whether the word is a unit or a number word."""
    return unit_name(word) in _MEASURES or word.casefold() in SCALES


def unit_name(word: str) -> str:
    """Return the unit's one name ("cm" and "centimeters" are "centimeter"); an unknown word in lower case."""
    for form in (word, word.casefold(), word.casefold().removesuffix("s"), word.casefold().removesuffix("es")):
        if form in _NAMES:
            return _NAMES[form]
    return word.casefold()
