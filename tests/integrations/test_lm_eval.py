"""lm-evaluation-harness against `paceline serve`: its scores are those computed from the policy and from `Engine.generate`. It
runs in an environment of its own, whose Python PACELINE_LM_EVAL_PYTHON names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Rope

pytestmark = pytest.mark.integration
PYTHON = os.environ.get("PACELINE_LM_EVAL_PYTHON", str(Path(__file__).parents[2] / ".venvs/lm-eval/bin/python"))
NUMBERS = [6, 7, 12, 19, 27, 31, 44, 97, 301, 872]
UNTIL, MAX_TOKENS = " 16", 60
CHOICES = """\
task: paceline_choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
PATHS = f"""\
task: paceline_paths
output_type: generate_until
doc_to_target: target
generation_kwargs: {{until: ["{UNTIL}"], max_gen_toks: {MAX_TOKENS}, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
COMMON = """\
doc_to_text: "{{question}}"
target_delimiter: ""
dataset_path: json
dataset_kwargs: {data_files: {test: "FILE"}}
test_split: test
"""


def path_of(number: int) -> str:
    """The Collatz sequence after a number, as the bundled policy writes it."""
    found = []
    while number != 1:
        number = 3 * number + 1 if number % 2 else number // 2
        found.append(number)
    return "".join(f" {each}" for each in found)


def choices_of(number: int) -> list[str]:
    """The next two numbers of the sequence, something else, and less and more of the former."""
    steps = path_of(number).split()
    return [f" {steps[0]} {steps[1]}", f" {int(steps[0]) + 1} {steps[1]}", f" {steps[0]} {int(steps[1]) + 30}",
            f" {steps[0]}", " " + " ".join(steps[:4])]


def write_task(folder: Path, text: str, rows: list[dict]) -> None:
    name = text.split()[1]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(text + COMMON.replace("FILE", str(folder / f"{name}.jsonl")))


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    return Engine.load(resolve_model("default"), "cpu", drafter="none", strategy="off", max_batch=4)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The folder of two tasks. Some labels are wrong and some sequences too long, so that scores are neither 0 nor 1."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, CHOICES, [{"question": f"{number}:", "choices": choices_of(number), "label": 3 if i % 3 else 0}
                                 for i, number in enumerate(NUMBERS)])
    write_task(folder, PATHS, [{"question": f"{number}:", "target": path_of(number).partition(UNTIL)[0]} for number in NUMBERS])
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server with speculative decoding, as it starts by default."""
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "paceline.cli", "serve", "--model", "default", "--port", "0",
                                    "--threads", "1", "--no-warm-up"], stderr=out, stdout=out,
                                   env={**os.environ, "PACELINE_API_KEY": ""})
    end = time.monotonic() + 300
    while not (found := re.search(r"served at (http://\S+)/v1;", log.read_text())):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    yield found[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, log.read_text()


def run_lm_eval(address: str, tasks: Path, tokenizer: str, out: Path) -> tuple[dict, dict[str, list[dict]]]:
    """The scores of both tasks by their names, and the samples in the order of the documents."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--include_path", str(tasks), "--tasks",
         "paceline_choices,paceline_paths", "--batch_size", "4", "--output_path", str(out), "--log_samples", "--model_args",
         f"base_url={address}/v1/completions,model=default,num_concurrent=2,max_retries=1,{tokenizer}"],
        capture_output=True, text=True, timeout=900,
        env={**environment, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "cache"),
             "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-4000:]
    (results,) = out.glob("**/results_*.json")
    samples = {}
    for task in ("paceline_choices", "paceline_paths"):
        (file,) = out.glob(f"**/samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"], samples


def loglikelihood(engine: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """The log-probability of a continuation, computed directly, and whether it is the greedy one."""
    model, given = engine.model, engine.encode(context)
    ids = torch.tensor(given + engine.encode(continuation))
    cos_sin = Rope(model.config, len(ids), model.norm.dtype, "cpu")(torch.arange(len(ids)))
    found = model(ids, PackedAttend(TorchOps(), *cos_sin, (len(ids),))).final
    logprobs = model.logits(found, TorchOps())[len(given) - 1 : -1].float().log_softmax(-1)
    own = ids[len(given) :]
    return logprobs.gather(1, own[:, None]).sum().item(), torch.equal(logprobs.argmax(-1), own)


@pytest.mark.parametrize("tokenizer", [
    "tokenizer=FOLDER", "tokenizer_backend=huggingface,tokenizer=FOLDER", "tokenizer_backend=remote"])
def test_both_request_types(engine, tasks, address, tmp_path, tokenizer):
    tokenizer = tokenizer.replace("FOLDER", str(resolve_model("default")))
    scores, samples = run_lm_eval(address, tasks, tokenizer, tmp_path)

    hits, normed_hits = [], []
    for sample in samples["paceline_choices"]:
        doc = sample["doc"]
        wanted = [loglikelihood(engine, doc["question"], choice) for choice in doc["choices"]]
        for (value, greedy), found in zip(wanted, sample["filtered_resps"], strict=True):
            assert float(found[0]) == pytest.approx(value, abs=1e-3) and str(found[1]) == str(greedy)
        values = torch.tensor([value for value, _ in wanted])
        normed = values / torch.tensor([len(choice) for choice in doc["choices"]])
        hits.append(int(values.argmax()) == doc["label"])
        normed_hits.append(int(normed.argmax()) == doc["label"])
    assert len(hits) == len(NUMBERS) and 0 < sum(hits) < len(hits)
    assert scores["paceline_choices"]["acc,none"] == pytest.approx(sum(hits) / len(hits))
    assert scores["paceline_choices"]["acc_norm,none"] == pytest.approx(sum(normed_hits) / len(hits))

    params = SamplingParams(temperature=0, max_new_tokens=MAX_TOKENS, stop=(UNTIL,))
    groups = engine.generate([engine.encode(f"{number}:") for number in NUMBERS], params)
    answers = [group.rollouts[0].text for group in groups]
    assert [sample["filtered_resps"][0] for sample in samples["paceline_paths"]] == answers
    exact = [answer == sample["doc"]["target"] for answer, sample in zip(answers, samples["paceline_paths"], strict=True)]
    assert 0 < sum(exact) < len(exact)
    assert scores["paceline_paths"]["exact_match,none"] == pytest.approx(sum(exact) / len(exact))
