"""Reading the final answer out of a model's output and comparing it with the truth: as a number, as mathematics or as text.

Numbers are read strictly; whoever hedges, writes two, or dresses the number up beyond what is listed here has given none. Read
as a number: `42`, `-42`, `−42`, `+42`, `1,234.50`, `1{,}234`, `$42`, `42%`, `42 apples`, `\\text{42}`, `x = 42`, `7/2`,
`\\frac{7}{2}`, `**42**`, `42.`. Not read as one: `42 or 43`, `1,23`, `1 234`, `4e1`, `42k`, `42 million`, `6*7`, `41=42`, `not
42`, digits outside ASCII. Mathematics is compared by math-verify, in the sandbox. Everything else here takes time linear in the
length of the text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal

from paceline.tasks.sandbox.service import SandboxedScorer

Extract = Literal["auto", "boxed", "hash", "tags", "last"]
"""Which part of an output is the answer. `boxed`: the last \\boxed{}; `hash`: what follows the last ####, to the end of its
line; `tags`: the last <answer> … </answer>; `last`: the last number, letter or line, as the task reads it; `auto`: the first of
these that is there."""


# Extraction: which part of the output is the answer.

def after_thinking(output: str) -> str:
    """What follows the last `</think>`. Where a `<think>` is left open, the model never stopped thinking, and only what stands
    before it counts: what is tried while thinking is not an answer."""
    return output.rpartition("</think>")[2].partition("<think>")[0]


def extract(output: str, how: Extract) -> tuple[str | None, bool]:
    """The marked text, and whether a mark was found. Without one, the caller reads the last number or line if `how` permits."""
    text = after_thinking(output)
    finders = {"boxed": last_boxed, "hash": after_hashes, "tags": last_tagged}
    for name, find in finders.items():
        if how in (name, "auto"):
            found = find(text)
            if found is not None:
                return found, True
    return None, False


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{…} with balanced braces; of nested ones the innermost. None if it is not closed."""
    mark = text.rfind("\\boxed")
    if mark < 0:
        return None
    start = mark + len("\\boxed")
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    for place in range(start, len(text)):
        char = text[place]
        if char == "{" and text[place - 1] != "\\":
            depth += 1
        elif char == "}" and text[place - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[start + 1:place].strip()
    return None


def after_hashes(text: str) -> str | None:
    """What follows the last `####`, to the end of its line."""
    _, mark, after = text.rpartition("####")
    return after.split("\n", 1)[0].strip() if mark else None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Content of the last <tag> … </tag>."""
    before, close, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() if close and opened else None


def last_line(output: str) -> str:
    """The last line, after thinking, that is not blank."""
    return next((line.strip() for line in reversed(after_thinking(output).splitlines()) if line.strip()), "")


# Numbers.

MAX_NUMBER_CHARS = 200
"""Longer texts are not read as a number."""
MAX_DIGITS = 60
"""Numbers with more digits are not read."""
_TAIL_CHARS = 2_000
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<money>[$€£]?)(?P<sign2>[-+]?)(?P<digits>{_DIGITS})(?:/(?P<under>[1-9][0-9]*))?\.?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([-+]?[0-9]+)\}\{([1-9][0-9]*)\}")
_UNIT = re.compile(r"\s*[%°]?\s*(?:[A-Za-z]+[²³]?(?:[ /.-]+|$)){0,4}")
_HEDGES = frozenset({"or", "and", "to", "not"})
_NOT_UNITS = _HEDGES | {"hundred", "thousand", "million", "billion", "trillion", "dozen", "k", "m", "b", "mn", "bn", "tn", "e"}
_HEDGED = re.compile(r"\d\S*\s+(?:(?:or|and|to|/|-|–)\s+|or\s+(?:[A-Za-z]+\s+){1,2})$")
_NEGATED = re.compile(r"(?:\b(?:can)?not|n['’]t|\bnever|\bneither|\bnor|≠|!=|\\neq?)"
                      r"(?:\s+(?:be|equal|to|exactly|quite|really|simply|just|necessarily)){0,3}\s+$", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")


def same_number(output: str, truth: str, how: Extract) -> bool:
    """Whether the answer in the output is the number `truth`, written as a number."""
    found, marked = extract(output, how)
    if marked:
        value = read_number(found or "")
    else:
        value = last_number(after_thinking(output)) if how in ("auto", "last") else None
    return value is not None and value == _truth_number(truth)


def read_number(text: str) -> Fraction | None:
    """The number that the text is, apart from its unit; None if it is anything else."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    plain = _without_markup(text)
    fraction = _FRACTION.match(plain)
    if fraction is not None:
        sign, over, under = fraction.groups()
        return _make_number(sign, over, under) if _is_unit(plain[fraction.end():]) else None
    match = _NUMBER.match(plain)
    if match is None or (match["sign"] and match["sign2"]) or not _is_unit(plain[match.end():]):
        return None
    return _make_number(match["sign"] + match["sign2"], match["digits"].replace(",", ""), match["under"])


def last_number(text: str) -> Fraction | None:
    """The last word with a digit in it, if it reads as a number and is neither hedged (`42 or 43`), nor denied (`not 42`), nor
    claimed to equal another number (`41=42`)."""
    tail = text[-_TAIL_CHARS:]
    words = list(re.finditer(r"\S+", tail))
    place = next((i for i in reversed(range(len(words))) if re.search(r"\d", words[i].group())), None)
    if place is None or (place == 0 and len(text) > _TAIL_CHARS):
        return None
    before = tail[:words[place].start()]
    if _HEDGED.search(before) or _NEGATED.search(before):
        return None
    following = words[place + 1].group().strip(".,;:!?*)").lower() if place + 1 < len(words) else ""
    if following in _NOT_UNITS - _HEDGES:
        return None
    *others, last = (side.strip("()[]\"'`:;!?").rstrip(",") for side in words[place].group().split("="))
    value = read_number(last)
    stated = [read_number(side) for side in others]
    return value if all(number in (None, value) for number in stated) else None


def _without_markup(text: str) -> str:
    """The text without what LaTeX and Markdown put around a number."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\!", "").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3})", ",", text).replace("\\,", " ").replace("\\ ", " ")
    text = _WRAPPED.sub(r" \1 ", text).strip().strip("*_`").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":  # math mode; a single one in front is money
        text = text[1:-1].strip()
    return re.sub(r"^([-+])\s+", r"\1", re.sub(r"^[A-Za-z]\s*=\s*", "", text))


def _is_unit(rest: str) -> bool:
    """Whether what follows a number is nothing, a percent sign or a few words. A letter glued to the number (`42k`, `4e`), a
    multiple (`42 million`) and a hedge are no unit."""
    if rest and rest[0].isalpha():
        return False
    return _UNIT.fullmatch(rest) is not None and not _NOT_UNITS & set(re.split(r"[\s/.-]+", rest.lower()))


def _make_number(sign: str, over: str, under: str | None) -> Fraction | None:
    if len(over) > MAX_DIGITS or len(under or "") > MAX_DIGITS:
        return None
    value = Fraction(over) / int(under or 1)
    return -value if sign == "-" else value


def _truth_number(truth: str) -> Any:
    value = read_number(truth)
    if value is None:
        raise ValueError(f"the truth {truth!r} is not a number")
    return value


# Mathematics.

MAX_MATH_CHARS = 400
"""A longer final expression is wrong unread: parsing time grows faster than length."""
MAX_DEPTH = 30
"""An expression with brackets nested deeper than this is wrong unread, for the same reason."""
_MAX_SIDES = 5
_TOWER = re.compile(r"""
    (?:\^|\*\*)[\s{(]*[^\s^*]{0,40}?(?:\^|\*\*|!)      # an exponent with an exponent or factorial of its own
    | (?:\^|\*\*)[\s{(-]*[0-9]{4,}                      # one of four digits or more
    | [0-9]{41,}
    | [0-9)}]{4,}\s*! | !\s*[)}\]]*\s*(?:!|\^|\*\*)    # 1234!, (…)!!, (9!)^9
