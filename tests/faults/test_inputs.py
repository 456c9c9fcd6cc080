"""Wrong input is refused where it comes in, by one line that says what is wrong: parameters, prompts, settings, model files,
graders and the command line."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CONFIGS, VOCAB, eagle, model

from paceline import Engine, SamplingParams, Strategy
from paceline.cli import main
from paceline.config import ConfigError, EngineConfig, OptimizerConfig, RolloutConfig, TrainConfig
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.spot.config import SpotConfig
from paceline.tasks import make_task
from paceline.trainer.config_files import load_config

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = math.nan, math.inf


def says(message: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call raises a ValueError of one line that contains the message."""
    with pytest.raises(ValueError) as raised:
        call(*args, **kwargs)
    text = str(raised.value)
    assert message in text and "\n" not in text and "pydantic" not in text, text


# -- sampling parameters


@pytest.mark.parametrize(("name", "value", "message"), [
    ("temperature", -1, "temperature: -1 is not 0 or in 1e-06..1e+06"), ("temperature", NAN, "temperature: nan"),
    ("temperature", INF, "temperature: inf"), ("temperature", 1e-39, "temperature: 1e-39"), ("temperature", 1e39, "1e+39"),
    ("temperature", "1", "temperature: '1'"), ("temperature", None, "temperature: None"),
    ("temperature", True, "temperature: True"),
    ("top_k", -1, "top_k: -1"), ("top_k", 2**31, "top_k: 2147483648 is not an integer in 0..2147483647"),
    ("top_k", 1.5, "top_k: 1.5"),
    ("top_k", True, "top_k: True"), ("top_k", None, "top_k: None"), ("top_k", "3", "top_k: '3'"),
    ("top_p", 0.0, "top_p: 0.0"), ("top_p", 1.5, "top_p: 1.5"), ("top_p", NAN, "top_p: nan"), ("top_p", True, "top_p: True"),
    ("top_p", "0.9", "top_p: '0.9'"), ("min_p", -0.1, "min_p: -0.1"), ("min_p", 2, "min_p: 2"), ("min_p", NAN, "min_p: nan"),
    ("max_new_tokens", 0, "max_new_tokens: 0"), ("max_new_tokens", 1.5, "max_new_tokens: 1.5"),
    ("max_new_tokens", True, "max_new_tokens: True"), ("max_new_tokens", INF, "max_new_tokens: inf"),
    ("seed", 2**64, "seed: 18446744073709551616"), ("seed", -(2**63) - 1, "seed: -9223372036854775809"),
    ("seed", 0.5, "seed: 0.5"),
    ("seed", None, "seed: None"), ("stop", [""], "stop: ['']"), ("stop", [3], "stop: [3]"), ("stop", 3, "stop: 3"),
    ("stop_token_ids", [-1], "stop_token_ids: -1"), ("stop_token_ids", [1.5], "stop_token_ids: 1.5"),
    ("stop_token_ids", 3, "stop_token_ids: 3"), ("stop_token_ids", "3", "stop_token_ids: '3'"),
    ("ignore_eos", "no", "ignore_eos: 'no'"), ("raw_logprobs", 1, "raw_logprobs: 1")])
def test_sampling_parameters(name, value, message):
    says(message, SamplingParams, **{name: value})


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1),
                            stop_token_ids=np.array([1, 2]), max_new_tokens=np.int32(4))
    plain = SamplingParams(temperature=0.5, top_k=3, seed=2**64 - 1, stop_token_ids=(1, 2), max_new_tokens=4)
    assert params == plain and json.dumps(params.stop_token_ids) == "[1, 2]" and type(params.seed) is int


@pytest.mark.parametrize(("extreme", "like"), [
    ({"temperature": 1e-6}, {"temperature": 0.0}), ({"top_p": 1e-300}, {"temperature": 0.0}), ({"top_k": 2**31 - 1}, {}),
    ({"min_p": 1.0}, {"temperature": 0.0}), ({"top_k": 1}, {"temperature": 0.0})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extremes_that_are_allowed_work(extreme, like, dtype):
    engine = Engine(model(dtype=dtype), strategy="off")
    got, want = (engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, **given))[0].rollouts[0]
                 for given in (extreme, like))
    assert got.error is None and got.token_ids == want.token_ids and all(map(math.isfinite, got.logprobs))


# -- prompts and the engine's methods


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(model(), strategy="off")


