"""The engine on a CPU against transformers `generate` and vLLM's CPU build: same weights, same prompts, same run.

    python benchmarks/engine.py                            ours and transformers
    python benchmarks/engine.py --vllm ENV/bin/python      vLLM too (scripts/vllm_cpu_env.sh makes ENV)
    python benchmarks/engine.py --quick                    does it run at all

Timings of identical runs differ by tens of percent on shared machines: engines take turns, round by round, every ratio is
between neighbours of one round, medians are reported with their spread, and tokens per CPU second beside tokens per second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    ROOT,
    Goal,
    Message,
    Stopwatch,
    Worker,
    ask_alone,
    print_goals,
    print_table,
    rss_mb,
    serve,
    spread,
    versions,
    write_results,
)

SUFFIX = "suffix:d8w2v16"
STRATEGIES = ("off", SUFFIX, "auto")
SMALL, SMOLLM2 = "12x256", "SmolLM2-135M"
MAX_CONTEXT = 1024
SECTIONS = ("throughput", "repetitive", "overhead", "memory")


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        serve({"paceline": make_paceline, "transformers": make_transformers}[options.worker])
        return
    bench = Bench(options)
    content: Message = {"settings": {k: v for k, v in vars(options).items() if k != "worker"}}
    if options.vllm:
        content["peer_versions"] = versions(options.vllm)
    goals: list[Goal] = []
    sections = {"throughput": throughput, "repetitive": repetitive, "overhead": overhead, "memory": memory}
    for name in options.sections:
        content[name] = []
        for dtype in options.dtype:
            sections[name](bench, dtype, content[name], goals)
        content["goals"] = [goal.record() for goal in goals]
        file = write_results("engine", content, options.threads, options.out)  # after each section: a long run loses little
    print_goals(goals)
    print(file)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=[SMALL, SMOLLM2], choices=[SMALL, SMOLLM2], help="of the throughput part")
    add("--smollm2", default=str(ROOT / ".models" / "smollm2.gguf"), help="scripts/get_smollm2.py fetches it")
    add("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--batch", nargs="+", type=int, default=[1, 8, 32])
    add("--prompt-tokens", nargs=2, type=int, default=[64, 128], metavar=("LOW", "HIGH"))
    add("--new-tokens", type=int, default=192)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    add("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    add("--vllm-iomp", action=argparse.BooleanOptionalAction, default=True,
        help="preload the libiomp5 of vLLM's environment, as its manual advises")
    add("--work", default=str(ROOT / ".models" / "bench"), help="the models as folders, and the workers' logs")
    add("--out", type=Path, default=None, help=f"default: {RESULTS / 'engine.json'}")
    add("--quick", action="store_true", help="tiny settings: shows that it runs, says nothing about speed")
    add("--worker", choices=["paceline", "transformers"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.dtype, options.batch = [SMALL], options.dtype[:1], [1, 8]
        options.prompt_tokens, options.new_tokens, options.rounds = [16, 24], 8, 1
        options.out = options.out or RESULTS / "engine-quick.json"
    return options


# --- sections: each measures one dtype, appends its records and goals, and prints its table


def throughput(bench: Bench, dtype: str, records: list[Message], goals: list[Goal]) -> None:
    """Every engine, same prompts, exactly the same number of tokens."""
    for model in bench.options.models:
        with bench.workers(model, dtype) as workers:
            rows = []
            for batch in bench.options.batch:
                taking_part = {name: w for name, w in workers.items() if batch == 1 or name != "vllm eager"}
                runs = bench.rounds(taking_part, model, batch)
                rows += [_throughput_row(batch, name, runs, records, model, dtype) for name in taking_part]
                goals += _throughput_goals(model, dtype, batch, runs)
            print_table(f"{model}, {dtype}, {bench.options.new_tokens} tokens, temperature 1; median (spread), "
                        f"{bench.options.rounds} rounds",
                        ("batch", "engine", "tokens/s", "tokens/CPU s", "× transformers", "tokens/verification"), rows)
            _print_memory(model, dtype, workers, records)


def repetitive(bench: Bench, dtype: str, records: list[Message], goals: list[Goal]) -> None:
    """Answers that repeat their prompt: off, suffix and auto, one at a time and eight together. Fresh engines, so nothing is
    remembered from an earlier round; answers end where the model ends them."""
    count, limit = (2, 12) if bench.options.quick else (8, 256)
    cases = ((0.0, count), (1.0, 1)) if bench.options.quick else ((0.0, 1), (0.0, count), (1.0, 1), (1.0, count))
    prompts = bench.repetitive_prompts(count)
    rows = []
    with bench.paceline(SMOLLM2, dtype) as worker:
        for temperature, together in cases:
            runs: dict[str, list[Message]] = {strategy: [] for strategy in STRATEGIES}
            mine = prompts if together > 1 else prompts[: max(1, count // 2)]
            for number in range(bench.options.rounds):
                for strategy in _rotated(STRATEGIES, number):
                    message = {"strategy": strategy, "prompts": mine, "new_tokens": limit, "temperature": temperature,
                               "ignore_eos": False, "fresh": True, "max_batch": together, "seed": number}
                    runs[strategy].append(worker.ask(message))
            for strategy in STRATEGIES:
                speedup = spread(_ratios(runs[strategy], runs["off"]))
                same = statistics.mean(a == b for run, off in zip(runs[strategy], runs["off"], strict=True)
                                       for a, b in zip(run["digests"], off["digests"], strict=True))
                tokens_per_check = statistics.median(run["tokens_per_verification"] for run in runs[strategy])
                rows.append((temperature, together, strategy, spread(_rates(runs[strategy])), speedup, tokens_per_check,
                             f"{same:.0%}"))
                records.append({"dtype": dtype, "temperature": temperature, "batch": together, "strategy": strategy,
                                "speedup": speedup._asdict(), "tokens_per_verification": tokens_per_check,
                                "same_answers_as_off": same, "runs": _without_digests(runs[strategy])})
            goals.append(Goal(f"{SMOLLM2} {dtype}, repetitive, temperature {temperature:g}, batch {together}: suffix / off",
                              statistics.median(_ratios(runs[SUFFIX], runs["off"])), 1.5))
    print_table(f"{SMOLLM2}, {dtype}, repetitive prompts", ("temperature", "batch", "strategy", "tokens/s", "× off",
                                                            "tokens/verification", "same answers as off"), rows)


def overhead(bench: Bench, dtype: str, records: list[Message], goals: list[Goal]) -> None:
    """What suffix drafting costs where nothing repeats: random weights, random prompts, against an engine without a drafter,
    in one process, turn and turn about."""
    rows = []
    with bench.paceline(SMALL, dtype) as worker:
        for batch in bench.options.batch:
            bench.warm_up(worker, batch, STRATEGIES)
            runs: dict[str, list[Message]] = {strategy: [] for strategy in STRATEGIES}
            for number in range(1 if bench.options.quick else 3 * bench.options.rounds):
                run = bench.run_message(SMALL, batch, number)
                for strategy in _rotated(STRATEGIES, number):
                    runs[strategy].append(worker.ask(run | {"strategy": strategy}))
            for strategy in STRATEGIES[1:]:
                cost = spread([1 / ratio for ratio in _ratios(runs[strategy], runs["off"])])
                cpu = spread([a["cpu_seconds"] / b["cpu_seconds"] for a, b in zip(runs[strategy], runs["off"], strict=True)])
                tokens_per_check = statistics.median(run["tokens_per_verification"] for run in runs[strategy])
                rows.append((batch, strategy, cost, cpu, tokens_per_check))
                records.append({"dtype": dtype, "batch": batch, "strategy": strategy, "time_over_off": cost._asdict(),
                                "cpu_over_off": cpu._asdict(), "runs": _without_digests(runs[strategy]),
                                "off_runs": _without_digests(runs["off"])})
                if strategy == SUFFIX:
                    what = f"{SMALL} {dtype}, random text, batch {batch}: suffix time / off time"
                    goals.append(Goal(what, cost.median, 1.05, at_least=False))
    print_table(f"{SMALL}, {dtype}, random text: cost of drafting in vain",
                ("batch", "strategy", "time / off", "CPU time / off", "tokens/verification"), rows)


def memory(bench: Bench, dtype: str, records: list[Message], goals: list[Goal]) -> None:
    """Resident memory against live tokens, and after ten times as many finished ones; a process of its own for each case."""
    rows = []
    count, prompt, new = (8, 64, 16) if bench.options.quick else (64, 224, 96)
    cases = (("off", "for the live"), ("off", "1 GiB"), (SUFFIX, "1 GiB"))
    for strategy, pool in cases[:1] if bench.options.quick else cases:
        kv_tokens = count * (prompt + new + 32) if pool == "for the live" else None
        with bench.paceline(SMALL, dtype) as worker:
            series = worker.ask({"memory": True, "strategy": strategy, "count": count, "prompt_tokens": prompt,
                                 "new_tokens": new, "kv_tokens": kv_tokens})
        live, finished = series["live"], series["finished"]
        slope = (live[-1]["rss_mb"] - live[0]["rss_mb"]) * 2**10 / (live[-1]["tokens"] - live[0]["tokens"])
        growth = finished[-1]["rss_mb"] - finished[0]["rss_mb"]
        rows.append((strategy, pool, " → ".join(f"{p['tokens']:,}: {p['rss_mb']:.0f}" for p in live), slope,
                     series["kv_bytes_per_token"] / 2**10,
                     f"{finished[0]['tokens']:,}: {finished[0]['rss_mb']:.0f}",
                     f"{finished[-1]['tokens']:,}: {finished[-1]['rss_mb']:.0f}", growth))
        records.append({"dtype": dtype, "strategy": strategy, "kv_pool": pool, "kib_per_live_token": slope,
                        "growth_mb": growth} | series)
        if kv_tokens is not None:
            ratio = finished[-1]["rss_mb"] / finished[0]["rss_mb"]
            what = f"{SMALL} {dtype}, memory after 10× as many finished tokens / before"
            goals.append(Goal(what, ratio, 1.05, at_least=False))
    print_table(f"{SMALL}, {dtype}: resident MiB (a large pool keeps the prompts of finished requests until it is full)",
                ("strategy", "KV pool", "live tokens: MiB", "KiB/live token", "of it KV", "finished tokens: MiB",
                 "10× as many", "growth"), rows)


def _throughput_row(batch: int, name: str, runs: dict[str, list[Message]], records: list[Message], model: str,
                    dtype: str) -> list[object]:
    mine = runs[name]
    rate, cpu_rate = spread(_rates(mine)), spread([run["tokens"] / run["cpu_seconds"] for run in mine])
    against = spread(_ratios(mine, runs["transformers"]))
    tokens_per_check = statistics.median(run.get("tokens_per_verification", 1.0) for run in mine)
    records.append({"model": model, "dtype": dtype, "batch": batch, "engine": name, "tokens_per_second": rate._asdict(),
                    "tokens_per_cpu_second": cpu_rate._asdict(), "runs": _without_digests(mine)})
    return [batch, name, rate, cpu_rate, against, tokens_per_check]


def _throughput_goals(model: str, dtype: str, batch: int, runs: dict[str, list[Message]]) -> Iterator[Goal]:
    off, where = runs["paceline off"], f"{model} {dtype}, batch {batch}: off"
    if batch == 8:
        yield Goal(f"{where} / transformers", statistics.median(_ratios(off, runs["transformers"])), 3.0)
    peer = "vllm eager" if batch == 1 else "vllm compiled"
    if peer in runs:
        yield Goal(f"{where} / {peer}", statistics.median(_ratios(off, runs[peer])), 1.0)


def _print_memory(model: str, dtype: str, workers: dict[str, Worker], records: list[Message]) -> None:
    rows = []
    for name, worker in workers.items():
        rows.append((name, worker.rss_loaded_mb, worker.peak_rss_mb, worker.start_seconds, f"{worker.idle_cpu:.1%}"))
        records.append({"model": model, "dtype": dtype, "engine": name, "rss_loaded_mb": worker.rss_loaded_mb,
                        "peak_rss_mb": worker.peak_rss_mb, "start_seconds": worker.start_seconds,
                        "idle_cpu": worker.idle_cpu})
        if worker.idle_cpu > 0.05:
            print(f"WARNING: {name} burnt {worker.idle_cpu:.0%} of a core while others were measured", file=sys.stderr)
    print_table(f"{model}, {dtype}: memory of each engine's process", ("engine", "MiB after loading", "peak MiB", "start s",
                                                                       "core share when idle"), rows)


def _rates(runs: Sequence[Message]) -> list[float]:
    return [run["tokens"] / run["seconds"] for run in runs]


def _ratios(mine: Sequence[Message], theirs: Sequence[Message]) -> list[float]:
    """Speed against a neighbour of the same round."""
    return [a / b for a, b in zip(_rates(mine), _rates(theirs), strict=True)]


def _rotated(items: Sequence[str], by: int) -> list[str]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def _without_digests(runs: Sequence[Message]) -> list[Message]:
    return [{k: v for k, v in run.items() if k != "digests"} for run in runs]


# --- what the sections stand on: models on disk, prompts, workers


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work = Path(options.work)
        self._tokenizer: Any = None

    def folder(self, model: str) -> Path:
        """The model as a folder that every engine loads: float32, cast by each to the dtype of the run."""
        from paceline.models.save import save_model
        from paceline.models.weights import load_model

        folder = self.work / model
        if not (folder / "config.json").is_file():
            if model == SMALL:
                save_model(random_model(), None, folder)
            else:
                save_model(*load_model(self.options.smollm2, dtype="float32"), folder)
        return folder

    @contextmanager
    def workers(self, model: str, dtype: str) -> Iterator[dict[str, Worker]]:
        """All engines, warmed up at every batch."""
        started: dict[str, Worker] = {}
        try:
            for strategy in STRATEGIES[:2] if self.options.quick else STRATEGIES:
                started[f"paceline {strategy.split(':')[0]}"] = self._start("paceline", model, dtype, strategy=strategy)
            started["transformers"] = self._start("transformers", model, dtype)
            if self.options.vllm:
                started["vllm compiled"] = self._start("vllm", model, dtype, eager=False)
                started["vllm eager"] = self._start("vllm", model, dtype, eager=True)
            for worker in started.values():
                for batch in self.options.batch:
                    self.warm_up(worker, batch)
            yield started
        finally:
            for worker in started.values():
                worker.close()

    @contextmanager
    def paceline(self, model: str, dtype: str) -> Iterator[Worker]:
        worker = self._start("paceline", model, dtype)
        try:
            yield worker
        finally:
            worker.close()

    def warm_up(self, worker: Worker, batch: int, strategies: Sequence[str] = (STRATEGIES[0],)) -> None:
        """Text that repeats, so that drafting takes all its paths."""
        prompts = [[10 + i, 20, 30, 40] * 8 for i in range(batch)]
        for strategy in strategies:
            worker.ask({"prompts": prompts, "new_tokens": 8, "temperature": 1.0, "seed": 0, "default_strategy": strategy})

    def rounds(self, workers: dict[str, Worker], model: str, batch: int) -> dict[str, list[Message]]:
        """Each engine once per round, the first one rotating."""
        runs: dict[str, list[Message]] = {name: [] for name in workers}
        for number in range(self.options.rounds):
            run = self.run_message(model, batch, number)
            for name in _rotated(list(workers), number):
                others = [worker for other, worker in workers.items() if other != name]
                answer = ask_alone(workers[name], run, others)
                assert answer["tokens"] == batch * self.options.new_tokens, f"{name}: {answer['tokens']} tokens"
                runs[name].append(answer)
        return runs

    def run_message(self, model: str, batch: int, number: int) -> Message:
        """Other prompts in every round: nobody's prefix cache helps."""
        low, high = self.options.prompt_tokens
        rng = random.Random(f"{model} {batch} {number}")
        lengths = [rng.randint(low, high) for _ in range(batch)]
        if model == SMALL:
            prompts = [[rng.randrange(small_config().vocab_size) for _ in range(length)] for length in lengths]
        else:
            prompts = [self.tokenizer.encode(word_problems(rng))[:length] for length in lengths]
        return {"prompts": prompts, "new_tokens": self.options.new_tokens, "temperature": 1.0, "seed": number}

    def repetitive_prompts(self, count: int) -> list[list[int]]:
        return [list(self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                        tokenize=True, return_dict=False))
                for text in repetitive_tasks()[:count]]

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.folder(SMOLLM2))
        return self._tokenizer

    def _start(self, kind: str, model: str, dtype: str, **more: Any) -> Worker:
        settings = {"model": str(self.folder(model)), "dtype": dtype, "threads": self.options.threads,
                    "max_batch": max(self.options.batch), "max_context": MAX_CONTEXT}
        if kind == "vllm":
            command = [self.options.vllm, str(Path(__file__).with_name("peer_vllm.py"))]
        else:
            command = [sys.executable, __file__, "--worker", kind]
        name = "-".join([kind, *(str(value).split(":")[0] for value in more.values())])
        environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(self.options.threads))
        library = Path(self.options.vllm or "").parent.parent / "lib" / "libiomp5.so"
        if kind == "vllm" and self.options.vllm_iomp and library.is_file():
            environment["LD_PRELOAD"] = str(library)
        return Worker(name, command, settings | more, environment, self.work / "logs" / f"{model}-{dtype}-{name}.log")


