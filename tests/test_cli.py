"""The command line: rollouts by id and not by place, runs that go on where they ended, one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CONFIGS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from paceline.cli import main
from paceline.generation import RolloutFile
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.weights import load_model

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456"
LINES: list[dict[str, Any]] = [
    {"id": "a", "prompt": "hello"},
    {"id": 2, "prompt": "xyzxyzxyz"},
    {"prompt": "no id"},
    {"id": "own seed", "prompt": "hello", "seed": 99},
    {"id": "ids", "token_ids": [1, 2, 3]},
]
ARGS = ["--n", "2", "--seed", "7", "--max-new-tokens", "12", "--dtype", "float64", "--threads", "1"]
Rollouts = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and a tokenizer that knows one letter per token, no chat template."""
    words = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    words.pre_tokenizer = Split("", "isolated")
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(Decoder.random(CONFIGS["qwen2"], 0, std=0.35), PreTrainedTokenizerFast(tokenizer_object=words), folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", LINES)


def write(path: Path, lines: list[Any]) -> Path:
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


def read(path: Path) -> Rollouts:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rollouts = {(str(record["id"]), record["sample"]): record for record in records}
    assert len(rollouts) == len(records), "a rollout is there twice"
    return rollouts


def run(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


def generate(model: Path, prompts: Path | str, out: Path | str, *more: str) -> int:
    return run("generate", "--model", model, "--prompts", prompts, "--out", out, *ARGS, *more)


@pytest.fixture(scope="session")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    """What LINES give, for comparison."""
    folder = tmp_path_factory.mktemp("whole")
    assert generate(model, write(folder / "in.jsonl", LINES), folder / "out.jsonl", "--strategy", "off") == 0
    return read(folder / "out.jsonl")


def tokens(rollouts: Rollouts) -> dict[tuple[str, int], list[int]]:
    return {key: record["token_ids"] for key, record in rollouts.items()}


def test_one_object_per_rollout(whole: Rollouts) -> None:
    assert len(whole) == 10
    record = whole["a", 1]
    assert len(record["token_ids"]) == len(record["logprobs"]) == 12
    assert record["finish_reason"] == "length"
    assert record["text"].replace(" ", "") == "".join(LETTERS[i] for i in record["token_ids"]).replace(" ", "")
    assert whole["2", 0]["id"] == 2, "an id comes back as it was given"
    assert len({tuple(ids) for ids in tokens(whole).values()}) == 10, "every rollout has its own noise"


def test_place_batch_and_strategy_change_no_rollout(model: Path, whole: Rollouts, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    turned = write(tmp_path / "turned.jsonl", LINES[::-1])
    assert generate(model, turned, tmp_path / "out.jsonl", "--strategy", "suffix:d6w2v12", "--max-batch", "3") == 0
    got = read(tmp_path / "out.jsonl")
    assert tokens(got) == tokens(whole)
    for key, record in got.items():
        assert record["logprobs"] == pytest.approx(whole[key]["logprobs"], abs=1e-9)
    figures = capsys.readouterr().err.splitlines()[-1]
    assert "10 rollouts, 120 tokens" in figures and "tokens per verification" in figures
    assert "suffix:d6w2v12 100 %" in figures


@pytest.mark.parametrize("strategy", ["auto", "beg"])
def test_every_selector_has_a_name(model: Path, whole: Rollouts, tmp_path: Path, strategy: str) -> None:
    lines = write(tmp_path / "in.jsonl", LINES[:1])
    assert generate(model, lines, tmp_path / "out.jsonl", "--strategy", strategy) == 0
    assert tokens(read(tmp_path / "out.jsonl")) == {key: ids for key, ids in tokens(whole).items() if key[0] == "a"}


def test_a_line_s_seed_is_that_seed(model: Path, whole: Rollouts, tmp_path: Path) -> None:
    same = write(tmp_path / "in.jsonl", [{"id": "own seed", "prompt": "hello"}])
    assert run("generate", "--model", model, "--prompts", same, "--out", tmp_path / "o.jsonl", *ARGS, "--seed", "99") == 0
    assert tokens(read(tmp_path / "o.jsonl")) == {key: ids for key, ids in tokens(whole).items() if key[0] == "own seed"}


def test_goes_on_after_a_torn_line(model: Path, prompts: Path, whole: Rollouts, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(model, prompts, out) == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert generate(model, prompts, out, "--strategy", "off") == 0
    assert "7 rollouts, 84 tokens" in capsys.readouterr().err
    assert out.read_bytes().startswith(b"".join(lines[:3])), "what was whole stays as it was"
    assert tokens(read(out)) == tokens(whole)
    assert generate(model, prompts, out) == 0
    assert "0 rollouts, 0 tokens" in capsys.readouterr().err


def test_failed_rollouts_are_done_again(model: Path, prompts: Path, whole: Rollouts, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(model, prompts, out) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    records[4] |= {"finish_reason": "error", "token_ids": [], "error": "as if"}
    write(out, records)
    assert generate(model, prompts, out) == 0
    assert tokens(read(out)) == tokens(whole)


@pytest.mark.parametrize(("change", "named"), [
    (("--seed", "8"), "seed 7, now 8"), (("--temperature", "0.5"), "temperature"), (("--n", "3"), "n 2, now 3"),
    (("--dtype", "float32"), "dtype"), (("--stop", "q"), "stop")])
def test_other_settings_are_refused(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                    change: tuple[str, str], named: str) -> None:
    out = tmp_path / "out.jsonl"
    write(prompts, [{"prompt": "a"}])
    assert generate(model, prompts, out) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert generate(model, prompts, out, *change) == 2
    assert named in one_line(capsys) and out.read_bytes() == before


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    progress = ("paceline: loading ", "paceline: measuring ")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1 and lines[0].startswith("paceline: "), lines
    return lines[0]


def test_an_output_of_unknown_origin_is_refused(model: Path, prompts: Path, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("notes\n")
    assert generate(model, prompts, out) == 2
    assert "out.jsonl.meta.json" in one_line(capsys) and out.read_text() == "notes\n"


def test_another_prompt_under_the_same_id(model: Path, prompts: Path, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(model, write(prompts, [{"id": 1, "prompt": "abc"}]), out) == 0
    assert generate(model, write(prompts, [{"id": 1, "prompt": "abd"}]), out) == 2
    assert "in.jsonl:1: id 1" in capsys.readouterr().err


def test_bad_lines_are_named_and_the_others_finish(model: Path, whole: Rollouts, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    bad = ['{"prompt": "cut', "[1]", {"id": 1}, {"prompt": "a", "token_ids": [1]}, {"prompt": 5}, {"prompt": ""},
           {"token_ids": [61]}, {"token_ids": [1.5]}, {"token_ids": [1] * 256}, {"id": True, "prompt": "a"},
           {"prompt": "a", "seed": "7"}, {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": "a"}]},
           {"id": "a", "prompt": "again"}, {"prompt": "no id"}, '{"prompt": "\\ud800"}', {"id": "\ud83d", "prompt": "a"}]
    said = ["not JSON", "not a JSON object", "exactly one of prompt, messages, token_ids is required, found none",
            "found prompt and token_ids", "prompt: not a string", "prompt: it is empty", "token id 61",
            "not all are integers", "256 tokens leave no room", "id: neither",
            "seed: not a 64-bit integer", '"content"', "no chat template",
            "id 'a' is already in line 1", "the same prompt, without an id, is already in line 3", "not JSON", "not JSON"]
    prompts = write(tmp_path / "in.jsonl", [*LINES, "", *bad])
    assert generate(model, prompts, tmp_path / "out.jsonl") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if ".jsonl:" in line]
    assert len(errors) == len(bad)
    for number, (line, reason) in enumerate(zip(errors, said, strict=True), start=len(LINES) + 2):
        assert line.startswith(f"paceline: {prompts}:{number}: ") and reason in line
    assert tokens(read(tmp_path / "out.jsonl")) == tokens(whole)


@pytest.mark.parametrize(("args", "named"), [
    (("--temperature", "-1"), "temperature: -1.0"), (("--top-p", "0"), "top_p"),
    (("--max-new-tokens", "0"), "max_new_tokens"),
    (("--strategy", "fast"), "strategy 'fast'"), (("--strategy", "eagle:d6w4v32"), "needs a learned drafter"),
    (("--n", "0"), "--n"),
    (("--drafter", "/no/such/folder"), "/no/such/folder"), (("--dtype", "int8"), "dtype: int8"),
    (("--device", "abacus"), "abacus"),
    (("--kv-memory-gb", "-1"), "--kv-memory-gb"), (("--no-such-option",), "--no-such-option"),
    (("--model", "/no/model"), "/no/model"),
    (("--prompts", "/no/prompts"), "/no/prompts"), (("--out", "/no/such/folder/out"), "/no/such/folder/out")])
def test_impossible_arguments(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                              args: tuple[str, ...], named: str) -> None:
    assert generate(model, prompts, tmp_path / "out.jsonl", *args) == 2
    assert named in one_line(capsys)


def test_unknown_architecture(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    assert generate(other, prompts, tmp_path / "out.jsonl") == 2
    assert "MambaForCausalLM is not supported" in one_line(capsys)


def test_stop_strings(model: Path, whole: Rollouts, tmp_path: Path, prompts: Path) -> None:
    full = whole["a", 0]["text"]
    stop = full[4:9]
    assert generate(model, prompts, tmp_path / "out.jsonl", "--stop", "never there", "--stop", stop) == 0
    got = read(tmp_path / "out.jsonl")["a", 0]
    assert got["finish_reason"] == "stop"
    assert got["text"] == full[: full.index(stop)]
    assert got["token_ids"] == whole["a", 0]["token_ids"][: len(got["token_ids"])]


def test_raw_logprobs_on_request(model: Path, whole: Rollouts, prompts: Path, tmp_path: Path) -> None:
    assert generate(model, prompts, tmp_path / "out.jsonl", "--raw-logprobs", "--temperature", "0") == 0
    record = read(tmp_path / "out.jsonl")["a", 0]
    assert len(record["raw_logprobs"]) == 12 and max(record["raw_logprobs"]) < 0 == min(record["logprobs"])
    assert "raw_logprobs" not in whole["a", 0]


def test_standard_input(model: Path, whole: Rollouts, prompts: Path, tmp_path: Path,
                        monkeypatch: pytest.MonkeyPatch) -> None:
    with prompts.open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert generate(model, "-", tmp_path / "out.jsonl") == 0
    assert tokens(read(tmp_path / "out.jsonl")) == tokens(whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_from_the_start(model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, prompts, "/dev/full") == 2
    assert "/dev/full: No space left on device" in one_line(capsys)


def test_a_disk_that_fills_up(model: Path, prompts: Path, whole: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the fourth line still fits."""
    out, resume = tmp_path / "out.jsonl", RolloutFile._resume

    class Filling:
        def __init__(self, file: Any) -> None:
            self._file, self.left = file, 3.5 * 700

        def write(self, data: memoryview) -> int:
            if self.left <= 0:
                raise OSError(28, "No space left on device")
            taken = self._file.write(data[: int(self.left) + 1])
            self.left -= taken
            return taken

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def filling(self: RolloutFile, settings: dict[str, Any]) -> None:
        resume(self, settings)
        self._file = Filling(self._file)  # type: ignore[assignment]

    monkeypatch.setattr(RolloutFile, "_resume", filling)
    assert generate(model, prompts, out) == 2
    assert "out.jsonl: No space left on device" in one_line(capsys)
    kept = read(out)
    assert 0 < len(kept) < 10
    monkeypatch.undo()
    assert generate(model, prompts, out) == 0
    assert tokens(read(out)) == tokens(whole)


def test_two_runs_on_one_output(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutFile(tmp_path / "out.jsonl", {}):
        assert generate(model, prompts, tmp_path / "out.jsonl") == 2
    assert "another run is writing to it" in one_line(capsys)


def test_logits_that_are_no_numbers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row of one letter is poisoned: only prompts with that letter fail."""
    decoder, tokenizer = load_model(model, dtype="float64")
    with torch.no_grad():
        decoder.embed.weight[LETTERS.index("6")] = torch.nan
    sick = tmp_path / "sick"
    save_model(decoder, tokenizer, sick)
    prompts = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "abc6"}, {"id": 2, "prompt": "abc"}])
    assert generate(sick, prompts, tmp_path / "out.jsonl", "--max-new-tokens", "3") == 2
    got = read(tmp_path / "out.jsonl")
    assert got["1", 0]["finish_reason"] == "error" and "not numbers" in got["1", 0]["error"]
    assert len(got["2", 0]["token_ids"]) == 3 and f"{prompts}:1: sample 0" in capsys.readouterr().err


def test_interrupted_it_keeps_what_is_finished(model: Path, whole: Rollouts, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"id": i, "prompt": "hello", "seed": i} for i in range(1000)])
    command = [sys.executable, "-m", "paceline.cli", "generate", "--model", model, "--prompts", prompts, "--out",
               tmp_path / "out.jsonl", *ARGS]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 300
    out = tmp_path / "out.jsonl"
    while not out.exists() or out.read_bytes().count(b"\n") < 2:  # a signal during a line's write takes that line back
        assert time.monotonic() < deadline and process.poll() is None, "it never wrote two rollouts"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 130
    assert "interrupted: " in said and "the same command continues from there" in said and "Traceback" not in said
    assert 0 < len(read(tmp_path / "out.jsonl")) < 2000


@pytest.mark.parametrize("module", ["paceline", "paceline.cli"])
def test_the_command_as_a_module(module: str) -> None:
    ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout.startswith("paceline "), ended.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("paceline ")
    for wanted in ("--help", "-h"):
        assert run("generate", wanted) == 0
        assert "--prompts" in capsys.readouterr().out
    for command in ((), ("drafter",), ("bench",)):
        assert run(*command) == 2
        printed = capsys.readouterr()
        assert "Usage: paceline" in printed.out + printed.err and "paceline: str" not in printed.err


def test_demo_reports_what_it_measured(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert run("demo", "--model", model, "--out", out, "--n", "2", "--max-new-tokens", "8", "--dtype", "float64") == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["identical"] and summary["rollouts"] == 24
    assert summary["off"]["tokens"] == summary["auto"]["tokens"] and summary["off"]["tokens_per_verification"] == 1
    printed = capsys.readouterr().out
    assert "identical: yes (token ids of all 24 rollouts" in printed and printed.count(", identical: yes\n") == 12
