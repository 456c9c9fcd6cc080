"""Any generator of reasoning-gym: any number of problems, made from a seed and scored by the generator itself.

The scorers of nine generators hand the answer to `eval` or to sympy's parser. Two things keep an answer from running as code:
unless its scorer is known to compare plain text (`PLAIN_SCORERS`), it is called in the sandbox only; and before that,
`SCORE_LIMITS` refuses whatever is not an expression of the kind the problem asks for.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from pydantic import Field

from paceline.tasks import expressions
from paceline.tasks.answers import Extract, extract, last_line
from paceline.tasks.base import Problem, UsesSandbox
from paceline.tasks.options import PromptOptions, make_prompt
from paceline.tasks.sandbox.service import SandboxedScorer, require_sandbox

INSTRUCTION = "Give the final answer between <answer> and </answer>."
Entry = dict[str, Any]
"""One problem as reasoning-gym describes it: question, answer, metadata."""

ANSWERS_PER_CHILD = 100
"""Number of answers that one sandboxed process scores, for generators whose answers pass an allow-list first."""
AUDITED_VERSION = "0.1.25"
"""Release of reasoning-gym whose scorers were read for PLAIN_SCORERS. With any other release every scorer runs in the sandbox."""
PLAIN_SCORERS = frozenset({
    "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic", "bf",
    "binary_alternation", "bitwise_arithmetic", "boxnet", "caesar_cipher", "calendar_arithmetic", "chain_sum",
    "circuit_logic", "codeio", "coin_flip", "color_cube_rotation", "complex_arithmetic", "count_bits", "count_primes",
    "course_schedule", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "fraction_simplification", "futoshiki", "game_of_life", "game_of_life_halting",
    "gcd", "graph_color", "group_anagrams", "gsm_symbolic", "isomorphic_strings", "jugs", "kakurasu", "knight_swap",
    "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting", "letter_jumble", "list_functions",
    "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering",
    "number_format", "number_sequence", "number_sorting", "palindrome_generation", "palindrome_partitioning", "path_star",
    "polynomial_equations", "power_function", "prime_factorization", "products", "quantum_lock", "ransom_note", "rearc",
    "rectangle_count", "rotate_matrix", "rotten_oranges", "rush_hour", "self_reference", "sentence_reordering",
    "shortest_path", "simple_equations", "simple_geometry", "sokoban", "spell_backward", "string_manipulation",
    "string_splitting", "string_synthesis", "sudoku", "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego",
    "word_ladder", "word_sequence_reversal", "word_sorting", "zebra_puzzles",
})
"""Generators whose scorer only compares text, reads numbers or JSON, or replays moves. Every other generator, known or not, is
scored in the sandbox. Evaluate the answer as Python or by sympy: binary_matrix, countdown, intermediate_integration, n_queens,
polynomial_multiplication, puzzle24, simple_integration, spiral_matrix, string_insertion. In the sandbox for other reasons:
composite (may contain any of these), pool_matrix (numpy's text reader), propositional_logic (evaluates formulas with a parser of
its own), rubiks_cube (an answer decides how much memory it takes)."""


class ReasoningGymConfig(PromptOptions):
    generator: str
    """Name of one of reasoning-gym's generators, such as chain_sum."""
    size: int = Field(1000, ge=1)
    """Number of problems."""
    seed: int = 0
    """Seed of the problems."""
    extract: Extract = "tags"
    """Which part of a model's output is the answer; `last` is the last line."""
    max_answer_chars: int = Field(20_000, ge=1)
    """Longer answers score 0 unread."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator itself."""