def small_config() -> Any:
    from paceline.models.config import ModelConfig

    return ModelConfig(architecture="qwen3", vocab_size=4096, hidden_size=256, intermediate_size=704, num_layers=12,
                       num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True, tie_embeddings=True, max_context=MAX_CONTEXT)


def random_model() -> Any:
    """12 layers x 256, Qwen3's form, 9.9 million parameters; its samples are close to uniform: text that never repeats."""
    from paceline.models.decoder import Decoder

    return Decoder.random(small_config(), seed=0)


def word_problems(rng: random.Random) -> str:
    """Text like a policy's training prompts, long enough to be cut anywhere below 128 tokens."""
    names, things = ("Ada", "Bo", "Chen", "Dara", "Eli", "Fay"), ("apples", "books", "tickets", "marbles", "coins", "shells")
    lines = []
    for _ in range(8):
        who, other = rng.sample(names, 2)
        what, a, b, c = rng.choice(things), rng.randint(20, 99), rng.randint(2, 9), rng.randint(2, 19)
        lines.append(f"{who} has {a} {what}, gives {c} of them to {other} and buys {b} boxes with {c} {what} each. "
                     f"How many {what} does {who} have now? Think step by step.")
    return "\n".join(lines)


def repetitive_tasks() -> list[str]:
    cities = "Paris, Rome, Madrid, Berlin, Vienna, Prague, Lisbon, Dublin, Athens, Warsaw"
    fields = "name, street, number, city, country, phone, email, birthday"
    poem = ("The river runs down to the sea,\nThe river runs past you and me,\nThe river runs under the tree,\n"
            "The river runs wild and runs free.")
    code = ("def area(width, height):\n    result = width * height\n    return result\n\n"
            "def volume(width, height, depth):\n    result = width * height * depth\n    return result\n")
    rows = "\n".join(f"item {i}, price {i * 10} dollars, in stock" for i in range(1, 9))
    return [
        f"Repeat this text exactly, three times:\n\n{poem}",
        f"Copy this list, one line per city, each line as 'City: NAME, continent: Europe'.\n\n{cities}",
        f"Copy this Python code exactly and change nothing:\n\n{code}\n{code}",
        f"Write this table again, line by line, exactly as it stands:\n\n{rows}",
        "Write the numbers from 1 to 40, one per line, each as 'The number is N.'",
        f"Write a Python class Person with one getter and one setter for each of these fields: {fields}.",
        f"Rewrite this code with the name result replaced by value:\n\n{code}\n{code}",
        "Write a JSON list of ten users, each with the keys id, name, email and active.",
    ]


