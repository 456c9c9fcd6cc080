"""TRL's `GRPOTrainer` in two processes: the policy whole in each (DDP), or sharded (FSDP, DeepSpeed ZeRO-3)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_policy import write_policy
from trl_training import AGREEMENT, ENGINE, Recorded, answers, logged, make_trainer

from paceline.integrations.trl import DRAFTER_FOLDER
from paceline.models.state_dict import export_state

pytestmark = pytest.mark.integration
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "train_micro_batch_size_per_gpu": 8,
         "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


class Gathered(Recorded):
    """Compares the engine's weights also with PyTorch's own way of gathering a model that FSDP has sharded."""

    def _generate(self, *arguments):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state = export_state(self.engine.model)
        trained = get_model_state_dict(self._trainer.model, options=StateDictOptions(full_state_dict=True))
        assert type(self._trainer.model).__name__.startswith("FSDP")
        if trained.keys() == state.keys():  # not with adapters, whose weights are apart
            assert all(torch.equal(state[name], value) for name, value in trained.items())
        return super()._generate(*arguments)


def shard_with_fsdp(trainer, mixed_precision):
    """Let accelerate shard the policy with FSDP2, which of its own accord it does for processes with GPUs only."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT")
    if mixed_precision:  # passes compute in bfloat16, the parameters stay float32
        state.fsdp_plugin.set_mixed_precision("bf16")
    state.distributed_type, trainer.is_fsdp_enabled = DistributedType.FSDP, True


def train_in_one_of_two_processes(kind, folder, out):
    """What `torch.distributed.run` calls in each process."""
    torch.set_num_threads(1)
    rollout = (Gathered if "fsdp" in kind else Recorded)(drafter="learned", dtype="float32", engine=ENGINE)
    options = {"deepspeed": ZERO3} if "zero3" in kind else {}
    trainer = make_trainer(folder, out, rollout, lora="lora" in kind, max_steps=2, per_device_train_batch_size=8, evaluate=4,
                           per_device_eval_batch_size=8, eval_strategy="steps", eval_steps=1, **options)
    if "fsdp" in kind:
        shard_with_fsdp(trainer, mixed_precision="bf16" in kind)
    trainer.train()
    assert len(rollout.calls) == 2 and len(rollout.evaluations) == 4
    assert "bf16" in kind or max(logged(trainer, AGREEMENT)) < 1e-4
    trainer.evaluate()  # the same weights: the engine keeps its version
    assert rollout.engine.version == 2 and answers(rollout.evaluations)[-2:] == answers(rollout.evaluations)[-4:-2]
    (out / f"answers-{os.environ['RANK']}.json").write_text(json.dumps(answers(rollout.calls)))


@pytest.mark.parametrize("kind", ["ddp", "fsdp-bf16", "fsdp-lora", "zero3", "zero3-lora"])
def test_two_processes_generate_different_answers(kind, tmp_path):
    """Before every generation both engines have the trainer's weights, and log-probabilities agree with those of the trainer's
    own passes."""
    if "zero3" in kind and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    folder = write_policy(tmp_path / "policy")
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, kind, str(folder),
                    str(tmp_path)], check=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    first, second = (json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in (0, 1))
    assert [len(step) for step in first] == [len(step) for step in second] == [8, 8]
    assert first[0] != second[0] and first[1] != second[1]
    assert {path.name for path in tmp_path.glob(f"{DRAFTER_FOLDER}*")} == {DRAFTER_FOLDER, f"{DRAFTER_FOLDER}-1"}


if __name__ == "__main__":
    train_in_one_of_two_processes(sys.argv[1], *map(Path, sys.argv[2:]))