class ReasoningGym(UsesSandbox):
    """A task of one generator. It pickles as its config, because some generators do not pickle, and makes the generator on first
    use."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config, self.name = config, f"reasoning-gym:{config.generator}"
        _ = self._dataset  # reports wrong settings now
        if not self._scores_plainly:
            require_sandbox(self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "name": self.name}

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> Problem:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        prompt = make_prompt(self._entry(index)["question"], self.config, INSTRUCTION)
        return Problem(f"{self.name}/{self.config.seed}/{index}", prompt, {"index": index})

    def grade(self, problem: Problem, answer: str) -> float:
        """The generator's score, but no more than SCORE_LIMITS allows. The problem's truth is its index: the entry that the
        scorer needs is made again from it, since not every entry is JSON."""
        found, marked = extract(answer, self.config.extract)
        if not marked and self.config.extract in ("auto", "last"):
            found = last_line(answer)
        if not found or len(found) > self.config.max_answer_chars:
            return 0.0
        entry = self._entry(problem.truth["index"])
        most = self._score_limit(entry, found)
        return min(most, self._score(entry, found)) if most > 0 else 0.0

    def start_sandbox(self) -> None:
        if not self._scores_plainly:
            self._sandboxed_scorer.start()

    def _score(self, entry: Entry, answer: str) -> float:
        if self._scores_plainly:
            return float(self._dataset.score_answer(answer, entry))
        return self._sandboxed_scorer.score((answer, entry)) or 0.0

    def _score_limit(self, entry: Entry, answer: str) -> float:
        """The most that this answer may score; 0 means that no scorer gets to see it."""
        source, dataset = self.config.generator, self._dataset
        if source == "composite":
            source = entry["metadata"]["source_dataset"]
            dataset = dataset.datasets[source]
        limit = SCORE_LIMITS.get(source)
        return 1.0 if limit is None else limit(dataset.config, entry, answer)

    def _entry(self, index: int) -> Entry:
        """A copy of its own for every caller, since some scorers write into the entry."""
        return pickle.loads(self._pickled_entry(index))

    @cached_property
    def _pickled_entry(self) -> Callable[[int], bytes]:
        """Entries are kept for a while, because all answers to one prompt are graded together and some entries take long to
        make."""
        return lru_cache(maxsize=256)(lambda index: pickle.dumps(self._dataset[index]))

    @cached_property
    def _scores_plainly(self) -> bool:
        return self.config.generator in PLAIN_SCORERS and importlib.metadata.version("reasoning-gym") == AUDITED_VERSION

    @cached_property
    def _sandboxed_scorer(self) -> SandboxedScorer:
        options = {"generator": self.config.generator, "settings": self._settings}
        checked = self.config.generator in SCORE_LIMITS
        return SandboxedScorer("reasoning-gym", options, answers_per_child=ANSWERS_PER_CHILD if checked else 1)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return {"size": self.config.size, "seed": self.config.seed, **self.config.params}

    @cached_property
    def _dataset(self) -> Any:
        name, params = self.config.generator, self.config.params
        make, settings = _find(name)
        known = {field.name for field in dataclasses.fields(settings)}
        for key in params:
            if key not in known:
                ours = [*PromptOptions.model_fields, "extract", "max_answer_chars"]
                raise ValueError(f"reasoning-gym:{name}: {key}: no such option (there are {', '.join([*sorted(known), *ours])})")
        try:
            return make(config=settings(**self._settings))
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning-gym:{name}: {', '.join(params) or 'settings'}: {error}") from None


def _find(name: str) -> tuple[Any, Any]:
    """Class and settings of a generator."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("reasoning-gym: the package `reasoning-gym` is missing")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(f"reasoning-gym: generator: there is no {name!r}; near are {', '.join(near)}")
    return DATASETS[name]


def split_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with the generator's own settings moved into `params`."""
    ours = set(ReasoningGymConfig.model_fields)
    params = {key: value for key, value in options.items() if key not in ours}
    return {**{key: value for key, value in options.items() if key in ours}, "params": {**options.get("params", {}), **params}}


# Limits of single generators: what their scorers would evaluate is checked, and rewards that need no solution are closed.

