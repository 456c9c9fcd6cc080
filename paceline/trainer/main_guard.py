"""Whether worker processes can import the program that starts them.

Worker processes that grade answers import the file of the main program, because the task may be defined in it. A program that
starts its run outside of `if __name__ == "__main__":` would start it again in every worker.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType


def check_main_guard() -> None:
    """Raises a ValueError if the main program calls this function in a line that its worker processes would run as well, or if it
    has no file that they could import."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    frame = _main_frame(sys._getframe(1))
    if file is None or frame is None:  # a notebook, an interactive session, a test
        return
    instead = 'or set reward.workers to 0 (reward={"workers": 0})'
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"reward.workers: worker processes import the program, and {Path(file).name} is not a file; save the "
                         f"program in a file, {instead}") from None
    if not _is_guarded(source, frame.f_lineno):
        raise ValueError(f"reward.workers: worker processes import {file} and would run line {frame.f_lineno} again; put it "
                         f'below if __name__ == "__main__":, {instead}')


def _main_frame(frame: FrameType | None) -> FrameType | None:
    """The frame in which the statements of the main program run, if it is among the callers of `frame`."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None


def _is_guarded(source: str, line: int) -> bool:
    """Whether a line is within an `if` that compares `__name__`."""
    return any(isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or node.lineno)
               and any(isinstance(name, ast.Name) and name.id == "__name__" for name in ast.walk(node.test))
               for node in ast.walk(ast.parse(source)))
