"""Wrong inputs of a new user, each with the one line that is printed and no trace left behind."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from command_line import run, traces

from paceline import Engine, SamplingParams
from paceline.config import TrainConfig
from paceline.names import suggest

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
