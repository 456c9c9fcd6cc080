"""Grammars of structured outputs, compiled by llguidance for one tokenizer. No torch."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from typing import Any

from paceline.extras import install_command
from paceline.structured_outputs import Grammar

_MOST_COMPILED, _MOST_CHARS = 32, 256 << 10
"""Number of compiled grammars that are kept, and of characters of their texts: a long one can take hundreds of megabytes."""
_MAX_CHARS = 128 << 10
"""Longest text of a grammar. Compiling a list of choices takes time by the square of its length."""
_LEXER_FUEL, _LEXER_STATES = 200_000, 50_000
"""What llguidance may spend on one grammar: a fifth of its defaults, with which a mask of `(a{1000}){1000}` takes seconds."""
_MAX_DIVISOR, _MAX_DIVISORS = 100_000, 20_000
"""Largest least common multiple and largest sum of the numbers in `multipleOf`. The library makes an automaton with a state for
every remainder, of which it counts none: 41 characters would take ten seconds."""
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]{1,40})')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


class Grammars:
    """The grammars of one engine. `check` and `matcher` may be called by any thread."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        """`eos`: the ids that end an answer which has the form of its grammar."""
        self.tokenizer, self.vocabulary, self.eos = tokenizer, vocabulary, frozenset(eos)
        self._lock = threading.Lock()
        self._own_tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Raise ValueError if the library does not take this grammar, or is not installed."""
        self.matcher(grammar)

    def matcher(self, grammar: Grammar) -> Any:
        """Return a matcher at the beginning of an answer. ValueError as in `check`."""
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)  # may take a second, in which others get theirs
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MOST_COMPILED or sum(len(known.text) for known in self._compiled) > _MOST_CHARS:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits, grammar_from
        except ImportError:
            raise ValueError(f"structured_outputs: needs the package llguidance; {install_command('structured')}") from None
        if self.tokenizer is None or not self.eos:
            missing = "a tokenizer" if self.tokenizer is None else "an end-of-text token"
            raise ValueError(f"structured_outputs: the model came without {missing}")
        with self._lock:
            if self._own_tokenizer is None:
                self._own_tokenizer = _converted(self.tokenizer, self.vocabulary, sorted(self.eos))
        _check_size(grammar.text)
        try:
            text = _choice(grammar.text) if grammar.kind == "choice" else grammar_from(grammar.kind, grammar.text)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {_one_line(str(error))}") from None
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, max_lexer_states=_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._own_tokenizer, text, log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not first.is_error():  # the first mask can take longer than compiling, and meet a limit
            begins = any(first.compute_bitmask()) or first.is_accepting()
            if not begins and not first.is_error():
                raise ValueError("structured_outputs: no token may begin an answer of this form")
        if first.is_error():
            raise ValueError(f"structured_outputs: {_one_line(first.get_error())}")
        return matcher


def _check_size(text: str) -> None:
    """Raise ValueError for grammars that the library's own limits do not hold within bounds of time."""
    if len(text) > _MAX_CHARS:
        raise ValueError(f"structured_outputs: {len(text)} characters, more than the {_MAX_CHARS} of the longest grammar")
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    divisors = [_divisor(found[1]) for found in _MULTIPLE_OF.finditer(plain)]
    if sum(divisors) > _MAX_DIVISORS or math.lcm(*divisors) > _MAX_DIVISOR:
        raise ValueError("structured_outputs: multipleOf: the numbers are too large")


def _divisor(number: str) -> int:
    """The digits of a number in `multipleOf` as an integer; 0.25 is 25."""
    try:
        _, digits, exponent = Decimal(number).normalize().as_tuple()
    except InvalidOperation:
        return 1  # which the library refuses
    return max(1, int("".join(map(str, digits))) * 10 ** min(12, max(0, int(exponent))))


class _TokenList:
    """A tokenizer as its tokens' bytes, for those whose kind llguidance does not know."""

    def __init__(self, tokenizer: Any, eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, None
        self.special_token_ids = sorted({eos, *tokenizer.all_special_ids})
        special = set(self.special_token_ids)
        self.tokens = [b"" if i in special else tokenizer.decode([i]).encode() for i in range(len(tokenizer))]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _converted(tokenizer: Any, vocabulary: int, eos: list[int]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)
    except ValueError:  # it knows byte-level and SentencePiece vocabularies only
        return LLTokenizer(TokenizerWrapper(_TokenList(tokenizer, eos[0])), n_vocab=vocabulary, eos_token=eos)


def _choice(text: str) -> str:
    """A Lark grammar of these strings."""
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
