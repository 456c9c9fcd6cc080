"""`paceline demo`: the same prompts with and without speculation side by side, coloured by who proposed each token."""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.bench.demo import DemoOptions, Piece, Side, run_demo, summarize
from paceline.bench.trl_racer import check_trl
from paceline.cli.log import clear_progress, say
from paceline.files import atomic_write
from paceline.generation import strategy_shares
from paceline.models.weights import check_device, check_model, load_model

_NAMES = {"off": "without speculation", "auto": "with speculation", "trl": "TRL (transformers)"}
_COLOURS = {"suffix": "green", "eagle": "cyan"}
_DRAW_EVERY_S, _HOLD_S = 0.1, 0.8
"""Seconds between two drawings, and for which the answers to a prompt stay on a terminal."""
_SHOWN_TOKENS = 240
"""Number of tokens at the end of an answer that are shown."""


def demo(options: DemoOptions) -> int:
    """Runs the demo, prints its figures and writes them to `summary.json`. Returns the exit code."""
    if options.against == "trl":
        check_trl()
    check_device(options.device)
    check_model(options.model)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out}: is a file, not a folder")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, options.device, options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model}: the demonstration needs a tokenizer")
    say("warming up; the kernels compile on first use")
    with RaceView(options.prompts, tokenizer, Console()) as view:
        sides = run_demo(model, tokenizer, options, view.on_step)
    summary = summarize(sides, options, model)
    file = options.out / "summary.json"
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(summary, indent=2) + "\n")
    show(summary, sides, Console())
    print(f"Figures: {file}")
    return 0


class RaceView:
    """Shows both sides of the race: on a terminal as they go on, otherwise after each prompt."""

    def __init__(self, prompts: tuple[str, ...], tokenizer: Any, console: Console) -> None:
        self._prompts, self._tokenizer, self._console = prompts, tokenizer, console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_drawing = 0.0

    def __enter__(self) -> RaceView:
        clear_progress()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def on_step(self, prompt: int, sides: list[Side]) -> None:
        """Called after every step of one side. Drawing stops both clocks."""
        is_over = all(side.is_done for side in sides)
        if self._live is None:
            if is_over:
                self._console.print(self._line(prompt, sides), markup=False, highlight=False, soft_wrap=True)
        elif is_over or time.perf_counter() >= self._next_drawing:
            self._live.update(self._draw(prompt, sides), refresh=True)
            self._next_drawing = time.perf_counter() + _DRAW_EVERY_S
            if is_over:
                time.sleep(_HOLD_S)
        if is_over and prompt == len(self._prompts) - 1 and self._live is not None:
            self._console.print(self._draw(prompt, sides))  # the last one stays

    def _line(self, prompt: int, sides: list[Side]) -> str:
        times = ", ".join(f"{_NAMES[side.name]} {side.prompt_seconds:.2f} s" for side in sides)
        return f"{_short(self._prompts[prompt], 40)}: {times}{self._same(sides, ', ')}"

    def _draw(self, prompt: int, sides: list[Side]) -> RenderableType:
        height = max(6, min(16, self._console.height - 8))
        grid = Table.grid(expand=True)
        for _ in sides:
            grid.add_column(ratio=1)
        grid.add_row(*(self._pane(side, height) for side in sides))
        head = Text(f"Prompt {prompt + 1} of {len(self._prompts)}: {_short(self._prompts[prompt])}", style="bold", no_wrap=True)
        foot = Text.assemble("tokens: ", ("accepted from the suffix drafter", "green"), ", ", ("from a learned drafter", "cyan"),
                             ", the policy's own", (self._same(sides, "   "), "bold"))
        return Group(head, grid, foot)

    def _pane(self, side: Side, height: int) -> Panel:
        rate = side.num_prompt_tokens / side.prompt_seconds if side.prompt_seconds else 0.0
        done = " ✓" if side.is_done else ""
        title = f"{_NAMES[side.name]}: {side.prompt_seconds:.2f} s{done}, {rate:.0f} tokens/s"
        text = coloured(side.pieces[0], self._tokenizer)
        lines = text.wrap(self._console, max(10, self._console.width // 2 - 4))
        return Panel(Text("\n").join(lines[-(height - 2):]), title=title, title_align="left", height=height,
                     border_style="green" if side.is_done else "none")

    @staticmethod
    def _same(sides: list[Side], before: str) -> str:
        """Whether the first answers are identical as far as both have come; nothing about another library's."""
        if sides[0].name != "off":
            return ""
        left, right = ([token for pieces in side.pieces for piece in pieces for token in piece.token_ids] for side in sides)
        if len(sides[0].pieces) > 1 and not all(side.is_done for side in sides):
            left, right = ([token for piece in side.pieces[0] for token in piece.token_ids] for side in sides)
        shared = min(len(left), len(right))
        same = left[:shared] == right[:shared] and (len(left) == len(right) or not all(side.is_done for side in sides))
        return f"{before}identical: {'yes' if same else 'no'}"


def coloured(pieces: list[Piece], tokenizer: Any) -> Text:
    """The end of an answer; accepted draft tokens in their drafter's colour."""
    parts: list[tuple[list[int], str]] = []
    for piece in pieces:
        num = piece.num_drafted
        parts += [(piece.token_ids[:num], _COLOURS.get(piece.drafter, "")), (piece.token_ids[num:], "")]
    text, ids, shown = Text(), [token for part, _ in parts for token in part], ""
    start, end = max(0, len(ids) - _SHOWN_TOKENS), 0
    for part, colour in parts:
        end += len(part)
        if part and end > start:  # decoded from the start: a token's text depends on those before it
            so_far = tokenizer.decode(ids[start:end], skip_special_tokens=True)
            text.append(so_far[len(shown):], style=colour)
            shown = so_far
    return text


def show(summary: dict[str, Any], sides: list[Side], console: Console) -> None:
    """Prints the figures."""
    table = Table(title=f"{summary['rollouts']} rollouts of {summary['prompts']} prompts, temperature {summary['temperature']}, "
                        f"{summary['dtype']}, {summary['device']}, {summary['threads']} threads")
    for column in ("", "tokens", "seconds", "tokens/s", "tokens per verification"):
        table.add_column(column, justify="right" if column else "left")
    for side in sides:
        row = summary[side.name]
        table.add_row(_NAMES[side.name], f"{row['tokens']:,}", f"{row['seconds']:.1f}", f"{row['tokens_per_second']:.1f}",
                      f"{row['tokens_per_verification']:.2f}")
    console.print(table)
    speedup = summary["speedup"]
    against = "TRL" if sides[0].name == "trl" else "no speculation"
    print(f"Tokens per second vs. {against}: {speedup:.2f}×{' (slower)' if speedup < 1 else ''}. "
          f"Strategies by steps: {strategy_shares(summary['auto']['strategy_steps'])}.")
    print(_verdict(summary))


def _verdict(summary: dict[str, Any]) -> str:
    if "identical" not in summary:
        return "TRL samples with other random numbers, so that its answers differ; its tokens and time are what is compared."
    if summary["identical"]:
        return f"identical: yes (token ids of all {summary['rollouts']} rollouts, with speculation off and on)"
    return (f"identical: no. {summary['differing_rollouts']} of {summary['rollouts']} rollouts differ, in "
            f"{summary['differing_tokens']} tokens ({summary['dtype']}): verifying several tokens at once rounds differently in "
            "the last digits, which can decide a near-tie the other way, and what follows such a token differs too. Compare with "
            "--dtype float64.")


def _short(text: str, length: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length] + " …"
