"""Runs that are started from Python: their progress, their folder, and programs that worker processes cannot import."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from paceline.trainer import RunStatus, TrainConfig, Trainer

TINY = {"model": "default", "task": "collatz", "steps": 2, "strategy": "off",
        "rollout": {"prompts": 2, "group_size": 2, "max_new_tokens": 8},
        "engine": {"kv_tokens": 2048, "max_batch": 4, "profile": False}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_or_lines_or_nothing_and_a_free_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(**TINY, reward={"workers": 0})
    first = Trainer(config).run()
    assert first.status is RunStatus.COMPLETED and first.folder == Path("runs/default")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline: step")]
    assert len(lines) == 2 and "reward" in lines[0] and lines[1].startswith("paceline: step 2/2")

    second = Trainer(config, progress=False).run()
    assert second.folder == Path("runs/default-2") and "step 1/2" not in capfd.readouterr().err

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trainer = Trainer(config)
    assert trainer.run().folder == Path("runs/default-3") and trainer.callbacks == []
    shown = terminal.getvalue()
    assert "loading" in shown and "answers" in shown and re.search(r"2/2 \[.*reward=", shown)


def run_as_program(source: str, file: Path) -> None:
    file.write_text(source)
    runpy.run_path(str(file), run_name="__main__")


START = f"Trainer(TrainConfig(**{TINY!r})).run()"


def test_a_program_that_workers_would_run_again_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refused:
        run_as_program(f"from paceline.trainer import TrainConfig, Trainer\ndef main():\n    {START}\n\nmain()\n",
                       tmp_path / "script.py")
    assert re.fullmatch(r"reward.workers: worker processes import \S*/script.py and would run line 5 again; put it below "
                        r'if __name__ == "__main__":, or set reward.workers to 0 .*', str(refused.value))
    assert not (tmp_path / "runs").exists()


def test_a_program_without_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    program = compile(f"from paceline.trainer import TrainConfig, Trainer\n{START}", "<stdin>", "exec")
    with pytest.raises(ValueError, match="<stdin> is not a file; save the program in a file"):
        exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', 'if "__main__" == __name__ and True:'])
def test_a_guarded_program_is_accepted(tmp_path, guard):
    run_as_program(f"from paceline.trainer.main_guard import check_main_guard\n{guard}\n    check_main_guard()\n",
                   tmp_path / "script.py")