@pytest.mark.parametrize("prompt", [
    np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.int32),
    (1, 2, 3), [np.int64(1), np.int32(2), 3], [torch.tensor(1), 2, 3], range(1, 4)])
def test_token_ids_of_any_kind_work(engine, prompt):
    want = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))[0].rollouts[0]
    got = engine.generate([prompt], SamplingParams(max_new_tokens=5))[0].rollouts[0]
    assert got.token_ids == want.token_ids and got.prompt_ids == [1, 2, 3] and type(got.prompt_ids[0]) is int


def test_a_matrix_is_a_list_of_prompts(engine):
    groups = engine.generate(torch.tensor([[1, 2], [3, 4]]), SamplingParams(max_new_tokens=2))
    assert [group.prompt_ids for group in groups] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "prompt: it is empty"), (np.array([], int), "prompt: it is empty"), ([1, VOCAB], "token id 61 is outside"),
    ([-1], "token id -1"), ([1.5], "prompt: 1.5 is not a token id"), ([1, True], "prompt: True is not a token id"),
    (np.array([1.0, 2.0]), "prompt: 1.0 is not"), (torch.tensor([True]), "prompt: True is not"),
    ([[1, 2]], "prompt: [1, 2] is not"),
    (np.array([[1, 2]]), "an array with 2 dimensions"), (np.int64(3), "an array with 0 dimensions"),
    (3, "prompt: 3 is neither text"),
    (None, "prompt: None is neither"), (b"text", "prompt: b'text' is neither"), ({"role": "user"}, "is neither text"),
    (["a", "b"], "prompt: 'a' is not a token id"), ([None], "prompt: None is not a token id"),
    ("text", "came without a tokenizer"),
    ([{"role": "user", "content": "x"}], "came without a tokenizer"), ([1] * 256, "256 tokens leave no room"),
    ({1, 2}, "is neither")])
def test_prompts(engine, prompt, message):
    says(message, engine.add, prompt)
    failed, served = engine.generate([prompt, [1, 2]], SamplingParams(max_new_tokens=2))
    assert message in (failed.rollouts[0].error or "") and len(served.rollouts[0].token_ids) == 2


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"n": 0}, "n: 0 is not an integer >= 1"), ({"n": -1}, "n: -1"), ({"n": 1.5}, "n: 1.5"), ({"n": True}, "n: True"),
    ({"n": "2"}, "n: '2'"), ({"n": None}, "n: None"),
    ({"params": {"seed": 1}}, "params: {'seed': 1} is not of type SamplingParams"),
    ({"params": 3}, "params: 3")])
def test_arguments_of_generate_and_add(engine, kwargs, message):
    says(message, engine.add, [1, 2], **kwargs)
    if not isinstance(kwargs.get("params"), int):
        with pytest.raises(ValueError):
            engine.generate([[1, 2]], **kwargs)
    assert not engine.has_work


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"n": 2, "seeds": [1]}, "seeds: 1 seeds for n = 2 answers"), ({"n": 1, "seeds": [1, 2]}, "seeds: 2 seeds for n = 1"),
    ({"seeds": []}, "seeds: 0 seeds"), ({"seeds": [1.5]}, "seed: 1.5"), ({"seeds": [2**64]}, "seed: 18446744073709551616"),
    ({"seeds": [True]}, "seed: True"), ({"key": 3}, "key: 3 is not a string"),
    ({"params": SamplingParams(stop="x")}, "stop strings: the model came without a tokenizer")])
def test_seeds_and_keys(engine, kwargs, message):
    says(message, engine.add, [1, 2], **kwargs)
    assert not engine.has_work


def test_lists_that_do_not_match(engine):
    says("2 prompts, but 1 params", engine.generate, [[1], [2]], [SamplingParams()])
    says("2 prompts", engine.generate, [[1], [2]], None, 1, ["a"])
    says("params: 'x' is not", engine.generate, [[1]], ["x"])


@pytest.mark.parametrize("text", ["", "suffix", "eagle:d0w1v1", "suffix:d1w1v128", "eagle:d40w8v8", "none:d1w1v1", "d1w1v1",
                                  "Auto"])
def test_strategies(text):
    says("strategy", Strategy.parse, text)
    says("strategy", Engine, model(), None, "suffix", text)


# -- settings


