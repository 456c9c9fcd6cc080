"""The arguments of every compiled kernel, by name.

A kernel is a C function of one pointer to a block of 8-byte words. This module is the one list of those words: the compiled
code reads the block as a numpy record of this type (`carray(block, 1, RMS_NORM)[0].eps`), and the caller packs it by the same
names (`call.run("rms_norm", ..., eps=1e-6)`). Words are int64 addresses or counts; names in `reals` are float64. An address of 0
means that the tensor is not there. Every block begins with `next_item`, the counter from which threads draw work items.
"""

from __future__ import annotations

import numpy as np

LAYOUTS: dict[str, np.dtype] = {}
"""Kernel name -> record type of its block."""

_SEGMENTS = "segment_row segment_length segment_slot segment_context segment_causal"
"""The tensors of `base.Segments` but the mask."""


def _layout(kernel: str, words: str, reals: str = "") -> np.dtype:
    names = ["next_item", *words.split()]
    real = set(reals.split())
    LAYOUTS[kernel] = np.dtype([(name, "f8" if name in real else "i8") for name in names])
    return LAYOUTS[kernel]


# -- matrix products, norms, activations, attention

LINEAR = _layout("linear", "x weight bias out num_rows depth width")
GATED_LINEAR = _layout("gated_linear", "x weight bias out num_rows depth width")
RMS_NORM = _layout("rms_norm", "x residual weight out total num_rows width eps", "eps")
SILU_MUL = _layout("silu_mul", "x out num_rows width")
ADD = _layout("add", "x y out num_rows width")
GATHER_ROWS = _layout("gather_rows", "table index out num_rows width stride out_stride")
SCATTER_ROWS = _layout("scatter_rows", "x index out num_rows width stride")
ROPE_WRITE = _layout("rope_write", "qkv q k v write cos sin positions q_norm k_norm num_rows num_heads num_kv_heads head_dim eps",
                     "eps")
ATTENTION = _layout("attention", "q out k v page_table table_columns page_size num_rows num_heads num_kv_heads head_dim scale "
                    f"window soft_cap sinks long_segment num_segments {_SEGMENTS} mask", "scale soft_cap")

# -- mixtures of experts

ROUTE = _layout("route", "logits shares chosen num_rows count active normalised")
SORT_PAIRS = _layout("sort_pairs", "chosen source place first num_rows count active")
GROUPED_LINEAR = _layout("grouped_linear", "x weight bias out first count depth width")
COMBINE = _layout("combine", "x shares place out num_rows active width")

# -- noise and sampling

GUMBEL = _layout("gumbel", "seed position token_ids num_rows vocab out")
SAMPLE = _layout("sample", "logits num_rows vocab token given logprob seed position temperature top_k top_p min_p")

# -- trees as rows

FLATTEN_DRAFTS = _layout("flatten_drafts", "tokens parents depths draft first request node forced row_tokens row_parents "
                         "row_depths mask num_rows num_nodes max_depth")
BUILD_ROWS = _layout("build_rows", "slots request node depths tokens first length forced sampled context last_token seed "
                     "temperature top_k top_p min_p page_table row_tokens positions write row_seed next_position row_temperature "
                     f"row_top_p row_min_p row_top_k {_SEGMENTS} num_rows num_requests num_sampled page_size table_columns")
VERIFY = _layout("verify", "slots first length forced sample tokens parents sampled logprobs raw context last_token page_table "
                 "out_tokens out_logprobs out_raw num_drawn source target num_requests num_rows num_sampled num_columns "
                 "padding_slot page_size table_columns wide_logprobs wide_raw")
MOVE_TOKENS = _layout("move_tokens", "tensors sizes source target num_tensors num_lines num_columns")

# -- the learned drafter

DRAFT_REQUESTS = _layout("draft_requests", "slots context last_token shared seed temperature out_context out_last_token "
                         "out_shared out_seed next_position out_temperature num_lines")
CATCH_UP_ROWS = _layout("catch_up_rows", "slots context last_token shared stored page_table request back counts tokens positions "
                        f"write mask {_SEGMENTS} num_rows num_lines least spare page_size table_columns")
DRAFT_INPUT = _layout("draft_input", "tokens embed state above input_norm hidden_norm both residual num_rows width eps", "eps")
DRAFT_TOPK = _layout("draft_topk", "logits seed position temperature draft_ids values columns logsumexp num_rows vocab k tau "
                     "tau_value", "tau_value")
ADD_CANDIDATES = _layout("add_candidates", "values columns logsumexp scores origin draft_ids tokens parents candidate_scores "
                         "num_lines num_nodes width first num_candidates wide_values shrink", "shrink")
SELECT_BEAM = _layout("select_beam", "tokens scores bits slots context seed temperature page_table row_tokens positions write "
                      f"above origin row_seed next_position mask row_temperature row_scores {_SEGMENTS} num_lines num_candidates "
                      "first num_nodes width depth page_size table_columns")
SELECT_NODES = _layout("select_nodes", "tokens parents scores out_tokens out_parents out_depths survival num_lines "
                       "num_candidates num_kept width")

# -- a list of calls

PROGRAM = _layout("program", "kernels blocks num_calls team_size yield_thread")
