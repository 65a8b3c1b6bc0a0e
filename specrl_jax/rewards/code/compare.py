"""Compare outputs and returned values with the expected ones. Runs outside of the sandbox."""

import math
import re

TOLERANCE = 1e-6  # of a decimal number, absolute and relative
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


def same_output(printed: str, expected: str) -> bool:
    """Return whether two texts agree line by line and word by word.

    Spaces around words and empty lines at the end do not count. Where the expected word is a decimal number, one with a
    point or an exponent, any number within TOLERANCE agrees.
    """
    ours, theirs = (text.rstrip().split("\n") for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    words, expected = ours.split(), theirs.split()
    return words == expected or (len(words) == len(expected) and all(map(_same_word, words, expected)))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if not _DECIMAL.fullmatch(theirs):
        return False
    try:
        return _close(float(ours), float(theirs))
    except ValueError:
        return False


def same_value(value: object, expected: object) -> bool:
    """Return whether a returned value equals one that was read from JSON: a tuple is a list there, a key is text.

    Floats agree within TOLERANCE.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value == expected
    if isinstance(expected, list):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        keyed = {str(key): item for key, item in value.items()}
        items = {str(key): item for key, item in expected.items()}
        return keyed.keys() == items.keys() and all(same_value(keyed[key], items[key]) for key in items)
    if isinstance(value, int | float) and isinstance(expected, int | float):
        either_float = isinstance(value, float) or isinstance(expected, float)
        return value == expected or (either_float and _close(value, expected))
    return type(value) is type(expected) and value == expected


def _close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer that no float can hold
        return False
