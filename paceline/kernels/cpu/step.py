"""A whole step of a policy in one compiled call: draft trees become rows, then all layers, the head, sampling, verification, and
the move of accepted tokens' keys and values.

A step of a small model computes for half a millisecond. Called operation by operation from Python it takes three times as long,
and a speculative step, which has more operations, loses most of what its draft tokens save. The calls and their arguments are
laid out once; a step passes the numbers of rows and requests, and where the draft trees are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.cpu.call import Program, address
from paceline.kernels.cpu.decoder import DecoderCalls, DecoderProgram, DecoderRowNames, active_size, room_for
from paceline.kernels.cpu.products import Weights
from paceline.kernels.cpu.rows import HALF, INT, REAL, SEGMENT_WORDS, WIDE, Movable
from paceline.kernels.records import INPUT_LINES, SampledTokens, StepInputs, StepTensors, TreeTensors

PARALLEL_STEP = 1 << 20
"""A step runs on one thread if it has fewer multiplications."""
MAX_ROWS = 256
"""Steps of more rows run operation by operation: their time is that of the products."""
_NO_TREES: TreeTensors = (None, None, None)


class StepProgram:
    """Whole steps of one policy over one paged cache, of up to `max_rows` rows, none of them forced."""

    def __init__(self, of: StepTensors, block: Tensor, copies: Weights, num_rows: int, long_segment: int) -> None:
        """`block`: memory of the steps' inputs; see `StepInputs`."""
        self.of, self.block, self.max_rows = of, block, min(room_for(num_rows), MAX_ROWS)
        self._num_products = sum(active_size(layer) for layer in of.weights.layers) + of.head.numel()
        self._acc, self._program = WIDE[of.head.dtype], Program()
        rows, (vocab, hidden) = self.max_rows, of.head.shape
        self._room = {
            "rows": torch.zeros(3, rows, dtype=INT), "sampling": torch.zeros(2, rows, dtype=INT),
            "filters": torch.zeros(3, rows, dtype=REAL), "top_k": torch.zeros(rows, dtype=HALF),
            "segments": torch.zeros(len(SEGMENT_WORDS), rows, dtype=HALF), "final": of.head.new_zeros(rows, hidden),
            "logits": of.head.new_empty(rows, vocab), "sampled": torch.zeros(rows, dtype=INT),
            "logprobs": torch.zeros(rows, dtype=self._acc)}
        self._moves = torch.empty(0, dtype=INT)
        self._lay_out(copies, long_segment)

    @staticmethod
    def serves(of: StepTensors, copies: Weights) -> bool:
        """Whether such a program can be made: of a dtype that the kernels know, and all weights have panels."""
        is_served = DecoderProgram.serves(of.weights, of.caches[0], of.cos, copies) and copies.find(of.head) is not None
        return is_served and (of.features is None or of.features.dtype == of.head.dtype)

    def run(self, inputs: StepInputs, trees: TreeTensors | None, max_depth: int) -> SampledTokens:
        """Run a step of at most `max_rows` rows."""
        batch, num_rows, columns = inputs.num_requests, inputs.num_rows, max_depth + 1
        tokens, num_drawn = torch.empty(batch, columns, dtype=INT), torch.empty(batch, dtype=INT)
        logprobs, moves = torch.empty(batch, columns, dtype=self._acc), self._room_for_moves(batch * columns)
        drafted, parents, depths = trees or _NO_TREES
        threads = 1 if num_rows * self._num_products < PARALLEL_STEP else torch.get_num_threads()
        self._program.run(
            threads, num_rows=num_rows, num_requests=batch, num_pairs=num_rows * self._calls.num_active, max_depth=max_depth,
            num_columns=columns, num_nodes=0 if drafted is None else drafted.shape[1], draft_tokens=address(INT, drafted),
            draft_parents=address(INT, parents), draft_depths=address(INT, depths), out_tokens=tokens.data_ptr(),
            source=moves, target=moves + 8 * batch * columns, out_logprobs=logprobs.data_ptr(), num_drawn=num_drawn.data_ptr())
        return SampledTokens(tokens, logprobs, None, num_drawn, tokens, tokens)  # source = target: nothing is left to move

    def _room_for_moves(self, count: int) -> int:
        """Address of two times so many cache indices."""
        if len(self._moves) < 2 * count:
            self._moves = torch.empty(4 * count, dtype=INT)
        return self._moves.data_ptr()

    def _lay_out(self, copies: Weights, long_segment: int) -> None:
        of, room, rows = self.of, self._room, "num_rows"
        line = {name: part.data_ptr() for name, part in zip(INPUT_LINES, self.block, strict=True)}
        segments = dict(zip(SEGMENT_WORDS, (part.data_ptr() for part in room["segments"]), strict=True))
        tokens, positions, write = (part.data_ptr() for part in room["rows"])
        tree = {name: line[name] for name in ("first", "request", "node", "forced")}
        self._program.add("flatten_drafts", INT, **tree, tokens="draft_tokens", parents="draft_parents", depths="draft_depths",
                          draft=line["draft"], row_tokens=line["tokens"], row_parents=line["parents"], row_depths=line["depths"],
                          mask=line["mask"], num_rows=rows, num_nodes="num_nodes", max_depth="max_depth")
        self._add_build_rows(line, tree, segments)
        self._calls = DecoderCalls(self._program, of.weights, of.caches, of.capture, copies, self.max_rows, long_segment)
        self._calls.add(DecoderRowNames(rows, tokens, positions, write, "num_pairs", "num_requests", line["mask"]),
                        of.cos.data_ptr(), of.sin.data_ptr(), room["final"].data_ptr(), segments)
        self._add_stores(tokens, write)
        self._calls.add_product(of.head, None, room["final"].data_ptr(), room["logits"].data_ptr(), rows)
        self._add_sampling()
        self._add_verify(line)

    def _add_build_rows(self, line: dict[str, int], tree: dict[str, int], segments: dict[str, int]) -> None:
        room, slots = self._room, self.of.slots
        tokens, positions, write = (part.data_ptr() for part in room["rows"])
        state = {name: address(dtype, getattr(slots, name)) for name, dtype in _STATE.items()}
        self._program.add("build_rows", INT, **tree, **state, **segments, **self._sampling("row_"), slots=line["slots"],
                          depths=line["depths"], tokens=line["tokens"], length=line["length"], sampled=0, row_tokens=tokens,
                          positions=positions, write=write, num_rows="num_rows", num_requests="num_requests",
                          num_sampled="num_rows", page_size=slots.page_size, table_columns=slots.page_table.shape[1])

    def _add_stores(self, tokens: int, write: int) -> None:
        """Append the calls that store the rows' tokens and captured features at their places in the cache."""
        of, final = self.of, self._room["final"]
        self._program.add("scatter_rows", INT, x=tokens, index=write, out=address(INT, of.tokens), num_rows="num_rows", width=1,
                          stride=1)
        if of.features is None:
            return
        width, size = final.shape[1], final.element_size()
        for number, layer in enumerate(of.capture):
            kept = final if layer == -1 else self._calls.kept[layer]
            self._program.add("scatter_rows", final.dtype, x=kept.data_ptr(), index=write,
                              out=of.features.data_ptr() + number * width * size, num_rows="num_rows", width=width,
                              stride=of.features.stride(0))

    def _add_sampling(self) -> None:
        room = self._room
        self._program.add("sample", room["logits"].dtype, logits=room["logits"].data_ptr(), num_rows="num_rows",
                          vocab=room["logits"].shape[1], token=room["sampled"].data_ptr(), given=0,
                          logprob=room["logprobs"].data_ptr(), **self._sampling())

    def _add_verify(self, line: dict[str, int]) -> None:
        of, room, what = self.of, self._room, self.of.movable
        assert isinstance(what, Movable)
        state = {name: address(_STATE[name], getattr(of.slots, name)) for name in ("context", "last_token", "page_table")}
        tree = {name: line[name] for name in ("slots", "first", "length", "forced", "sample", "tokens", "parents")}
        self._program.add("verify", INT, **tree, **state, sampled=room["sampled"].data_ptr(),
                          logprobs=room["logprobs"].data_ptr(), raw=0, out_tokens="out_tokens", out_logprobs="out_logprobs",
                          out_raw=0, num_drawn="num_drawn", source="source", target="target", num_requests="num_requests",
                          num_rows="num_rows", num_sampled="num_rows", num_columns="num_columns",
                          padding_slot=len(of.slots.context) - 1, page_size=of.slots.page_size,
                          table_columns=of.slots.page_table.shape[1], wide_logprobs=self._acc == torch.float64, wide_raw=0)
        self._program.add("move_tokens", INT, tensors=address(INT, what.places), sizes=address(INT, what.sizes), source="source",
                          target="target", num_tensors=len(what.tensors), num_lines="num_requests", num_columns="num_columns")

    def _sampling(self, prefix: str = "") -> dict[str, int]:
        """The sampling parameters of the rows: `prefix` as `build_rows` has it, none as `sample` does."""
        seed, position = (part.data_ptr() for part in self._room["sampling"])
        temperature, top_p, min_p = (part.data_ptr() for part in self._room["filters"])
        return {f"{prefix}seed": seed, "next_position" if prefix else "position": position, f"{prefix}temperature": temperature,
                f"{prefix}top_p": top_p, f"{prefix}min_p": min_p, f"{prefix}top_k": self._room["top_k"].data_ptr()}


_STATE = {"context": INT, "last_token": INT, "seed": INT, "temperature": REAL, "top_k": HALF, "top_p": REAL, "min_p": REAL,
          "page_table": HALF}
"""The fields of `SlotTensors` that a step reads."""