# --- workers


def make_paceline(settings: Message) -> Callable[[Message], Message]:
    """One model, an engine per strategy. `off` has no drafter at all, so that drafting is charged with all it costs."""
    from paceline import Engine, SamplingParams
    from paceline.config import EngineConfig
    from paceline.models.weights import load_model

    model, _ = load_model(settings["model"], dtype=settings["dtype"])
    engines: dict[str, Engine] = {}

    def make(strategy: str, **options: Any) -> Engine:
        sizes = {"max_batch": settings["max_batch"], "max_context": settings["max_context"], "kv_memory_gb": 1.0}
        return Engine(model, None, "none" if strategy == "off" else "suffix", strategy, EngineConfig(**sizes | options))

    def handle(run: Message) -> Message:
        strategy = run.get("strategy") or settings.get("strategy") or run.get("default_strategy")
        if run.get("memory"):
            return memory_series(lambda **options: make(strategy, **options), run)
        if run.get("fresh"):
            engine = make(strategy, max_batch=run["max_batch"])
        else:
            engine = engines[strategy] = engines.get(strategy) or make(strategy)
        params = SamplingParams(temperature=run["temperature"], max_new_tokens=run["new_tokens"], seed=run["seed"],
                                ignore_eos=run.get("ignore_eos", True))
        engine.reset_stats()
        watch = Stopwatch()
        groups = engine.generate(run["prompts"], params)
        used, stats = watch.read(), engine.stats()
        answers = [group.rollouts[0] for group in groups]
        assert not any(answer.error for answer in answers), next(answer.error for answer in answers if answer.error)
        return used._asdict() | {
            "tokens": sum(len(answer.token_ids) for answer in answers), "steps": stats.steps,
            "tokens_per_verification": stats.tokens_per_verification, "drafted": stats.drafted, "accepted": stats.accepted,
            "strategy_steps": stats.strategy_steps,
            "digests": [zlib.crc32(str(answer.token_ids).encode()) for answer in answers],
        }

    return handle


