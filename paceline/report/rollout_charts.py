"""The charts of how rollouts were generated: within a step, by batch size, along the answer and by drafter version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from paceline.report.charts import steps_and_values, with_moving_mean
from paceline.report.formatting import format_time, format_value
from paceline.report.metrics import Record, finite_value
from paceline.report.plotting import Bar, BarAxis, Chart, Series, bar_chart, line_chart
from paceline.report.trace import Sums, sums_by_batch

Trace = Mapping[str, Any]
"""What happened within one training step, as read from `trace.jsonl`."""

_DRAFTERS = {"none": ("grey", "off"), "suffix": ("blue", "suffix drafter"), "eagle": ("green", "learned drafter"),
             "": ("pale", "prefill only")}
"""Drafter of a strategy → colour and name."""
_MIN_VERIFICATIONS = 16
"""Fewest verifications that an accept length is drawn for."""


def course_chart(trace: Trace, record: Record, which: str = "") -> Chart | None:
    """Live answers over the time of one step's generation, coloured by the strategy's drafter, and without speculation. The
    times are those of the step's metrics."""
    on, off = trace.get("on", {}), trace.get("off", {})
    seconds = finite_value(record, "time/generate") or on.get("seconds")
    if not on.get("live") or not seconds:
        return None
    bars, legend = course_bars(on, seconds)
    off_seconds = finite_value(record, "time/generate_off")
    lines, longest = [], seconds
    if off.get("live") and off_seconds:
        x, longest = np.linspace(0, off_seconds, len(off["live"]) + 1), max(seconds, off_seconds)
        lines = [Series("the same answers without speculation", "ink", x, np.array([*off["live"], 0.0]), dashed=True,
                        stairs=True)]
    title = f"Inside step {trace['step']}{which}: answers that are not finished"
    return bar_chart(title + (", and who drafts" if "strategy" in on else ""), bars,
                     BarAxis((0.0, longest), "seconds of generation"), "live answers", legend, lines=lines,
                     note=_course_note(on, seconds, off_seconds if lines else None))


def course_bars(on: Mapping[str, Any], seconds: float) -> tuple[list[Bar], dict[str, str]]:
    """A bar for each stretch of a generation in which neither the number of live answers nor the strategy changes, and what the
    bars' colours mean."""
    live, width, bars, at = on["live"], seconds / len(on["live"]), [], 0
    strategies = [on["strategies"][i] for i in on["strategy"]] if "strategy" in on else [None] * len(live)
    for (num, strategy), run in groupby(zip(live, strategies, strict=True)):
        end, colour = at + len(list(run)), "blue" if strategy is None else _DRAFTERS[_drafter_of(strategy)][0]
        name = "" if strategy is None else f", {strategy or 'prefill'}"
        bars.append(Bar(at * width, end * width, {colour: num}, f"{at * width:.2f} s{name}"))
        at = end
    if "strategy" not in on:
        return bars, {"blue": "live answers"}
    used = {_drafter_of(strategy) for strategy in strategies if strategy is not None}
    return bars, dict(_DRAFTERS[name] for name in _DRAFTERS if name in used)


def _course_note(on: Mapping[str, Any], seconds: float, off_seconds: float | None) -> str:
    """The long tail and where speculation sets in, in words."""
    live, total = on["live"], on.get("total", on["live"][0])
    half = next((i for i, num in enumerate(live) if num <= total / 2), len(live))
    parts = [f"Half of the {total:,} answers were done after {100 * half / len(live):.0f} % of the time."]
    drafts = [on["strategies"][i] not in ("off", "") for i in on.get("strategy", ())]
    share = 100 * sum(drafts) / max(1, len(drafts))
    tail = next((i for i in range(len(drafts)) if all(drafts[i:])), None)  # from here on it is always on
    if drafts and share >= 99:
        parts.append("Speculation was on throughout.")
    elif share:
        parts.append(f"Speculation was on in {share:.0f} % of the time"
                     + (f", and always from {live[tail]} live answers down." if tail is not None and live[tail] > 1 else "."))
    elif drafts:
        parts.append("Speculation was off: it would not have paid.")
    if off_seconds is not None:
        parts.append(f"{format_time(seconds)} instead of {format_time(off_seconds)} without speculation.")
    return " ".join(parts)


def strategy_chart(traces: Sequence[Trace]) -> Chart | None:
    """Share of the generation time with each drafter, by the number of requests in the batch."""
    cells = sums_by_batch(traces)
    if len({name for drafters in cells.values() for name in drafters}) < 2:  # nothing was chosen
        return None
    bars, ticks = [], {}
    for place, (bucket, drafters) in enumerate(cells.items()):
        total = sum(sums.seconds for sums in drafters.values()) or 1.0
        ticks[float(place)] = _batch_name(bucket)
        label = f"{ticks[place]} requests" + "".join(
            f"; {_DRAFTERS[name][1]}: accept length {sums.accept_length:.2f}" for name, sums in drafters.items() if sums.drafted)
        parts = {_DRAFTERS[name][0]: 100 * drafters[name].seconds / total for name in _DRAFTERS if name in drafters}
        bars.append(Bar(place - 0.4, place + 0.4, parts, label))
    legend = dict(_DRAFTERS[name] for name in _DRAFTERS if any(name in drafters for drafters in cells.values()))
    return bar_chart("Strategy by batch size", bars, BarAxis((-0.5, len(cells) - 0.5), "requests in the batch", ticks),
                     "% of the time", legend, wide=False,
                     note="Who drafted, by time. A step begins with large batches and ends with small ones.")


