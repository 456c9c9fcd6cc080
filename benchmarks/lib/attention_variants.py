"""Attention of a decode step on a GPU: the cases that are timed, and the tiles, divisions and compile options that are tried."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.lib.models import QWEN_SHAPES
from paceline.kernels.triton import fixed_attention
from paceline.kernels.triton.fixed_attention import FEW, MANY, TILED, Launch
from paceline.kernels.triton.fixed_plan import BLOCK, GROUP, Limits

HEADS, KV_HEADS, DIM = (QWEN_SHAPES["1.5B"].num_heads, QWEN_SHAPES["1.5B"].num_kv_heads, QWEN_SHAPES["1.5B"].head_dim)
PDL_ROWS = 64


class Variant(NamedTuple):
    launch: Launch
    block_m: int = 16
    block: int = BLOCK
    group: int = GROUP
    pdl: bool = False

    @property
    def division(self) -> tuple[int, int]:
        """What decides the bits."""
        return self.block, self.group


class Case(NamedTuple):
    """Requests with draft trees of so many rows, each after a context."""

    requests: int
    rows: int
    context: int
    kind: str = "plain"  # plain, chain, tree


CASES = [Case(16, 1, 7000), Case(1, 1, 7000), Case(16, 9, 7000, "tree"), Case(16, 9, 7000, "chain"), Case(16, 1, 16000),
         Case(8, 1, 7000), Case(16, 4, 7000, "chain"), Case(1, 9, 7000, "tree"), Case(8, 9, 7000, "tree"), Case(4, 1, 7000),
         Case(1, 1, 16000), Case(16, 9, 16000, "tree"), Case(16, 17, 7000, "tree"), Case(1, 7, 7000, "chain"), Case(256, 1, 300),
         Case(256, 2, 300, "chain"), Case(64, 1, 1500), Case(64, 3, 300, "chain"), Case(1, 1, 300), Case(1, 17, 300, "tree")]

PLAIN = {
    "few": Variant(FEW), "few, 168 registers": Variant(FEW._replace(max_registers=168)),
    "few, 3 stages": Variant(FEW._replace(num_stages=3)), "few, groups": Variant(FEW._replace(limits=Limits(0, 0))),
    "many": Variant(MANY), "many, 2 stages": Variant(MANY._replace(num_stages=2)),
    "many, 2 stages, 128 registers": Variant(Launch(4, 2, 128, 528, MANY.limits)),
    "many, one block per task": Variant(MANY._replace(limits=Limits(1056, 1))),
    "few, groups of 512": Variant(FEW, group=512), "many, groups of 512": Variant(MANY, group=512),
    "few, groups of 2048": Variant(FEW, group=2048), "blocks of 128": Variant(Launch(4, 3, 255, 132, Limits(264, 4)), block=128),
}
TILES = {
    "tiled": Variant(TILED, 64), "tiled, 3 stages": Variant(TILED._replace(num_stages=3), 64),
    "tiled, groups": Variant(TILED._replace(limits=Limits(0, 0)), 64),
    "tiled, 8 warps": Variant(Launch(8, 2, 128, 264, TILED.limits), 64),
    "tiled, groups of 512": Variant(TILED, 64, group=512), "tiled, groups of 2048": Variant(TILED, 64, group=2048),
    "tiled, twice the programs": Variant(TILED._replace(programs=528), 64),
    "tile of 16": Variant(MANY, 16), "tile of 32": Variant(Launch(4, 3, 168, 396, TILED.limits), 32),
    "tile of 128": Variant(Launch(8, 2, 255, 132, TILED.limits), 128),
    "tiled, blocks of 128": Variant(Launch(8, 2, 255, 132, TILED.limits), 64, block=128),
}


def variants_of(case: Case) -> dict[str, Variant]:
    """The first one is the product's."""
    usual = TILED if case.kind != "plain" else fixed_attention.launch_for(case.requests * KV_HEADS)
    block_m = fixed_attention.BLOCK_M if case.kind == "plain" else fixed_attention.TILED_BLOCK_M
    return {"ours": Variant(usual, block_m, pdl=case.requests * case.rows <= PDL_ROWS),
            **(PLAIN if case.kind == "plain" else TILES)}
