"""Parts of a policy: every rank reads its own from a checkpoint, and they are the same as cut from the whole policy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from models.small_models import CONFIGS as SMALL
from models.small_models import make
from models.test_gguf import llama3_divisors, write_gguf
from tiny import CONFIGS, WINDOWED, model
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.huggingface import FolderCheckpoint
from paceline.models.parallel import split_decoder
from paceline.models.partition import Partition
from paceline.models.save import save_model
from paceline.models.state_dict import CutTensor, export_state, load_state
from paceline.models.weights import empty_model, load_model


class Alone:
    """A group in which nothing is exchanged."""

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError

    gather_first = broadcast = gather


def maker(rank: int, ranks: int):
    return partial(split_decoder, partition=Partition(rank, ranks, 8), group=Alone())


def cut(whole: Decoder, rank: int, ranks: int) -> Decoder:
    part = empty_model(whole.config, whole.norm.dtype, "cpu", maker(rank, ranks))
    load_state(part, dict(whole.named_parameters()))
    return part


def assert_same(part: Decoder, other: Decoder) -> None:
    for (name, ours), (_, theirs) in zip(part.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=name)  # norms are saved without their offset


@pytest.mark.parametrize("kind", CONFIGS | WINDOWED)
def test_ranks_read_their_parts_of_a_folder(kind, tmp_path, monkeypatch):
    whole, num_read = model(kind), []
    save_model(whole, None, tmp_path)
    original = FolderCheckpoint.cut_tensors

    def counted(self, regions):
        for name, found in original(self, regions):
            num_read.append((found.tensor if isinstance(found, CutTensor) else found).numel())
            yield name, found

    monkeypatch.setattr(FolderCheckpoint, "cut_tensors", counted)
    for rank in range(2):
        num_read.clear()
        part, _ = load_model(tmp_path, "cpu", "float64", quiet=True, make=maker(rank, 2))
        assert_same(part, cut(whole, rank, 2))
        if not whole.config.has_experts:  # a layer's experts are one tensor in some checkpoints
            assert sum(num_read) == sum(parameter.numel() for parameter in part.parameters())
    held = sum(parameter.numel() for parameter in part.parameters())
    assert held < 0.8 * sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.parametrize("kind", CONFIGS | WINDOWED)
def test_new_weights_under_either_names_are_the_same(kind):
    whole = model(kind, 1)
    for rank in range(2):
        part = cut(model(kind), rank, 2)
        load_state(part, iter(export_state(whole).items()))
        assert_same(part, cut(whole, rank, 2))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_ranks_read_their_parts_of_gguf(name, tmp_path):
    whole = make(name)
    assert name in SMALL
    write_gguf(whole, tmp_path / "model.gguf", divisors=llama3_divisors(whole.config))
    for rank in range(2):
        part, _ = load_model(tmp_path / "model.gguf", "cpu", "float32", quiet=True, make=maker(rank, 2))
        assert_same(part, cut(whole, rank, 2))


def test_a_part_cannot_be_exported():
    with pytest.raises(ValueError, match="no process has the whole policy"):
        export_state(cut(model("llama"), 0, 2))


def test_parts_that_gelu_would_compute_with_other_bits_are_refused():
    config = replace(WINDOWED["gemma2"], intermediate_size=40)
    Partition(0, 1, 8).check(config)
    with pytest.raises(ValueError, match=r"intermediate_size 40 is not a multiple of 32"):
        Partition(0, 2, 8).check(config)
