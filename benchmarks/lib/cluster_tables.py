"""Tables of the benchmarks with several workers: measured, calibrated (real processes, steps of given duration) and simulated."""

from __future__ import annotations

from benchmarks.lib.table import Content, Table, number, range_of, times


def cluster_rollout(content: Content, _: str) -> Table:
    found = content["variants"]
    static = found["static"]
    rows = [(name, f"{cell['seconds']:.1f}", times(static["seconds"] / cell["seconds"]), f"{cell['simulated_s']:.1f}",
             f"{cell['idle']:.0%}", f"{cell['training']:.0%}", f"{cell['tail_s']:.1f}", cell["moves"])
            for name, cell in found.items()]
    best = list(found.values())[-1]
    sentence = (f"{times(static['seconds'] / best['seconds'])} with everything; idle {static['idle']:.0%} → {best['idle']:.0%}. "
                "Worker processes, messages and migration are real; a step computes nothing and lasts what an H200's cost curve "
                "says.")
    if "pause" in content:
        one = [abs(cell["seconds"] / cell["simulated_s"] - 1) for cell in content["one_worker"].values()]
        sentence += (f" A migration pauses a request for {content['pause']['pause_steps']:.1f} steps (median). The simulation is "
                     f"within {content['reached']['simulation_error'][0]:.0%}, on one worker {max(one):.0%}; the coordinator "
                     f"of 64 simulated workers takes {content['coordinator_share_64']:.1%} of a core.")
    return Table("Rollout of a long-tailed batch on several workers, calibrated", sentence,
                 ("variant", "seconds", "to static", "simulated, s", "idle", "training", "last 10 %, s", "moves"), rows)


TRAIN_COLUMNS = ("variant", "generate, s", "to static", "step, s", "tokens/s", "idle", "training", "moves", "pause, ms",
                 "drafter", "identical")


def cluster_train(content: Content, _: str) -> Table:
    found, workers = content["variants"], content["workers"]
    best, static = list(found.values())[-1], found.get("static", {})
    where = {"even": "", "uneven": ", the last of which takes three times as long for its steps"}[content["scenario"]]
    device = "that share one GPU" if content["on_gpu"] else f"on {content['cores']} cores"
    sentence = (f"Measured from end to end, with real generation and training: {workers} workers {device}{where}. "
                f"Generation takes {best['generate_s']:.2f} s per step with everything")
    if static:
        sentence += f", {times(static['generate_s'] / best['generate_s'])} as fast as with static assignment"
    sentence += f"; idle {static.get('idle', 0.0):.0%} → {best['idle']:.0%}." if static else "."
    title = f"RL steps on several workers{' on a GPU' if content['on_gpu'] else ''}{', one of them slow' if where else ''}"
    return Table(title, sentence, TRAIN_COLUMNS, train_rows(content))


def train_rows(content: Content) -> list[tuple[object, ...]]:
    static = content["variants"].get("static")

    def text(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [(name, f"{cell['generate_s']:.2f}", times(None if static is None else static["generate_s"] / cell["generate_s"]),
             f"{cell['step_s']:.2f}", number(cell["tokens"] / cell["generate_s"]), f"{cell['idle']:.0%}",
             f"{cell['training']:.0%}", cell["moves"], text(cell["pause_ms"], ".0f"), text(cell["drafter_accept_length"], ".2f"),
             f"{text(cell['identical'], ',')} of {cell['compared']:,}") for name, cell in content["variants"].items()]


REALLOCATION_COLUMNS = ("workers", "answers", "slots", "case", "gain without speculation", "with it", "moves")


def cluster_reallocation(content: Content, _: str) -> Table:
    cells = content["cases"]
    alike, slow = ([cell["gain"] for cell in cells if (cell["case"] == "all alike") == is_alike and "join" not in cell["case"]]
                   for is_alike in (True, False))
    sentence = (f"Simulated: {range_of(slow)} where one worker is slow, {range_of(alike)} where all are alike. Requests are "
                f"moved if that saves at least {content['min_gain']:.0%} of the time that a worker has left.")
    return Table("Gain of moving running requests between workers", sentence, REALLOCATION_COLUMNS, reallocation_rows(content))


def reallocation_rows(content: Content) -> list[tuple[object, ...]]:
    """A row per case; the range is that of the seeds."""
    rows: dict[tuple[object, ...], dict[bool, Content]] = {}
    for cell in content["cases"]:
        key = cell["workers"], number(cell["answers"]), cell["slots"], cell["case"]
        rows.setdefault(key, {})[cell["speculates"]] = cell

    def gain(cell: Content | None) -> str:
        return "–" if cell is None else f"{times(cell['gain'])} ({times(cell['least'])}–{times(cell['most'])})"

    return [(*key, gain(found.get(False)), gain(found.get(True)), " / ".join(f"{found[on]['moves']:.0f}" for on in sorted(found)))
            for key, found in rows.items()]


ASYNC_COLUMNS = ("variant", "step, s", "to synchronous", "tokens/s", "to synchronous", "rollouts waited for, s", "update, s",
                 "of it overlapped", "workers generate", "staleness")


def cluster_asynchronous(content: Content, _: str) -> Table:
    found, first = content["variants"], _fastest_synchronous(content)
    stale = found.get("staleness 1")
    sentence = (f"Measured from end to end: {content['workers']} worker processes on {content['cores']} cores, the bundled "
                "policy, one answer in eight many times as long as the others.")
    if stale is not None:
        sentence += (f" With staleness 1 a step takes {stale['step_s']:.2f} s instead of {first['step_s']:.2f} s, the faster of "
                     f"the two synchronous ways: {times(first['step_s'] / stale['step_s'])} as fast.")
    return Table("RL steps with rollouts that may be stale", sentence, ASYNC_COLUMNS, async_rows(content))


def async_rows(content: Content) -> list[tuple[object, ...]]:
    first = _fastest_synchronous(content)

    def speed(cell: Content) -> float:
        return cell["tokens"] / cell["step_s"]

    return [(name, f"{cell['step_s']:.2f}", times(first["step_s"] / cell["step_s"]), number(speed(cell)),
             times(speed(cell) / speed(first)), f"{cell['generate_s']:.2f}", f"{cell['update_s']:.2f}",
             f"{cell['overlap_s'] / cell['update_s']:.0%}", f"{cell['busy']:.0%}",
             f"{cell['staleness']:.2f} (at most {cell['staleness_max']:.0f})") for name, cell in content["variants"].items()]


def _fastest_synchronous(content: Content) -> Content:
    """The synchronous variant with the shortest steps; the first variant if none was measured."""
    cells = [cell for name, cell in content["variants"].items() if name.startswith("synchronous")]
    return min(cells or list(content["variants"].values())[:1], key=lambda cell: cell["step_s"])