""", re.VERBOSE)
_CHARACTERS = re.compile(r"(?:_(?!_)|[A-Za-z0-9\\{}()\[\]^+\-*/=<>|,.:;!%$&'\s°πθ∞√×·÷−±≤≥≠∪∩∈∅])*")
"""The allow-list of what math-verify gets to see: LaTeX's characters and a few symbols, but neither double quotes nor `__`."""
_INTEGER = re.compile(r"-?[0-9]{1,40}")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]{1,2})\}?")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_scorer = SandboxedScorer("math", {}, answers_per_child=100)


def same_math(output: str, truth: str, how: Extract) -> bool:
    """Whether the answer in the output is mathematically equal to `truth`."""
    found, marked = extract(output, how)
    if not marked:
        found = last_line(output) if how in ("auto", "last") else None
    return found is not None and math_equal(found, truth)


def math_equal(answer: str, truth: str) -> bool:
    """Whether two expressions are equal by math-verify, which is called in the sandbox. Answers that would explode (towers of
    exponents, large factorials) are wrong unless spelt like the truth; so are false statements (`41=42`) and numerals of another
    base."""
    answer, truth = _trim(answer), _trim(truth)
    if not answer or len(answer) > max(MAX_MATH_CHARS, len(truth)):
        return False
    if _spelling(answer) == _spelling(truth):
        return True
    if _CHARACTERS.fullmatch(answer) is None or _TOWER.search(answer) or _depth(answer) > MAX_DEPTH:
        return False
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(truth):  # the most frequent case needs no parser
        return int(answer) == int(truth)
    if _in_other_base(answer, truth) or _contradicts_itself(answer):
        return False
    return _scorer.score((answer, truth)) == 1.0


def start_math_sandbox() -> None:
    """Starts the process in which `math_equal` runs, so that the first answer does not wait for it."""
    _scorer.start()


def _trim(text: str) -> str:
    """Without math mode's dollar signs and the full stop that ends a sentence."""
    text = text.strip().strip("$").strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _spelling(text: str) -> str:
    text = re.sub(r"\\left|\\right|\\[!,;: ]|\s", "", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _depth(text: str) -> int:
    return max(accumulate((char in "({[") - (char in ")}]") for char in text))


def _in_other_base(answer: str, truth: str) -> bool:
    """`4343_5` against `4343_6`: math-verify drops the subscript. A numeral without one is taken to be in the base that was
    asked for."""
    given, wanted = _IN_BASE.fullmatch(_spelling(answer)), _IN_BASE.fullmatch(_spelling(truth))
    return given is not None and wanted is not None and given[2] != wanted[2]


def _contradicts_itself(answer: str) -> bool:
    """`41=42` states something false, of which math-verify would read the right side. All sides without a variable have to be
    equal."""
    sides = _EQUALS.split(answer)
    if len(sides) > _MAX_SIDES:
        return True
    numeric = [side for side in sides if re.search("[0-9]", side) and not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", side))]
    return any(not math_equal(side, numeric[0]) for side in numeric[1:])


# Text.

def same_text(output: str, truth: str, how: Extract) -> bool:
    """Whether the answer in the output is the text `truth`, apart from white space around it."""
    found, marked = extract(output, how)
    text = found if marked else (last_line(output) if how in ("auto", "last") else None)
    return text is not None and text.strip() == truth.strip()
