"""The allow-list for answers that a scorer is going to evaluate: arithmetic passes, everything else never reaches an evaluator.

Some scorers hand the text of an answer to `eval` or to sympy's parser, both of which run Python. The functions here read the text
without evaluating it. Only then does a scorer see it, inside the sandbox; so if the sandbox had a hole, nothing but arithmetic
would reach it.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection
from fractions import Fraction

MAX_CHARS = 1000
"""Longer expressions are refused unread."""
MAX_DEPTH = 200
"""Expressions whose syntax tree is deeper are refused; a sum of n terms is n deep."""
MAX_NUMBER_CHARS = 30
"""Longer number literals are refused."""
MAX_EXPONENT = 1000
"""Larger constant exponents are refused."""
MAX_BITS = 8192
"""Expressions whose constants could need more bits than this are refused."""

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "exp", "log", "ln", "sqrt", "Abs", "abs", "erf", "erfi",
})
"""Functions of one argument that an integral may contain. None of them integrates, expands or parses."""
CONSTANTS = frozenset({"E", "pi"})
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}

_CHARACTERS = re.compile(r"[A-Za-z0-9+\-*/(). ]*")
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_TOKEN = re.compile(rf"{_NUMBER.pattern}(?![A-Za-z0-9.])|[A-Za-z][A-Za-z0-9]*|\*\*|[-+*/()]| ")
_LIST_OF_LITERALS = re.compile(r"""(?:[\[\],\s]|-?[0-9]{1,30}(?![0-9])|'[A-Za-z0-9_.]{0,8}'|"[A-Za-z0-9_.]{0,8}")*""")
_PLAIN_WORDS = re.compile(r"[A-Z0-9_\s-]*")


def parse(text: str, *, names: Collection[str] = (), functions: Collection[str] = (),
          operators: Collection[str] = tuple(OPERATORS.values())) -> ast.expr | None:
    """The syntax tree of an arithmetic expression, or None if the text is anything else.

    Numbers are decimal and without an exponent part. `names` are the variables and constants and `functions` the functions of one
    argument that may occur; `operators` are the binary operators, where `-` also permits the sign.
    """
    text = text.strip()
    if not 0 < len(text) <= MAX_CHARS or _CHARACTERS.fullmatch(text) is None:
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:  # a character was skipped: 0x1, 1e9, 1.2.3, x.y
        return None
    known = {*names, *functions}
    for token in tokens:
        if (token[0].isalpha() and token not in known) or len(token) > MAX_NUMBER_CHARS:
            return None
    try:
        tree = ast.parse(text, mode="eval").body
        allowed = _is_shallow(tree) and _is_arithmetic(tree, names, functions, operators) and _bits(tree) <= MAX_BITS
        return tree if allowed else None
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def integers_used(tree: ast.expr) -> list[int] | None:
    """All number literals of the expression in ascending order; None if one of them is not an integer."""
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    integers = [value for value in values if isinstance(value, int)]
    return sorted(integers) if len(integers) == len(values) else None


def exact_value(tree: ast.expr) -> Fraction | None:
    """The value of an expression of integers, `+`, `-`, `*` and `/`, without rounding; None if it divides by zero."""
    try:
        return _value(tree)
    except ZeroDivisionError:
        return None


def is_literal(text: str) -> bool:
    """Whether the text is a (nested) list of integers and short strings, or plain words and numbers. Evaluated as Python, such a
    text gives that list, a syntax error or the value of a name: nothing in it can call, import or look into an object."""
    if len(text) > 20_000:
        return False
    if _PLAIN_WORDS.fullmatch(text):
        return True
    return text.count("[") <= 1000 and _LIST_OF_LITERALS.fullmatch(text) is not None


def _is_shallow(tree: ast.expr) -> bool:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return True
    return False


def _is_arithmetic(node: ast.expr, names: Collection[str], functions: Collection[str], operators: Collection[str]) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return name in names
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return "-" in operators and _is_arithmetic(operand, names, functions, operators)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS.get(type(op)) in operators and all(_is_arithmetic(side, names, functions, operators)
                                                                for side in (left, right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return name in functions and _is_arithmetic(argument, names, functions, operators)
    return False


def _bits(node: ast.expr) -> float:
    """An upper bound of the bits that the constants below this node need once they are combined. OverflowError: more than
    allowed."""
    match node:
        case ast.Constant(value=value):
            return math.log2(abs(value) + 2)  # type: ignore[arg-type, operator]  # a number, see _is_arithmetic
        case ast.UnaryOp(operand=operand):
            return _bits(operand)
        case ast.Call(args=[argument]):
            return _bits(argument)
        case ast.BinOp(left=left, op=ast.Pow(), right=exponent):
            base, size = _bits(left), _bits(exponent)
            if any(isinstance(part, ast.Name) for part in ast.walk(exponent)):
                return base + size  # sympy leaves such a power as it is
            if size > math.log2(MAX_EXPONENT + 2):
                raise OverflowError("the exponent is too large")
            return base * 2**size
        case ast.BinOp(left=left, right=right):
            return _bits(left) + _bits(right)
    return 1.0


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=op, operand=operand):
            return -_value(operand) if isinstance(op, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _value(left), _value(right)
            match op:
                case ast.Add():
                    return first + second
                case ast.Sub():
                    return first - second
                case ast.Mult():
                    return first * second
                case ast.Div():
                    return first / second
    raise AssertionError(f"{ast.dump(node)} is not plain arithmetic")