def _limit_arithmetic(config: Any, entry: Entry, answer: str, target: int, wrong: float) -> float:
    """The given integers, each exactly once, joined by the four operators, and exactly the target. The generators' own scorers
    look for digits in the text, so that a factorial, a float or a rounded quotient would pass; puzzle24's does not look which
    ones."""
    operators = {*config.operators, *("-" if "/" in config.operators else "")}  # the generator subtracts where nothing divides
    tree = expressions.parse(answer, operators=operators)
    if tree is None:
        return 0.0
    right = expressions.integers_used(tree) == sorted(entry["metadata"]["numbers"]) and expressions.exact_value(tree) == target
    return 1.0 if right else wrong


def _limit_countdown(config: Any, entry: Entry, answer: str) -> float:
    return _limit_arithmetic(config, entry, answer, entry["metadata"]["target"], wrong=0.05)


def _limit_puzzle24(config: Any, entry: Entry, answer: str) -> float:
    return _limit_arithmetic(config, entry, answer, 24, wrong=0.01)


def _limit_polynomial(config: Any, entry: Entry, answer: str) -> float:
    """A written-out polynomial in the problem's variables; `expand(…)` would leave the work to the scorer."""
    return float(expressions.parse(answer, names=[str(variable) for variable in entry["metadata"]["variables"]]) is not None)


def _limit_integral(config: Any, entry: Entry, answer: str) -> float:
    """Elementary functions of the problem's variable; `Integral(…)` would repeat the question."""
    names = {entry["metadata"]["variable"], "C"} | expressions.CONSTANTS
    return float(expressions.parse(answer, names=names, functions=expressions.FUNCTIONS) is not None)


def _limit_literal(config: Any, entry: Entry, answer: str) -> float:
    """The scorer evaluates the answer as Python if it is not the text it expects."""
    return float(expressions.is_literal(answer))


def _limit_complex(config: Any, entry: Entry, answer: str) -> float:
    """`nan` is at no distance from anything, by the scorer's reckoning."""
    return float(re.fullmatch(r"[-+0-9.eEiIjJ() ]{1,100}", answer.strip()) is not None)


def _limit_coin_flip(config: Any, entry: Entry, answer: str) -> float:
    """The scorer gives partial credit for a common prefix, relative to the shorter number, so that `0` would match every
    probability. Right here means within 0.0001 and within a hundredth of the probability."""
    if re.fullmatch(r"[0-9., ]{1,40}(?:/[0-9 ]{1,40}|e-?[0-9]{1,2})?", answer.strip()) is None:
        return 0.0
    try:
        value, truth = (Fraction(text.replace(",", "")) for text in (answer, entry["answer"]))
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(abs(value - truth) <= min(Fraction(1, 10_000), truth / 100))


def _limit_to(pattern: str) -> Callable[[Any, Entry, str], float]:
    """Refuses answers that the pattern does not match as a whole."""
    allowed = re.compile(pattern)
    return lambda config, entry, answer: float(allowed.fullmatch(answer) is not None)


def _limit_halting(config: Any, entry: Entry, answer: str) -> float:
    """The scorer compares the truth values of two non-empty strings, which are always equal."""
    return float(answer.strip().lower() == entry["answer"].lower())


SCORE_LIMITS: dict[str, Callable[[Any, Entry, str], float]] = {
    "binary_matrix": _limit_literal,
    "coin_flip": _limit_coin_flip,
    "complex_arithmetic": _limit_complex,
    "countdown": _limit_countdown,
    "game_of_life_halting": _limit_halting,
    "intermediate_integration": _limit_integral,
    "n_queens": _limit_literal,
    "polynomial_multiplication": _limit_polynomial,
    "pool_matrix": _limit_to(r"[-+0-9.eE\s]*"),
    "propositional_logic": _limit_to(r"[A-Z¬∧∨→↔()\s]{0,500}"),
    "puzzle24": _limit_puzzle24,
    "rubiks_cube": _limit_to(r"(?s:(?!.*[0-9]{3})[A-Za-z0-9'\s]{0,2000})"),
    "simple_integration": _limit_integral,
    "spiral_matrix": _limit_literal,
    "string_insertion": _limit_literal,
}
"""Generator → (its config, the entry, the answer) → the most that the answer may score; 0 refuses it before any scorer sees
it."""
