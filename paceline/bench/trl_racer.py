"""TRL's generation as one side of the demo: the model and the generation settings of its `GRPOTrainer`, and transformers'
`generate`. It samples with PyTorch's random numbers, so its answers are others."""

from __future__ import annotations

import copy
import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.bench.demo import Piece
from paceline.extras import install_command
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.types import SamplingParams


def check_trl() -> None:
    """ValueError if TRL is not installed."""
    try:
        import trl  # noqa: F401
    except ImportError:
        raise ValueError(f"--against trl: TRL is not installed; {install_command('trl')}") from None


class TrlRacer:
    """Generates as a `GRPOTrainer` without vLLM does. `generate` runs in a thread that waits after every token, so that the race
    can stop its clock."""

    def __init__(self, model: Decoder, tokenizer: Any, params: SamplingParams, n: int) -> None:
        check_trl()
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
        from trl import GRPOConfig, GRPOTrainer

        self._folder = tempfile.TemporaryDirectory()
        device, dtype, group = model.norm.device, model.norm.dtype, max(2, n)
        folder = Path(self._folder.name) / "model"
        save_model(model, tokenizer, folder)
        disable_progress_bar()
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

        def reward(completions: list[str], **_: Any) -> list[float | None]:
            return [0.0] * len(completions)

        config = GRPOConfig(
            output_dir=self._folder.name, use_cpu=device.type == "cpu", bf16=False, per_device_train_batch_size=group,
            num_generations=group, max_completion_length=params.max_new_tokens, temperature=params.temperature or 1.0,
            top_k=params.top_k, top_p=params.top_p, report_to=[], save_strategy="no", disable_tqdm=True, seed=0)
        trainer: Any = GRPOTrainer(
            theirs, reward, config, Dataset.from_dict({"prompt": ["-"] * group}), processing_class=copy.deepcopy(tokenizer))
        self._model, self._settings = trainer.model.to(device).eval(), trainer.generation_config
        self._settings.do_sample = params.temperature > 0
        if not self._settings.do_sample:
            self._settings.temperature = None
        self._go, self._new = threading.Semaphore(0), queue.SimpleQueue[dict[int, Piece] | BaseException | None]()

    def begin(self, prompt_ids: list[int], params: SamplingParams, n: int) -> None:
        self._settings.max_new_tokens = params.max_new_tokens
        torch.manual_seed(params.seed)
        threading.Thread(target=self._generate, args=(prompt_ids, n), daemon=True).start()

    def step(self) -> dict[int, Piece] | None:
        self._go.release()
        found = self._new.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _generate(self, prompt_ids: list[int], n: int) -> None:
        self._go.acquire()
        known, finished = self._settings.eos_token_id, [False] * n
        ends = set() if known is None else {known} if isinstance(known, int) else set(known)

        def observe(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            """Called by `generate` after every token; answers that have ended get padding."""
            last = ids[:, -1].tolist()
            self._new.put({i: Piece([token], 0) for i, token in enumerate(last) if not finished[i]})
            finished[:] = [done or token in ends for done, token in zip(finished, last, strict=True)]
            self._go.acquire()
            return torch.zeros(n, dtype=torch.bool, device=ids.device)

        try:
            inputs = torch.tensor([prompt_ids] * n, device=self._model.device)
            with torch.no_grad():
                self._model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), stopping_criteria=[observe],
                                     generation_config=self._settings)
        except Exception as error:  # raised again where the race is
            self._new.put(error)
        else:
            self._new.put(None)
