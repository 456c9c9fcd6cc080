"""Comparing an answer with the truth: as numbers, as mathematics, as text."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from itertools import accumulate
from typing import Any

from paceline.tasks.extract import Extract, after_thinking, extract, last_line
from paceline.tasks.number import last_number, read_number

MAX_MATH_CHARS = 400
"""A longer final expression is wrong unread: parsing time grows faster than length."""
MAX_DEPTH = 30
"""Of brackets: likewise."""
_MATH_SECONDS = 3
_TOWER = re.compile(r"""
    (?:\^|\*\*)[\s{(]*[^\s^*]{0,40}?(?:\^|\*\*|!)      # an exponent with an exponent or factorial of its own
    | (?:\^|\*\*)[\s{(-]*[0-9]{4,}                      # one of four digits or more
    | [0-9]{41,}
    | [0-9)}]{4,}\s*! | !\s*[)}\]]*\s*(?:!|\^|\*\*)    # 1234!, (…)!!, (9!)^9
""", re.VERBOSE)


def same_number(answer: str, truth: str, how: Extract) -> bool:
    found, marked = extract(answer, how)
    if marked:
        value = read_number(found or "")
    else:
        value = last_number(after_thinking(answer)) if how in ("auto", "last") else None
    return value is not None and value == _truth_number(truth)


def same_math(answer: str, truth: str, how: Extract) -> bool:
    found, marked = extract(answer, how)
    if not marked:
        found = last_line(answer) if how in ("auto", "last") else None
    return found is not None and math_equal(found, truth)


def math_equal(answer: str, truth: str) -> bool:
    """By math-verify. What would explode (towers of exponents, large factorials) is wrong unless spelt like the truth."""
    answer, truth = answer.strip().strip("$").strip(), truth.strip().strip("$").strip()
    if not answer or len(answer) > max(MAX_MATH_CHARS, len(truth)):
        return False
    if _spelling(answer) == _spelling(truth):
        return True
    if _TOWER.search(answer) or _depth(answer) > MAX_DEPTH:
        return False
    from math_verify import verify

    gold = _parse(truth, _seconds())
    return bool(gold) and verify(gold, _parse(answer, _seconds()), timeout_seconds=_seconds())


def same_text(answer: str, truth: str, how: Extract) -> bool:
    found, marked = extract(answer, how)
    text = found if marked else (last_line(answer) if how in ("auto", "last") else None)
    return text is not None and text.strip() == truth.strip()


def _truth_number(truth: str) -> Any:
    value = read_number(truth)
    if value is None:
        raise ValueError(f"the truth {truth!r} is not a number")
    return value


def _spelling(text: str) -> str:
    text = re.sub(r"\\left|\\right|\\[!,;: ]|\s", "", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _depth(text: str) -> int:
    return max(accumulate((char in "({[") - (char in ")}]") for char in text))


def _seconds() -> int | None:
    """math-verify keeps time with a signal, which only a main thread may have; elsewhere a pool's limit is the only one."""
    return _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None


@lru_cache(maxsize=512)
def _parse(text: str, seconds: int | None) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(f"\\boxed{{{text}}}", extraction_config=[LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=seconds)
