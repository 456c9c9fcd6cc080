"""Reading one number, strictly: whoever hedges, writes two, or dresses it up beyond what is listed here, has given none.

Read as a number: `42`, `-42`, `−42`, `+42`, `1,234.50`, `1{,}234`, `$42`, `42%`, `42 apples`, `\\text{42}`, `x = 42`, `7/2`,
`\\frac{7}{2}`, `**42**`, `42.`. Not: `42 or 43`, `1,23`, `1 234`, `4e1`, `42k`, `42 million`, `6*7`, digits that are not ASCII.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 200
MAX_DIGITS = 60
_TAIL = 2_000

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<money>[$€£]?)(?P<sign2>[-+]?)(?P<digits>{_DIGITS})(?:/(?P<under>[1-9][0-9]*))?\.?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([-+]?[0-9]+)\}\{([1-9][0-9]*)\}")
_UNIT = re.compile(r"\s*[%°]?\s*(?:[A-Za-z]+[²³]?(?:[ /.-]+|$)){0,4}")
_HEDGES = frozenset({"or", "and", "to", "not"})
_NOT_UNITS = _HEDGES | {"hundred", "thousand", "million", "billion", "trillion", "dozen", "k", "m", "b", "mn", "bn", "tn", "e"}
_HEDGED = re.compile(r"\d\S*\s+(?:(?:or|and|to|/|-|–)\s+|or\s+(?:[A-Za-z]+\s+){1,2})$")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")


def read_number(text: str) -> Fraction | None:
    """The number that the text is, units aside."""
    if len(text) > MAX_CHARS:
        return None
    plain = _plain(text)
    fraction = _FRACTION.match(plain)
    if fraction is not None:
        sign, over, under = fraction.groups()
        return _make(sign, over, under) if _is_unit(plain[fraction.end():]) else None
    match = _NUMBER.match(plain)
    if match is None or (match["sign"] and match["sign2"]) or not _is_unit(plain[match.end():]):
        return None
    return _make(match["sign"] + match["sign2"], match["digits"].replace(",", ""), match["under"])


def last_number(text: str) -> Fraction | None:
    """The last word with a digit in it, if it reads as a number and does not belong to a hedge such as `42 or 43`."""
    tail = text[-_TAIL:]
    words = list(re.finditer(r"\S+", tail))
    place = next((i for i in reversed(range(len(words))) if re.search(r"\d", words[i].group())), None)
    if place is None or (place == 0 and len(text) > _TAIL) or _HEDGED.search(tail[:words[place].start()]):
        return None
    following = words[place + 1].group().strip(".,;:!?*)").lower() if place + 1 < len(words) else ""
    if following in _NOT_UNITS - _HEDGES:
        return None
    return read_number(words[place].group().rpartition("=")[2].strip("()[]\"'`:;!?").rstrip(","))


def _plain(text: str) -> str:
    """Without LaTeX's and Markdown's dress."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\!", "").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3})", ",", text).replace("\\,", " ").replace("\\ ", " ")
    text = _WRAPPED.sub(r" \1 ", text).strip().strip("*_`").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":  # math mode; a single one in front is money
        text = text[1:-1].strip()
    return re.sub(r"^([-+])\s+", r"\1", re.sub(r"^[A-Za-z]\s*=\s*", "", text))


def _is_unit(rest: str) -> bool:
    """Nothing, a percent sign, a few words: but glued to the number (42k, 4e), a multiple (42 million) or a hedge, no."""
    if rest and rest[0].isalpha():
        return False
    return _UNIT.fullmatch(rest) is not None and not _NOT_UNITS & set(re.split(r"[\s/.-]+", rest.lower()))


def _make(sign: str, over: str, under: str | None) -> Fraction | None:
    if len(over) > MAX_DIGITS or len(under or "") > MAX_DIGITS:
        return None
    value = Fraction(over) / int(under or 1)
    return -value if sign == "-" else value