def memory_series(make: Callable[..., Any], run: Message) -> Message:
    """Resident memory as `count` requests come alive in four parts, and then as ten times as many finish."""
    from paceline import SamplingParams
    from paceline.cache import PagedStore

    count, length, new = run["count"], run["prompt_tokens"], run["new_tokens"]
    rng = random.Random(0)
    engine = make(max_batch=count, **({"kv_tokens": run["kv_tokens"]} if run["kv_tokens"] else {}))
    shape, vocabulary = engine.model.config, engine.model.config.vocab_size
    layers = [(shape.num_kv_heads, shape.head_dim)] * shape.num_layers

    def prompts(number: int) -> list[list[int]]:
        return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(number)]

    def params(new_tokens: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, seed=rng.randrange(2**31))

    engine.generate(prompts(1), params(4))  # workspace and compiled kernels are not live tokens
    live: list[Message] = [{"tokens": 0, "rss_mb": rss_mb()}]
    tokens = alive = 0
    for _ in range(4):
        for prompt in prompts(count // 4):
            engine.add(prompt, params(new))
        alive, decoding, tokens = alive + count // 4, 0, tokens + count // 4 * length
        while decoding < alive:  # until the last prompt is in
            result = engine.step()
            assert not result.finished, "a request ended before all were alive"
            decoding, tokens = result.num_requests, tokens + sum(map(len, result.tokens.values()))
        live.append({"tokens": tokens, "rss_mb": rss_mb()})
    while engine.has_work:
        engine.step()
    finished: list[Message] = [{"tokens": count * (length + new), "rss_mb": rss_mb()}]
    for _ in range(10):
        engine.generate(prompts(count), params(new // 3))
        finished.append({"tokens": finished[-1]["tokens"] + count * (length + new // 3), "rss_mb": rss_mb()})
    return {"live": live, "finished": finished, "pool_tokens": engine.stats().total_pages * engine.config.page_size,
            "kv_bytes_per_token": PagedStore.bytes_per_token(layers, 0, engine.model.norm.dtype)}


def make_transformers(settings: Message) -> Callable[[Message], Message]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    model.generation_config.eos_token_id = None  # every engine draws the same number of tokens

    @torch.inference_mode()
    def handle(run: Message) -> Message:
        width = max(map(len, run["prompts"]))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in run["prompts"]])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in run["prompts"]])
        torch.manual_seed(run["seed"])
        watch = Stopwatch()
        out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=run["temperature"], top_k=0, top_p=1.0,
                             max_new_tokens=run["new_tokens"], pad_token_id=0)
        used = watch.read()
        return used._asdict() | {"tokens": (out.shape[1] - width) * len(out)}

    return handle


if __name__ == "__main__":
    main()
