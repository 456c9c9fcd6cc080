"""Grammars of structured outputs, compiled by llguidance for one tokenizer. No torch."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from paceline.extras import install_command
from paceline.structured_outputs import Grammar

_MOST_COMPILED = 64
"""Number of compiled grammars that are kept."""


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
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError:
            raise ValueError(f"structured_outputs: needs the package llguidance; {install_command('structured')}") from None
        if self.tokenizer is None or not self.eos:
            missing = "a tokenizer" if self.tokenizer is None else "an end-of-text token"
            raise ValueError(f"structured_outputs: the model came without {missing}")
        with self._lock:
            if self._own_tokenizer is None:
                self._own_tokenizer = _converted(self.tokenizer, self.vocabulary, sorted(self.eos))
        try:
            text = _choice(grammar.text) if grammar.kind == "choice" else grammar_from(grammar.kind, grammar.text)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {_one_line(str(error))}") from None
        matcher = LLMatcher(self._own_tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {_one_line(matcher.get_error())}")
        return matcher


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