def accept_length_chart(records: Sequence[Record], traces: Sequence[Trace]) -> Chart | None:
    """Accept length per step: of all passes, and of those that verified drafts."""
    series = [Series("all passes", "blue", *steps_and_values(records, "accept_length"))]
    if not len(series[0].x):
        return None
    drafted = {trace["step"]: _sum(sums for _, sums in _drafting(trace)) for trace in traces}
    x = [step for step, sums in drafted.items() if sums.verifications]
    if x:
        y = [drafted[step].accept_length for step in x]
        series = _unless_equal(series[0], Series("passes that verify drafts", "green", np.array(x, float), np.array(y)))
    lines, note = with_moving_mean(series)
    meaning = "Tokens that one pass of the policy yields per answer; 1 is decoding without speculation."
    return line_chart("Accept length by step", lines, "step", "tokens per verification", note=f"{meaning} {note}".strip())


def accept_position_chart(traces: Sequence[Trace]) -> Chart | None:
    """Accept length by position in the answer."""
    found = [trace["position"] for trace in traces if "position" in trace]
    if not found:
        return None
    width, series = found[-1]["width"], []
    for key, name, colour in (("all", "all passes", "blue"), ("drafted", "passes that verify drafts", "green")):
        sums = np.zeros((max(len(position[key]) for position in found), 2))
        for position in found:
            if position["width"] == width:
                sums[: len(position[key])] += position[key]
        enough = sums[:, 1] >= _MIN_VERIFICATIONS
        x, y = (np.arange(len(sums))[enough] + 0.5) * width, sums[enough, 0] / sums[enough, 1]
        series += [Series(name, colour, x, y)] if len(x) else []
    if not series:
        return None
    series = _unless_equal(*series) if len(series) > 1 else series
    return line_chart("Accept length along the answer", series, "token of the answer", "tokens per verification",
                      note=f"Means over {width} positions and all steps.")


def drafter_version_chart(traces: Sequence[Trace]) -> Chart | None:
    """Accept length of the learned drafter by its version: the number of policy updates it has seen."""
    versions: dict[int, Sums] = {}
    for trace in traces:
        own = _sum(sums for name, sums in _drafting(trace) if name == "eagle")
        if "drafter_version" in trace and own.verifications >= _MIN_VERIFICATIONS:
            versions[trace["drafter_version"]] = versions.get(trace["drafter_version"], Sums()) + own
    if not versions:
        return None
    x = sorted(versions)
    series = Series("accept length", "green", np.array(x, float), np.array([versions[v].accept_length for v in x]))
    return line_chart("Accept length by drafter version", [series], "drafter version (step of the policy it was trained for)",
                      "tokens per verification", note="Passes that verify drafts of the learned drafter.")


def drafter_cost_chart(records: Sequence[Record], traces: Sequence[Trace]) -> Chart | None:
    """Seconds that the run waited for the drafter's training, and those that the trained drafter saved, summed up."""
    if not any(finite_value(record, "time/drafter") for record in records):
        return None
    used = {trace["step"]: _sum(sums for name, sums in _drafting(trace) if name == "eagle").seconds for trace in traces}
    gain, spent, saved = 0.0, [0.0], [0.0]
    for record in records:
        spent.append(spent[-1] + (finite_value(record, "time/drafter") or 0.0))
        saved.append(saved[-1] + gain * used.get(record["step"], 0.0))
        before, after = finite_value(record, "drafter/expected_before"), finite_value(record, "drafter/expected_after")
        if before and after and record.get("drafter/published"):
            gain = (1 + gain) * after / before - 1
    x = np.array([record["step"] for record in records], float)
    series = [Series("waited for training", "teal", x, np.array(spent[1:])), Series("saved", "green", x, np.array(saved[1:]))]
    beside = sum(finite_value(record, "drafter/beside_seconds") or 0.0 for record in records)
    note = (f"Training the drafter took {format_time(spent[-1])} of the run"
            + (f" (and {format_time(beside)} during generation)" if beside else "")
            + f" and saved about {format_time(max(0.0, saved[-1]))} so far: estimated from the accept length on held-out "
            f"answers, {format_value(1 + gain)}× that of the drafter at the start.")
    return line_chart("What training the drafter cost and saved", series, "step", "seconds, summed up", from_zero=True,
                      note=note)


def _unless_equal(everything: Series, part: Series) -> list[Series]:
    """Both lines, or only the first if the second is the same."""
    if len(everything.x) == len(part.x) and np.allclose(everything.x, part.x) and np.allclose(everything.y, part.y, 1e-3):
        return [everything]
    return [everything, part]


def _drafting(trace: Trace) -> list[tuple[str, Sums]]:
    """Drafter and sums of the passes of a step that verified drafts."""
    return [(name, Sums(*sums)) for drafters in trace.get("batch", {}).values() for name, sums in drafters.items()
            if name != "none"]


def _sum(parts: Any) -> Sums:
    total = Sums()
    for sums in parts:
        total += sums
    return total


def _drafter_of(strategy: str | None) -> str:
    """Drafter of a strategy as it is written in a trace."""
    return "" if not strategy else "none" if strategy == "off" else strategy.partition(":")[0]


def _batch_name(bucket: int) -> str:
    """Range of batch sizes n of which (n - 1) has this bit length."""
    low, high = 2 ** (bucket - 1) + 1 if bucket else 1, 2**bucket
    return str(high) if low >= high else f"{low}–{high}"