@pytest.mark.parametrize(("kind", "given", "message"), [
    (EngineConfig, {"max_batch": 0}, "max_batch: must be >= 1, not 0"),
    (EngineConfig, {"max_batch": True}, "max_batch: must be a number (given: True)"),
    (EngineConfig, {"max_batch": 1.5}, "max_batch: "), (EngineConfig, {"max_batch": "many"}, "max_batch: "),
    (EngineConfig, {"kv_memory_gb": INF}, "kv_memory_gb: must be a finite number, not inf"),
    (EngineConfig, {"kv_memory_gb": NAN}, "kv_memory_gb"), (EngineConfig, {"kv_memory_gb": 0}, "kv_memory_gb"),
    (EngineConfig, {"kv_memory_gb": True}, "kv_memory_gb"), (EngineConfig, {"kv_tokens": -1}, "kv_tokens"),
    (EngineConfig, {"tau": NAN}, "tau: must be a finite number, not nan"), (EngineConfig, {"tau": 1.5}, "tau"),
    (EngineConfig, {"suffix_tau": INF}, "suffix_tau"),
    (EngineConfig, {"row_sizes": (0,)}, "row_sizes: must be row counts >= 1"),
    (EngineConfig, {"row_sizes": (4, 2)}, "row_sizes"), (EngineConfig, {"row_sizes": (2, 2)}, "row_sizes"),
    (EngineConfig, {"row_sizes": (True,)}, "row_sizes"), (EngineConfig, {"row_sizes": 4}, "row_sizes"),
    (EngineConfig, {"max_context": 1}, "max_context"), (EngineConfig, {"kernels": "fast"}, "kernels"),
    (EngineConfig, {"on_update": None}, "on_update"),
    (EngineConfig, {"page_sise": 4}, "page_sise: no such key; did you mean page_size?"),
    (RolloutConfig, {"temperature": 0}, "temperature"), (RolloutConfig, {"temperature": NAN}, "temperature"),
    (RolloutConfig, {"group_size": True}, "group_size"), (OptimizerConfig, {"lr": INF}, "lr: must be a finite number, not inf"),
    (OptimizerConfig, {"betas": (NAN, 0.9)}, "betas.0"), (SpotConfig, {"lr": INF}, "lr"),
    (SpotConfig, {"form": "medusa"}, "form"),
    (TrainConfig, {"steps": 2.5}, "steps"), (TrainConfig, {"reward_model_weight": NAN}, "reward_model_weight"),
    (TrainConfig, {"engine": {"tau": NAN}}, "engine.tau: must be a finite number, not nan"),
    (TrainConfig, {"engine": {"nonsense": 1}}, "engine.nonsense: no such key"), (TrainConfig, {"rollout": 3}, "rollout: "),
    (TrainConfig, {"steps": 0, "seed": "x"}, "; seed: ")])
def test_settings(kind, given, message):
    says(message, kind, **given)


def test_the_error_of_settings_names_each_key_and_travels_between_processes():
    with pytest.raises(ConfigError) as raised:
        TrainConfig(engine={"tau": 2, "nonsense": 1}, steps=0)
    error = pickle.loads(pickle.dumps(raised.value))
    assert [problem.key for problem in error.problems] == ["steps", "engine.tau", "engine.nonsense"]
    assert str(error) == str(raised.value) and str(error).count("; ") == 2


def test_engine_options_are_one_line(tmp_path):
    folder = tmp_path / "model"
    save_model(Decoder.random(CONFIGS["qwen2"], 0), None, folder)
    says("max_batch: must be >= 1, not 0", Engine.load, folder, max_batch=0)
    says("max_bach: no such key; did you mean max_batch?", Engine.load, folder, max_bach=4)
    says("device meta: not supported", Engine.load, folder, "meta")
    says("device gpu: not a device", Engine.load, folder, "gpu")
    says("dtype: int8 is not supported", Engine.load, folder, "cpu", "int8")
    says("capture: layer 9", Engine.load, folder, capture=(9,))
    says("update_drafter: the engine was loaded without", Engine.load(folder).update_drafter, eagle(), 0)


@pytest.mark.parametrize(("override", "message"), [
    ("spot.lrr=1", "--set spot.lrr=1: no such key; did you mean lr?"),
    ("spot.lr=inf", "--set spot.lr=inf: must be a finite number, not inf"),
    ("drafter_budget.shortest=1", "--set drafter_budget.shortest=1: no such key"),
    ("drafter_alarms.fal=0.5", "--set drafter_alarms.fal=0.5: no such key; did you mean fall?"),
    ("drafter_alarms.fall=2", "--set drafter_alarms.fall=2: must be < 1, not 2"),
    ("optimizer.lr=nan", "--set optimizer.lr=nan: must be a finite number, not nan"),
    ("optimiser.lr=1", "--set optimiser.lr=1: optimiser: no such key; did you mean optimizer?"),
    ("steps", "expected KEY=VALUE"), ("=3", "expected KEY=VALUE"), ("steps.x=1", "steps is not a table"),
    ("steps=many", "--set steps=many: must be an integer, not 'many'")])
