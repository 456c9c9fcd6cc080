"""Tools that come with Paceline: a calculator, and a Python interpreter in the sandbox."""

from __future__ import annotations

from fractions import Fraction

from paceline.tasks.environment import Tool
from paceline.tasks.expressions import exact_value, parse
from paceline.tasks.sandbox.run import Limits, run_tests

_MOST_CHARS = 20_000
_PYTHON_S = 5.0
_PROGRAM = """
def run():
    import ast, contextlib, io
    out, names = io.StringIO(), {{"__name__": "__main__"}}
    with contextlib.redirect_stdout(out):
        try:
            tree = ast.parse({code!r})
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<program>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            print(f"{{type(error).__name__}}: {{error}}")
    return out.getvalue()[-450:]
"""
_REPORT = """
class Output(Exception):
    pass

def check(run):
    raise Output(run())
"""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    expression: integers with +, -, *, / and parentheses, such as (3 + 4) * 12
    """
    tree = parse(expression, operators=("+", "-", "*", "/"))
    value = None if tree is None else exact_value(tree)
    if value is None:
        raise ValueError("not an arithmetic expression that has a value")
    return str(value) if value.denominator == 1 else _decimal(value)


def _decimal(value: Fraction) -> str:
    return f"{float(value):.10g}"


def python(code: str) -> str:
    """Run a Python program in a sandbox and return what it prints, and the value of its last line. Nothing is kept between calls.

    code: the program
    """
    if len(code) > _MOST_CHARS:
        raise ValueError(f"more than {_MOST_CHARS} characters of code")
    verdict = run_tests([_PROGRAM.format(code=code)], "", _REPORT, "run", Limits(seconds=_PYTHON_S))
    said = verdict.detail or ""
    return said.removeprefix("Output: ") if said.startswith("Output:") else f"Error: {said}"


CALCULATOR, PYTHON = Tool.of(calculator), Tool.of(python)
