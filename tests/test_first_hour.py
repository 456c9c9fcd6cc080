"""What a new user meets: wrong inputs, each with the one line that is printed and no trace left behind, and the situations of a
first hour. Exit codes are those of docs/command-line.md."""

from __future__ import annotations

import io
import json
import re
import shlex
import socket
import time
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.main import get_command

from paceline import Engine, SamplingParams
from paceline.cli import main
from paceline.cli.app import app
from paceline.cli.options import complete_setting
from paceline.config import TrainConfig
from paceline.extras import install_command
from paceline.models.weights import check_model
from paceline.names import suggest
from paceline.report import TrainView

ROOT = Path(__file__).resolve().parent.parent
BROKEN_GRADER = "def score(problem, answer):\n    return 1 / 0\n"
QUICK = ["--set", "steps=1", "--set", "rollout.prompts=2", "--set", "rollout.group_size=2", "--set", "rollout.max_new_tokens=8",
         "--set", "compare_off=false", "--set", "threads=1", "--set", "device=cpu", "--set", "strategy=off",
         "--set", "evaluation.every=0"]


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a few files that are not what they should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text('{"promt": "27:"}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "27:", "answer": "x"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "typo.toml").write_text("[rollout]\npromts = 3\n")
    (tmp_path / "broken.toml").write_text("steps = \n")
    (tmp_path / "grader.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "text.txt").write_text("hello")
    return tmp_path


def traces(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
            if "__pycache__" not in path.parts}


TRAIN = {
    # keys that do not exist
    "foo=1": "--set foo=1: no such key",
    "stepz=1": "--set stepz=1: no such key; did you mean steps?",
    "lr=1e-4": "--set lr=1e-4: no such key; did you mean optimizer.lr?",
    "rollout.promts=3": "--set rollout.promts=3: no such key; did you mean rollout.prompts?",
    "optimiser.lr=1": "--set optimiser.lr=1: optimiser: no such key; did you mean optimizer?",
    "algorithm_options.klx=1": "--set algorithm_options.klx=1: no such key; did you mean kl?",
    "spot.lrr=1": "--set spot.lrr=1: no such key; did you mean lr?",
    "task_options.foo=1": "foo: no such option",
    "steps": "--set steps: expected KEY=VALUE",
    # names of other libraries
    "learning_rate=1e-4": "--set learning_rate=1e-4: no such key; it is called optimizer.lr here",
    "num_generations=8": "it is called rollout.group_size here",
    "rollout.max_tokens=64": "it is called rollout.max_new_tokens here",
    "max_completion_length=64": "it is called rollout.max_new_tokens here",
    "num_speculative_tokens=4": "it is called strategy here (its depth is the d of suffix:d8w2v16)",
    "gpu_memory_utilization=0.9": "it is called engine.kv_memory_gb here (an amount for the KV cache in GiB, not a share)",
    "beta=0.1": "it is called algorithm_options.kl here",
    "algorithm_options.beta=0.1": "it is called kl here",
    "output_dir=x": "it is called out here",
    "tensor_parallel_size=2": "it is called engine.tensor_parallel here",
    # values
    "steps=many": "--set steps=many: must be an integer, not 'many'",
    "steps=2.5": "--set steps=2.5: must be an integer, not 2.5",
    "steps=0": "--set steps=0: must be >= 1, not 0",
    "optimizer.lr=-1": "--set optimizer.lr=-1: must be > 0, not -1",
    "optimizer.lr=nan": "--set optimizer.lr=nan: must be a finite number, not nan",
    "optimizer.schedule=cosin": "'cosin' is not one of constant, linear, cosine; did you mean cosine?",
    "compare_off=maybe": "--set compare_off=maybe: must be true or false, not 'maybe'",
    "rollout=3": "--set rollout=3: must be a table, not 3",
    "dtype=fp8": "--set dtype=fp8: 'fp8' is not one of float32, float64, bfloat16",
    "seed=99999999999999999999": "--set seed=99999999999999999999: 99999999999999999999 is not a 64-bit integer",
    "optimizer.betas=[0.9, 1]": "optimizer.betas.1: must be < 1, not 1",
    "threads=100000": "--set threads=100000: must be <= 1024, not 100000",
    "rollout.temperature=1e-9": "--set rollout.temperature=1e-9: 1e-09 is not 0 or in 1e-06..1e+06",
    "rollout.stop=[\"\"]": "is not a list of non-empty strings",
    "learner.lora_targets=[\"q\"]": "'q' is not one of qkv, o, gate_up, down, q_proj",
    # what is not there
    "algorithm=grpoo": "--set algorithm=grpoo: 'grpoo' is not one of grpo, dr_grpo, dapo, gspo, cispo, rloo, ppo; "
                       "did you mean grpo?",
    "evaluation={every = 5, problems = 500}": "problems: 500 cannot be held out of the 45 problems of task collatz",
    "reward.functions={\"nothing.py:f\" = 1}": "there is no file",
    "task=colatz": "--set task=colatz: there is no 'colatz', did you mean collatz?",
    "strategy=fast": "--set strategy=fast: 'fast': expected off, auto, beg, or like suffix:d8w2v16",
    "drafter=sufix": "--set drafter=sufix: sufix: not one of suffix, none, default, learned, and no folder of a learned drafter; "
                     "did you mean suffix?",
    "drafter=folder": "folder: not a drafter folder, config.json is missing",
    "model=/no/model": "--set model=/no/model: /no/model: no such folder or file",
    "model=folder": "config.json: no such file",
    "model=text.txt": "text.txt: neither a model folder nor a .gguf file",
    "device=gpu": "gpu: not a device, such as auto, cpu or cuda; did you mean cuda?",
    "drafter=lerned": "lerned: not one of suffix, none, default, learned, and no folder of a learned drafter; "
                      "did you mean learned?",
    "model=defualt": "; did you mean default?",
    "device=cuda:99": "cuda:99: ",
    "reward_model=/no/judge": "--set reward_model=/no/judge: ",
    "out=text.txt": "--set out=text.txt: text.txt is a file, not a folder",
}


@pytest.mark.parametrize(("change", "said"), TRAIN.items(), ids=list(TRAIN))
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry"])
def test_train(here, capsys, change, said, dry):
    check_refused(here, capsys, ["train", "--set", change, *(["--dry-run"] if dry else [])], said)


REFUSED = {
    # train
    "train nowhere.toml": "nowhere.toml: no such file",
    "train typo.toml": "typo.toml: rollout.promts: no such key; did you mean rollout.prompts?",
    "train broken.toml": "broken.toml: ",
    "train typo.toml more": "more: not expected here (paceline train -h shows what there is)",
    "train --resume nowhere": "nowhere: there is no config.json; is it a run folder?",
    "train --resume folder typo.toml": "--resume: the run folder contains its configuration",
    "train --set task=jsonl": "data: none given",
    "train --set task=jsonl --set task_options.data=nowhere.jsonl": "there is no nowhere.jsonl",
    "train --set task=jsonl --set task_options.data=empty.jsonl": "holds no problems",
    "train --set task=jsonl --set task_options.data=bad.jsonl": "no field 'prompt' (there are promt)",
    "train --set task=python --set task_options.data=good.jsonl": "function: is required",
    "train --set task=python --set task_options.data=good.jsonl --set task_options.function=none.py:f": "there is no file",
    "train --set task=python --set task_options.data=good.jsonl --set task_options.function=grader.py:f":
        "cannot import",
    "train --set drafter=learned --set train_drafter=false": "an untrained drafter must be trained",
    "train --set drafter=none --set strategy=suffix:d8w2v16": "it needs the suffix drafter, but drafter is none",
    "train --set out=folder": "--set out=folder: folder is not empty; choose another folder",
    # the command line itself
    "trian": "trian: no such command; did you mean train?",
    "drafter tarin": "tarin: no such command; did you mean train?",
    "train --steps 4": "--steps: no such option; settings are given with --set: --set steps=VALUE",
    "train --learning-rate 1e-5": "--learning-rate: no such option; settings are given with --set: --set optimizer.lr=VALUE",
    "generate --model default --prompts good.jsonl": "give either prompts as text (--prompt), or a file of prompts",
    "generate": "--model is required. Hugging Face folder",
    "generate --modle x": "--modle: no such option; did you mean --model?",
    "generate --max-tokens 5": "--max-tokens: no such option; it is called --max-new-tokens here",
    "generate --num-return-sequences 5": "--num-return-sequences: no such option; it is called --n here",
    "generate --n": "--n: a value is required",
    "generate --n three": "--n: must be an integer",
    "generate --n 0": "--n: must be at least 1",
    "train --dry-run=yes": "--dry-run: it takes no value",
    # generate
    "generate {g} --prompts nowhere.jsonl": "nowhere.jsonl: no such file of prompts",
    "generate {g} --prompts folder": "folder: is a folder, not a file of prompts",
    "generate {g} --prompts empty.jsonl": "empty.jsonl: there is no prompt in it",
    "generate {g} --prompts blank.jsonl": "blank.jsonl: there is no prompt in it",
    "generate {g} --prompts bad.jsonl": "bad.jsonl:1: exactly one of prompt, messages, token_ids is required, found none",
    "generate {g} --strategy model": "strategy 'model': expected off, auto, beg, or like",
    "generate {g} --strategy eagle:d6w4v32": "it needs a learned drafter",
    "train --set drafter=suffix --set strategy=eagle:d6w4v32": "strategy eagle:d6w4v32: it needs a learned drafter",
    "generate {g} --drafter sufix": "did you mean suffix?",
    "generate {g} --model /no/model": "/no/model: no such folder or file, and not a hub id",
    "generate {g} --device abacus": "device abacus: not a device, such as auto, cpu or cuda",
    "generate {g} --dtype int3": "dtype: int3 is not supported",
    "generate {g} --temperature hot": "--temperature: must be a number",
    "generate {g} --temperature -1": "temperature: -1.0 is not 0 or in",
    "generate {g} --top-p 0": "top_p: 0.0 is not in (0, 1]",
    "generate {g} --out folder": "folder: is a folder, not an output file",
    "generate {g} --out nowhere/out.jsonl": "nowhere/out.jsonl: No such file or directory",
    # the others
    "demo --model /no/model": "/no/model: no such folder or file",
    "demo --model default --out text.txt": "text.txt: is a file, not a folder",
    "bench selection --model default --batch one": "--batch one: not a comma-separated list of numbers",
    "bench selection --model default --json nowhere/x.json": "there is no folder nowhere",
    "bench selection --model default --prompts empty.jsonl": "there is no prompt in it",
    "bench selection --model /no/model": "/no/model: no such folder or file",
    "drafter train --model default --prompts empty.jsonl --out d": "empty.jsonl: there is no prompt in it",
    "drafter train --model default --prompts task:colatz --out d": "there is no 'colatz', did you mean collatz?",
    "drafter train --model /no/model --prompts task:collatz --out d": "/no/model: no such folder or file",
    "drafter train --model default --prompts task:collatz --out d --set learning_rate=1":
        "--set learning_rate=1: no such key; it is called lr here",
    "drafter train --model default --prompts task:collatz --out d --form medusa": "form: 'medusa' is not one of",
    "drafter eval --model default --drafter folder --prompts task:collatz": "folder: not a drafter folder",
    "drafter eval --model default --drafter folder": "prompts, records: exactly one of them is required",
    "export nowhere --to vllm --out x": "nowhere",
    "export folder --to gguf --out x": "--to: gguf is not one of",
    "simulate --lengths nowhere.csv --curve nowhere.json": "nowhere",
    "doctor --compile int3": "int3",
}


@pytest.mark.parametrize(("line", "said"), REFUSED.items(), ids=list(REFUSED))
def test_commands(here, capsys, line, said):
    usual = {"--model": "default", "--prompts": "good.jsonl", "--out": "out.jsonl"}
    given = " ".join(f"{name} {value}" for name, value in usual.items() if name not in line)
    check_refused(here, capsys, line.format(g=given).split(), said)


def check_refused(here: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    """One line on stderr in our own words, exit code 2, and the working directory as it was."""
    before = traces(here)
    assert run(*args) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("paceline: ") and not printed.out, printed
    assert said in lines[0]
    assert not re.search(r"Traceback|pydantic|Input should|Invalid value for|validation error|peft|Errno", lines[0]), lines[0]
    assert traces(here) == before


def test_serve(here, capsys):
    pytest.importorskip("uvicorn")
    check_refused(here, capsys, ["serve", "--model", "/no/model"], "/no/model: no such folder or file")
    check_refused(here, capsys, ["serve", "--model", "default", "--strategy", "fast"], "strategy 'fast': expected off, auto, beg")
    check_refused(here, capsys, ["serve", "--model", "default", "--port", "99999"], "--port: must be at most 65535")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_refused(here, capsys, ["serve", "--model", "default", "--port", port], f"--port {port}: Address already in use")


# -- Python


@pytest.mark.parametrize(("call", "said"), [
    (lambda: Engine.load("default", max_num_seqs=4), "max_num_seqs: no such key; it is called max_batch here"),
    (lambda: Engine.load("default", max_batch=0), "max_batch: must be >= 1, not 0"),
    (lambda: Engine.load("default", strategy="fast"), "strategy 'fast': expected off, auto, beg"),
    (lambda: Engine.load("default", drafter="sufix"), "did you mean suffix?"),
    (lambda: Engine.load("/no/model"), "/no/model: no such folder or file, and not a hub id"),
    (lambda: Engine.load("default", "gpu"), "device gpu: not a device"),
    (lambda: SamplingParams(max_tokens=5), "max_tokens: no such sampling parameter; it is called max_new_tokens here"),
    (lambda: SamplingParams(n=5), "n: no such sampling parameter; the number of answers is an argument of Engine.generate"),
    (lambda: TrainConfig(num_generations=4), "num_generations: no such key; it is called rollout.group_size here"),
])
def test_python(call, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_the_projections_of_hugging_face_are_accepted():
    targets = TrainConfig(learner={"lora_targets": ["q_proj", "v_proj", "down_proj"]}).learner.lora_targets
    assert targets == ("qkv", "down")
    assert TrainConfig(learner={"lora_targets": ["all-linear"]}).learner.lora_targets == ("qkv", "o", "gate_up", "down")


def test_every_alias_leads_to_a_setting_that_exists():
    from paceline.names import ALIASES

    known = [*TrainConfig.key_names(), *SamplingParams.__dataclass_fields__, "n", "batch"]
    for alias in ALIASES:
        assert "it is called" in suggest(alias, known), alias


# -- situations


def test_the_corrected_command_works_in_the_same_folder(here, capsys):
    """A typo, then a model that breaks while it is loaded, then the right command: all with the same run folder."""
    assert run("train", *QUICK, "--set", "algorithm=grpoo") == 2
    assert not (here / "runs").exists()
    assert run("train", *QUICK, "--set", "engine.capture=[99]") == 2  # found out when the engine is made
    assert "capture: layer 99 " in capsys.readouterr().err and not (here / "runs").exists()
    assert run("train", *QUICK) == 0
    printed = capsys.readouterr()
    assert (here / "runs" / "default" / "summary.json").is_file() and "runs/default/report.html" in printed.out
    page, device, *_ = printed.err.splitlines()
    assert page.startswith("paceline: live page: http://127.0.0.1:")
    assert device == "paceline: loading default on CPU (1 threads)", "the first lines say where the run is seen and where it runs"
    assert any(line.startswith("step 1/1, reward ") for line in printed.err.splitlines()), "every step is a line when piped"


def test_a_failed_grader_leaves_its_examples_and_nothing_else(here):
    (here / "broken.py").write_text(BROKEN_GRADER)
    task = ["--set", "task=python", "--set", "task_options.function=broken.py:score", "--set", "task_options.data=good.jsonl",
            "--set", "reward.workers=0"]
    assert run("train", *QUICK, *task, "--set", "out=run") == 2
    assert sorted(path.name for path in (here / "run").iterdir()) == [".lock", "grading_failures.jsonl"]
    assert "ZeroDivisionError" in (here / "run" / "grading_failures.jsonl").read_text()
    assert run("train", *QUICK, "--set", "out=run") == 0, "no step was done there, so it counts as fresh"


def test_a_resumed_run_starts_at_its_step_and_sums_up_the_whole_run(here, capsys):
    assert run("train", *QUICK, "--set", "compare_off=true", "--set", "out=run", "--set", "steps=2") == 0
    before = json.loads((here / "run" / "summary.json").read_text())
    capsys.readouterr()
    assert run("train", "--resume", "run", "--set", "steps=3") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("step ")] == ["step 3/3"]
    after = json.loads((here / "run" / "summary.json").read_text())
    assert before["compared_rollouts"] == 8 and after["compared_rollouts"] == 12 and after["steps"] == 3
    assert after["seconds"] > before["seconds"] and after["identical_rollouts"]


def test_generate_leaves_no_empty_files_and_says_where_it_runs(here, capsys, monkeypatch):
    args = ["generate", "--model", "default", "--prompts", "good.jsonl", "--out", "out.jsonl", "--max-new-tokens", "4",
            "--threads", "1", "--device", "cpu"]
    before = traces(here)
    monkeypatch.setattr("paceline.generation.generator.load_engine", fail)
    assert run(*args) == 2 and traces(here) == before
    monkeypatch.undo()
    monkeypatch.chdir(here)
    capsys.readouterr()
    assert run(*args) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "paceline: loading default on CPU (1 threads)" and "tokens/s" in lines[-1]


def fail(*_: object) -> None:
    raise ValueError("as if the weights were damaged")


def test_generate_takes_plain_text_and_keeps_the_prompt(here, capsys):
    short = ["--model", "default", "--max-new-tokens", "4", "--threads", "1", "--strategy", "off", "--temperature", "0"]
    assert run("generate", *short, "--prompt", "27:", "--prompt", "4:") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and printed[0].startswith("27: 8") and printed[1].startswith("4: 2")
    (here / "prompts.txt").write_text("27:\n\n4:\n")
    assert run("generate", *short, "--prompts", "prompts.txt", "--out", "out.jsonl") == 0
    found = {record["prompt"]: record["text"] for record in map(json.loads, (here / "out.jsonl").read_text().splitlines())}
    assert [f"{prompt}{found[prompt]}" for prompt in ("27:", "4:")] == printed


def test_settings_are_completed():
    assert complete_setting("optimizer.l") == ["optimizer.lr="]
    assert {"steps=", "strategy=", "seed="} <= set(complete_setting("s"))


@pytest.mark.parametrize("extra", ["wandb", "cluster", "server", "lowmem"])
def test_advice_to_install_names_the_packages_themselves(extra, monkeypatch):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    monkeypatch.setattr("paceline.extras.requires", lambda name: [f'{each}; extra == "{key}"' for key, found in wanted.items()
                                                                  for each in found if ";" not in each])
    names = shlex.split(install_command(extra))[2:]
    assert sorted(re.split("[<>=]", name)[0] for name in names) == sorted(re.split("[<>=]", name)[0] for name in wanted[extra])


def test_no_message_advises_an_index_that_does_not_have_the_package():
    for path in [*(ROOT / "paceline").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*")]:
        if path.suffix in (".py", ".md"):
            assert "pip install paceline" not in path.read_text() and "install 'paceline" not in path.read_text(), path


def test_a_hub_that_is_not_there_is_not_waited_for(monkeypatch):
    tried = []

    def refuse(address: object, *_: object) -> None:
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("paceline.models.huggingface.getproxies", dict)
    monkeypatch.setattr("paceline.models.huggingface.socket.create_connection", refuse)
    with pytest.raises(ValueError, match=r"nobody/nothing: no such folder here, .* the hub is not reached"):
        check_model("nobody/nothing")
    assert len(tried) == 1, "its client would try again for half a minute"


def test_standard_input_without_a_prompt(here, monkeypatch, capsys):
    with (here / "empty.jsonl").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert run("generate", "--model", "default", "--prompts", "-", "--out", "out.jsonl", "--threads", "1") == 2
    assert "there is no prompt in it" in capsys.readouterr().err and not (here / "out.jsonl").exists()


def test_the_default_policy_in_the_demo(here, capsys):
    assert run("demo", "--model", "default", "--n", "1", "--max-new-tokens", "6", "--threads", "1", "--device", "cpu") == 0
    printed = capsys.readouterr()
    assert "identical: yes (token ids of all 12 rollouts" in printed.out
    assert printed.err.startswith("paceline: loading default on CPU")


def test_an_interrupt_is_said(monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.doctor.describe_machine", interrupted)
    assert run("doctor") == 130 and capsys.readouterr().err == "paceline: interrupted\n"


def test_help_texts_are_printed_whole(capsys, monkeypatch):
    """Nothing in brackets is taken for markup and dropped."""
    monkeypatch.setenv("COLUMNS", "400")

    def commands(command, path=()):
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, (*path, name))

    for path, command in commands(get_command(app)):
        assert run(*path, "--help") == 0
        shown = re.sub(r"[\s│]+", "", capsys.readouterr().out)
        for parameter in command.params:
            text = re.sub(r"\s+", "", getattr(parameter, "help", None) or "")
            assert text in shown, (path, parameter.name)


def test_a_gpu_that_is_there_is_used(monkeypatch):
    from paceline.models.weights import resolve_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu" and TrainConfig().device == "auto"


# -- the live view


def screen(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def test_the_live_view_shows_something_at_once_and_starts_at_the_resumed_step():
    console = screen()
    with TrainView("grpo on collatz", 40, console) as view:
        assert "0/40" in console.file.getvalue()
        view.phase("loading default on CPU")
        assert "loading default on CPU" in console.file.getvalue()
        view.begin(12)
        assert "12/40" in console.file.getvalue()


def test_the_resume_command_is_never_cut():
    console = screen(width=70)
    folder = "runs/a-rather-long-name-of-a-run-folder"
    with TrainView("grpo", 40, console) as view:
        view.warn(f"interrupted in step 3; paceline train --resume {folder} continues the run. The last checkpoint is old.")
    words = re.sub(r"[\s│]+", " ", console.file.getvalue())
    assert f"paceline train --resume {folder} continues the run." in words


def test_a_long_step_says_how_far_it_is_when_piped(capsys, monkeypatch):
    from paceline.cli.train import TerminalView
    from paceline.trainer import RolloutProgress
    from paceline.types import EngineStats, StepResult, Strategy

    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    view = TerminalView(TrainConfig(device="cpu"))
    stats = EngineStats(1, 0, 0, 100, 0, 0, 50, 0, 1.0, {}, 0, 0, 0, 0, 0)
    with view:
        view.on_step_begin(3)
        for later in (1, 20, 21):
            monkeypatch.setattr(time, "perf_counter", lambda later=later: now + later)
            view.on_engine_step(StepResult.nothing(1, Strategy.OFF), RolloutProgress(5, 64, stats))
    assert capsys.readouterr().err == "paceline: step 3: 5 of 64 answers, 100 tokens/s\n"


def test_commands_with_known_work_show_the_time_left(capsys, monkeypatch):
    from paceline.cli.progress import ProgressView

    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with ProgressView("generate", 100) as progress:
        monkeypatch.setattr(time, "perf_counter", lambda: now + 10)
        progress.add_done(25)
        progress.show("80 tokens/s")
    assert "generate: 25/100 rollouts, 80 tokens/s, 30 s left" in capsys.readouterr().err


def test_exit_codes_are_documented():
    from paceline.cli.train import EXIT_CODES

    page = (Path(__file__).resolve().parent.parent / "docs" / "command-line.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| `(\d+)` \|", page, re.MULTILINE)}
    assert documented >= set(EXIT_CODES.values()) | {0, 2, 130}