def test_overrides(override, message):
    says(message, load_config, None, [override])


# -- model folders


def changed(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: raw | values


def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: {key: value for key, value in raw.items() if key not in keys}


MODEL_CONFIGS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (without("hidden_size"), "config.json: key 'hidden_size' is missing"), (without("vocab_size"), "key 'vocab_size' is missing"),
    (without("num_hidden_layers"), "key 'num_hidden_layers'"),
    (without("architectures", "model_type"), "architectures: (model_type None)"),
    (changed(architectures=["GPT2LMHeadModel"]), "architectures: GPT2LMHeadModel is not supported"),
    (changed(architectures="Qwen2ForCausalLM"), "architectures: Qwen2ForCausalLM is not a list"),
    (changed(architectures=[None]), "architectures: [None] is not a list"),
    (changed(hidden_size="24"), "hidden_size: '24' is not"),
    (changed(hidden_size=24.0), "hidden_size: 24.0"), (changed(hidden_size=True), "hidden_size: True"),
    (changed(hidden_size=-24), "hidden_size: -24"), (changed(hidden_size=None), "hidden_size: None"),
    (changed(hidden_size=25, head_dim=None), "hidden_size: 25 is not a multiple"),
    (changed(num_attention_heads=0), "num_attention_heads: 0"),
    (changed(num_key_value_heads=4), "num_heads: 6 is not a multiple of num_kv_heads 4"),
    (changed(num_key_value_heads=0), "num_kv_heads: 0"),
    (changed(head_dim=5), "head_dim: 5 is odd"), (changed(head_dim=0), "head_dim: 0"), (changed(vocab_size=0), "vocab_size: 0"),
    (changed(num_hidden_layers=0), "num_hidden_layers: 0"), (changed(num_hidden_layers=10**9), "num_hidden_layers: 1000000000"),
    (changed(num_hidden_layers=3), "missing"), (changed(intermediate_size=41), "wrong shape"),
    (changed(vocab_size=10**9), "wrong shape"),
    (changed(rms_norm_eps=0), "rms_eps: 0 is not a positive number"), (changed(rms_norm_eps="small"), "rms_eps: 'small'"),
    (changed(max_position_embeddings=None), "max_position_embeddings: None"),
    (changed(max_position_embeddings=-1), "max_position_embeddings: -1"),
    (changed(rope_parameters={"rope_theta": -1.0}), "rope: theta: -1.0"),
    (changed(rope_parameters=[1]), "rope_scaling: [1] is not an object"),
    (changed(rope_parameters={"rope_type": "magic"}), "rope_scaling: magic is not supported"),
    (changed(rope_parameters={"rope_type": "linear", "factor": 0}), "rope: factor: 0"),
    (changed(rope_parameters={"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}), "rope: low_freq_factor"),
    (changed(tie_word_embeddings="false"), "tie_word_embeddings: 'false' is neither true nor false"),
    (changed(eos_token_id="</s>"), "eos_token_ids: ['</s>']"), (changed(eos_token_id=[1, -2]), "eos_token_ids: [1, -2]"),
    (changed(hidden_act="gelu"), "hidden_act: gelu"), (changed(quantization_config={"bits": 4}), "quantization_config"),
    (lambda raw: [raw], "not a JSON object"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model"
    save_model(Decoder.random(CONFIGS["qwen2"], 0, std=0.35), None, path)
    return path


@pytest.mark.parametrize(("change", "message"), MODEL_CONFIGS, ids=[message for _, message in MODEL_CONFIGS])
def test_model_configurations(folder, tmp_path, change, message):
    copy = shutil.copytree(folder, tmp_path / "model")
    file = copy / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    says(message, load_model, copy)
    with pytest.raises(ValueError, match="model"):  # the line names the folder or its file
        load_model(copy)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", "{", "config.json: not JSON"), ("config.json", "", "config.json: not JSON"),
    ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_ids"),
    ("tokenizer.json", "{}", "the tokenizer does not load"), ("tokenizer.json", "\x00", "the tokenizer does not load"),
    ("model.safetensors", "", "truncated"), ("model.safetensors", None, "neither model.safetensors nor")])
def test_model_files(folder, tmp_path, name, content, message):
    copy = shutil.copytree(folder, tmp_path / "model")
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    says(message, load_model, copy)


def test_a_model_without_a_tokenizer_takes_token_ids(folder):
    served = Engine.load(folder)
    assert len(served.generate([[1, 2]], SamplingParams(max_new_tokens=3))[0].rollouts[0].token_ids) == 3
    says("came without a tokenizer", served.add, "text")


# -- graders


@pytest.mark.parametrize(("source", "message"), [
    ("def grade(problem, answer) return 1", "SyntaxError"), ("import nothing_like_this", "ModuleNotFoundError: No module named"),
    ("raise RuntimeError('no\\nway')", "RuntimeError: no way"), ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("1 / 0", "ZeroDivisionError"),
    ("from os import nothing_like_this", "ImportError"), ("grade = 3", "has no function grade"), ("", "has no function grade")])
def test_graders_that_do_not_import(tmp_path, source, message):
    (tmp_path / "rows.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    (tmp_path / "grader.py").write_text(source)
    options = {"data": str(tmp_path / "rows.jsonl"), "function": f"{tmp_path / 'grader.py'}:grade"}
    says(message, make_task, "python", **options)
    says(str(tmp_path / "grader.py"), make_task, "python", **options)


# -- the command line


@pytest.mark.parametrize(("args", "message"), [
    (["--device", "meta"], "device meta: not supported; there are cpu and cuda"),
    (["--device", "tpu"], "device tpu: not a device"),
    (["--kv-memory-gb", "inf"], "--kv-memory-gb: must be a finite number > 0, not inf"),
    (["--kv-memory-gb", "nan"], "--kv-memory-gb: must be a finite number > 0, not nan"),
    (["--kv-memory-gb", "-1"], "--kv-memory-gb: must be a finite number > 0, not -1.0"),
    (["--temperature", "1e-39"], "temperature: 1e-39 is not 0 or in"),
    (["--temperature", "inf"], "temperature: inf"), (["--top-k", str(2**31)], "top_k: 2147483648"),
    (["--top-p", "nan"], "top_p: nan"),
    (["--seed", str(2**64)], "seed: "), (["--max-new-tokens", "0"], "max_new_tokens: 0"), (["--n", "0"], "--n"),
    (["--stop", ""], "stop: "), (["--strategy", "fast"], "strategy 'fast'"), (["--dtype", "int8"], "dtype: int8"),
    (["--max-batch", "0"], "--max-batch"), (["--threads", "0"], "--threads"), (["--nonsense"], "--nonsense")])
def test_the_command_line(folder, tmp_path, capsys, args, message):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"token_ids": [1, 2]}\n')
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(folder), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), *args])
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and message in said and said.count("\n") == 0, said


@pytest.mark.parametrize(("changes", "message"), [
    (["engine.kv_tokens=10"], "kv_tokens=10: the KV cache holds 16 tokens, but an answer may have rollout.max_new_tokens = 512"),
    (["rollout.max_new_tokens=100000"], "100000 tokens and its prompt do not fit into the policy's context, 1024 tokens"),
    (["evaluation.every=1", "evaluation.max_new_tokens=1024"], "evaluation.max_new_tokens=1024: an answer of 1024 tokens"),
    (["engine.max_context=300"], "do not fit into engine.max_context, 300 tokens"),
    (["steps=100000000000000000000"], "--set steps=100000000000000000000"),
    (["out=/proc/new/run"], "--set out=/proc/new/run: /proc/new/run cannot be made a run folder"),
])
def test_a_run_that_cannot_be_done_is_refused_before_it_starts(tmp_path, one_line, changes, message):
    """By `--dry-run` in the same words."""
    given = [word for change in (f"out={tmp_path / 'run'}", *changes) for word in ("--set", change)]
    said = []
    for dry_run in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            main(["train", *given, *dry_run])
        assert ended.value.code == 2
        said.append(one_line())
    assert message in said[0] and said[0] == said[1]
    assert not list(tmp_path.iterdir())


def test_numbers_of_cases():
    """The list above is as long as it claims to be."""
    tables = (test_sampling_parameters, test_prompts, test_arguments_of_generate_and_add, test_seeds_and_keys, test_strategies,
              test_settings, test_overrides, test_model_configurations, test_model_files, test_graders_that_do_not_import,
              test_the_command_line)
    assert sum(len(mark.args[1]) for table in tables for mark in table.pytestmark if mark.name == "parametrize") >= 200
