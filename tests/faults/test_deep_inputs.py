"""Input that is nested or long without reason is refused by one line, in a moment: TOML, JSON, GGUF files and chat templates."""

from __future__ import annotations

import json
import struct
import time

import pytest
from faults.test_inputs import says
from tiny import CONFIGS, model
from trainer.test_collecting import chat_tokenizer

from paceline import Engine
from paceline.cli import main
from paceline.generation.jobs import parse_job
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.tasks import make_task
from paceline.trainer.config_files import load_config

DEEP = 100_000
"""Levels: no interpreter's stack is so deep."""
TOML = {"arrays": f"seed = {'[' * DEEP}{']' * DEEP}", "tables": f"seed = {'{a=' * DEEP}1{'}' * DEEP}",
        "dotted": f"task_options.{'a.' * 3000}a = 1", "few levels": f"task_options.a = {'[' * 200}{']' * 200}",
        "long": f"task_options.{'a.' * DEEP}a = 1", "quoted": "".join(["task_options", '."a b" . \'c\'' * DEEP, " = 1"]),
        "inline": f"task_options = {{ {'a.' * DEEP}a = 1 }}", "header": f"[task_options.{'a.' * 3000}a]\nb = 1"}


@pytest.mark.parametrize("name", TOML)
def test_deeply_nested_toml(tmp_path, name):
    file = tmp_path / "deep.toml"
    file.write_text(TOML[name])
    says(f"{file}: nested more than", load_config, file)


@pytest.mark.parametrize("override", [f"task_options.a={'[' * DEEP}", f"task_options.a={'[' * DEEP}{']' * DEEP}",
                                      f"task_options.{'a.' * 3000}a=1", f"task_options={{{'a.' * DEEP}a=1}}"],
                         ids=["open", "closed", "dotted", "inline"])
def test_deeply_nested_overrides(override):
    says("nested more than", load_config, None, [override])


def test_long_toml_that_is_not_nested_is_read(tmp_path):
    """A key of as many names as are allowed, and values with many dots."""
    file = tmp_path / "long.toml"
    file.write_text(f"out = '{'x' * 200_000}{'.' * 200_000}{'1.5, ' * 100_000}'\nsteps = 3\n")
    began = time.process_time()
    assert load_config(file).steps == 3 and time.process_time() - began < 5
    file.write_text(f"task_options.{'.'.join('a' * 60)} = 1\n")
    assert "nested" not in error_of(load_config, file)


def error_of(call, *arguments) -> str:
    try:
        return str(call(*arguments))
    except ValueError as error:
        return str(error)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("depth", [700, DEEP])
def test_deeply_nested_json_of_a_model(tmp_path, name, depth):
    folder = tmp_path / "model"
    save_model(Decoder.random(CONFIGS["qwen2"], 0), None, folder)
    key = {"config.json": "architectures", "generation_config.json": "eos_token_id"}.get(name, "weight_map")
    raw = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text(json.dumps(raw | {key: 0}).replace(f'"{key}": 0', f'"{key}": {nested(depth)}'))
    if name.startswith("model"):
        (folder / "model.safetensors").unlink()
    says(name, load_model, folder)


@pytest.mark.parametrize(("depth", "message"), [(100, "nested more than"), (700, "nested more than"), (DEEP, "not JSON")])
def test_deeply_nested_json_lines(tmp_path, depth, message):
    """Deeply nested JSON lines are refused, in prompt files and in a task's rows, also in fields that nothing reads."""
    lines = tmp_path / "lines.jsonl"
    for field in ("prompt", "more"):
        lines.write_text(f'{{"prompt": "a", "answer": "", "{field}": {nested(depth)}}}\n')
        says(f"{lines}:1: {message}", make_task, "jsonl", data=str(lines), check="exact")
        says(message, parse_job, f"{lines}:1", lines.read_bytes())


def test_json_lines_that_are_not_nested_deeply_are_read(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f'{{"prompt": "a", "answer": "", "more": {nested(60)}}}\n')
    assert make_task("jsonl", data=str(lines), check="exact") and parse_job(f"{lines}:1", lines.read_bytes()).prompt == "a"


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_array(kind: int, length: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + content


STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4
ARRAYS = {
    "2^60 bytes": gguf_array(UINT8, 2**60), "2^60 numbers": gguf_array(UINT32, 2**60, bytes(64)),
    "2^60 texts": gguf_array(STRING, 2**60, gguf_string("a")), "2^60 arrays": gguf_array(ARRAY, 2**60),
    "2^60 empty arrays": gguf_array(ARRAY, 2**60, gguf_array(UINT8, 0) * 99),
    "a text of 2^60 bytes": gguf_array(STRING, 1, struct.pack("<Q", 2**60)), "unknown elements": gguf_array(77, 2**60),
    "nested arrays": struct.pack("<IQ", ARRAY, 1) * DEEP, "many elements": gguf_array(UINT8, 2**27, bytes(2**27)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_gguf_arrays_that_no_file_holds(tmp_path, name):
    file = tmp_path / "model.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("tokenizer.ggml.scores") + struct.pack("<I", ARRAY)
    file.write_bytes(head + ARRAYS[name])
    began = time.process_time()
    says("model.gguf: truncated, or not a GGUF file", load_model, file)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("counts", [(2**60, 0), (0, 2**60), (2**63, 2**63)])
def test_gguf_counts_that_no_file_holds(tmp_path, counts):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    says("model.gguf: truncated, or not a GGUF file", load_model, file)


TEMPLATES = {
    "division": "{{ 1 / 0 }}", "missing": "{{ messages[9].content }}", "key": "{{ {}['a'].b }}", "type": "{{ 'a' + 1 }}",
    "overflow": "{{ 'x' * 9999999999999999999999 }}", "value": "{{ 'abc'.index('z') }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "attribute": "{{ messages.nothing.more }}",
    "said": "{{ raise_exception('roles\\nmust alternate') }}", "syntax": "{{ messages", "lookup": "{{ 'a'.encode('no such') }}"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_raises_is_one_line(name):
    """A template is code that came with a model: it may raise anything."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    engine = Engine(model(), tokenizer, strategy="off")
    messages = [{"role": "user", "content": "abc"}]
    says("messages: the chat template rejects them (", engine.encode, messages)
    (group,) = engine.generate([messages])
    assert "the chat template rejects them" in (group.rollouts[0].error or "")


def test_prompts_for_a_template_that_raises(tmp_path, capsys):
    """By `paceline generate`: the line of the file is named, and nothing else is said."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ 1 / 0 }}"
    save_model(Decoder.random(CONFIGS["llama"], 0), tokenizer, tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "abc"}]}\n')
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "in.jsonl"), "--out",
              str(tmp_path / "out.jsonl")])
    said = [line for line in capsys.readouterr().err.splitlines() if "rejects" in line]
    assert ended.value.code == 2 and len(said) == 1 and "in.jsonl:1" in said[0] and "division by zero" in said[0], said
