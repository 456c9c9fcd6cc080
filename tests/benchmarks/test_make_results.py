"""docs/results*.md are what the generator makes of the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.make_results import DOCS, load, pages
from benchmarks.lib.result_tables import make_table
from benchmarks.lib.results import RESULTS, ROOT


def test_the_pages_are_up_to_date():
    for name, text in pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run python benchmarks/lib/make_results.py"


def test_every_result_names_its_revision_and_claim():
    files = sorted(RESULTS.rglob("*.json"))
    assert files
    for file in files:
        content = load(file)
        folder, name = content["benchmark"].split("/")
        assert {"command", "date", "machine", "dirty"} <= content.keys() and (ROOT / f"benchmarks/{folder}/{name}.py").is_file()
        assert file.stem == f"{folder}_{name}" if file.parent == RESULTS else (
            folder == file.parent.name and file.stem.startswith(name))
        assert content["dirty"] is not True, f"{file.name}: figures of a dirty tree are not published"


def test_a_result_without_a_revision_is_not_published(tmp_path: Path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/decode.json").write_text(json.dumps({"benchmark": "cpu/decode", "revision": "unknown"}))
    with pytest.raises(ValueError, match="revision"):
        pages(tmp_path)


def test_the_table_of_decoding_has_a_row_for_each_backend():
    def cell(engine: str, rate: float, **over: float) -> dict:
        return {"model": "m", "dtype": "float32", "batch": 8, "engine": engine, "tokens_per_second": {"median": rate},
                "tokens_per_cpu_second": {"median": rate / 2}, "speedup": {name: {"median": x} for name, x in over.items()}}

    cells = [cell("paceline auto", 400, transformers=4.0), cell("paceline portable", 200, transformers=2.0),
             cell("paceline auto suffix", 100, transformers=1.0), cell("transformers", 100)]
    table = make_table({"benchmark": "cpu/decode", "throughput": cells})
    assert table.rows == [("m", "float32", 8, "auto", "400", "200", "4.00×", "–", "–"),
                          ("m", "float32", 8, "portable", "200", "100", "2.00×", "–", "–")]
    assert "2.00 to 4.00×" in table.sentence and "vLLM" not in table.sentence


def test_speculation_on_a_cpu_is_described_with_and_without_batches():
    def cell(speedup: float) -> dict:
        return {"speedup": speedup, "accept_length": 2.5, "tokens_per_s": 100.0}

    price = {"fixed": {"eagle": {"ms": 0.12}, "suffix": {"ms": 0.03}}}
    cells = {"off": cell(1.0), "eagle:d6w1v6": cell(1.8), "beg": cell(1.9), "auto": cell(1.7)}
    measured = {"4": {"strategies": cells, "differing_answers": 0}}
    table = make_table({"benchmark": "cpu/speculation", "price": price, "speedup": measured})
    assert table.rows == [("4", "1.70×", "2.50", "eagle:d6w1v6", "1.80×", "2.50", 0)]
    assert "1.70× at batch 4" in table.sentence and "0.12 ms more" in table.sentence
    assert make_table({"benchmark": "cpu/speculation", "price": price, "speedup": {}}).rows == []
