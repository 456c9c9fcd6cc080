"""Drafter training on a GPU: fused attention against the plain one, and a trainer that learns in bfloat16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from spot.answers import OPS, answers

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Rope
from paceline.spot.attention import CudaCausalAttention, ReferenceCausalAttention, UnrolledAttend
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.checkpoint import SpotCheckpoints, load_snapshot, restore, snapshot
from paceline.spot.config import SpotConfig
from paceline.spot.initialization import fresh_eagle
from paceline.spot.trainer import SpotTrainer
from paceline.trainer.feature_downloads import FeatureDownloads
from paceline.types import FeatureRecord

SHAPE = ModelConfig("qwen2", 512, 256, 512, 2, 4, 2, 64, max_context=512, qkv_bias=True)


def test_fused_attention_equals_the_plain_one():
    torch.manual_seed(0)
    lengths, queries = (70, 1, 130, 9), (40, 1, 130, 2)  # queries are the last rows of a sequence
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    last = torch.cat([torch.arange(n) >= n - m for n, m in zip(lengths, queries, strict=True)]).nonzero()[:, 0].cuda()
    packed = SimpleNamespace(positions=positions, answers=last, lengths=lengths, answer_lengths=queries)
    policy = Decoder.random(SHAPE, 0)
    layer = fresh_eagle(policy).attention
    rope = Rope(SHAPE, 256, torch.float32, "cuda")
    qkv = [torch.randn(rows, (4 + 2 * 2) * 64, device="cuda") for rows in (sum(lengths), sum(queries), sum(queries))]

    def run(causal, dtype):
        inputs = [x.to(dtype).requires_grad_(True) for x in qkv]
        attend = UnrolledAttend(OPS, rope, packed, causal)
        out = torch.stack([attend(layer, x) for x in inputs])
        weight = torch.sin(torch.arange(out.numel(), device="cuda")).view_as(out)
        return [out.detach(), *torch.autograd.grad((out.float() * weight).sum(), inputs)]

    plain = run(ReferenceCausalAttention(lengths, queries), torch.float32)
    fused = run(CudaCausalAttention(lengths, queries, torch.device("cuda")), torch.bfloat16)
    for a, b in zip(plain, fused, strict=True):
        assert (a - b.float()).norm() < 0.015 * a.norm()


def test_it_learns_and_resumes_in_bfloat16(tmp_path):
    policy = Decoder.random(SHAPE, 0, std=0.1, dtype=torch.bfloat16)
    records = answers(policy, [60, 90, 40, 120])
    policy = policy.cuda()

    def trainer() -> SpotTrainer:
        buffer = FeatureBuffer(10**9, device="cuda")
        for r in records:
            buffer.add(FeatureRecord(r.token_ids, r.features, r.layers, r.versions, r.prompt_length), 0)
        config = SpotConfig(step_tokens=200, micro_batch_tokens=128, max_length=256)
        return SpotTrainer(fresh_eagle(policy), policy, buffer, config)

    first = trainer()
    begin = first.run(lambda: first.progress.step >= 3)
    checkpoints = SpotCheckpoints(tmp_path)
    checkpoints.save(snapshot(first))
    checkpoints.close()
    again = trainer()
    restore(again, load_snapshot(tmp_path))
    assert all(torch.equal(again.parameters[n], p) for n, p in first.parameters.items())
    end = again.run(lambda: again.progress.step >= 80)
    assert end.losses["overlap/1"] > begin.losses["overlap/1"] and again.progress.skipped == 0


@pytest.mark.parametrize("starts", [False, True])
def test_keeping_finished_answers_does_not_wait_for_the_device(starts):
    """Waiting would stop generation: the next step is launched while the last one runs."""
    kept, downloads = [], FeatureDownloads()
    features = [torch.randn(rows, 1024, device="cuda").bfloat16() for rows in (300, 120, 9000, 700)]  # one needs several copies
    torch.cuda._sleep(200_000_000)  # about a tenth of a second, like steps that were launched before
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensor in features:
            downloads.add(FeatureRecord([0] * (len(tensor) + 1), tensor, (-1,), [0] * 3, 1), kept.append)
        if starts:
            downloads.start()
        downloads.poll()
        assert not kept
    finally:
        torch.cuda.set_sync_debug_mode("default")
    downloads.wait()
    assert all(torch.equal(record.features, tensor.cpu()) for record, tensor in zip(kept, features, strict=True))
    assert not any(record.features.is_pinned() for record in kept)
