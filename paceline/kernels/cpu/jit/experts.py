"""Mixtures of experts: the router's choice, rows sorted by expert, their products, and the weighted sum of a row's experts.

Every number is computed in an order that no other row has an influence on: products as in `matmul`, the experts of a row in the
order in which the router chose them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from paceline.kernels.cpu.arguments import COMBINE, GROUPED_LINEAR, ROUTE, SORT_PAIRS
from paceline.kernels.cpu.jit.base import inlined, int64s, next_item, pointer, size_of, to_acc, to_store
from paceline.kernels.cpu.jit.matmul import COLUMNS, ROWS, lanes_of_panel, panel_count, panel_product, rows_as_acc

_CHUNKS = 4
"""Work items of one expert's product, at most."""


@inlined
def route(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: a row. logits [R, E] -> the `active` largest [R, k] int64, and their weights [R, k] as `acc`."""
    a = carray(block, 1, ROUTE)[0]
    num_rows, count, active = a.num_rows, a.count, a.active
    logits = carray(pointer(a.logits), (num_rows, count), store)
    shares, chosen = carray(pointer(a.shares), (num_rows, active), acc), carray(pointer(a.chosen), (num_rows, active), np.int64)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        last, last_index = acc(np.inf), np.int64(-1)
        for j in range(active):
            best, best_index = acc(-np.inf), np.int64(-1)
            for e in range(count):
                value = to_acc(logits[row, e])
                if (value < last or (value == last and e > last_index)) and (value > best or best_index < 0):
                    best, best_index = value, e
            # Logits that are no numbers compare with nothing. Their weights are no numbers, whatever the expert.
            chosen[row, j] = best_index if best_index >= 0 else j
            last, last_index = best, best_index
        top, total = to_acc(logits[row, chosen[row, 0]]), acc(0)
        if a.normalised:
            for j in range(active):
                total += acc(math.exp(to_acc(logits[row, chosen[row, j]]) - top))
        else:
            for e in range(count):
                total += acc(math.exp(to_acc(logits[row, e]) - top))
        for j in range(active):
            shares[row, j] = acc(math.exp(to_acc(logits[row, chosen[row, j]]) - top)) / total


@inlined
def sort_pairs(block):  # type: ignore[no-untyped-def]
    """Sort the pairs of a row and one of its experts by expert: chosen [R, k] -> the row of every sorted pair, source [R k], the
    place of every pair among them, [R, k], and the first place of each expert [E + 1]. One thread does it."""
    a = carray(block, 1, SORT_PAIRS)[0]
    if next_item(block) > 0:
        return
    num_pairs, count, active = a.num_rows * a.active, a.count, a.active
    chosen, source, place = int64s(a.chosen, num_pairs), int64s(a.source, num_pairs), int64s(a.place, num_pairs)
    first = int64s(a.first, count + 1)
    for e in range(count + 1):
        first[e] = 0
    for p in range(num_pairs):
        first[chosen[p] + 1] += 1
    for e in range(count):
        first[e + 1] += first[e]
    for p in range(num_pairs):
        e = chosen[p]
        place[p] = first[e]
        source[first[e]] = p // active
        first[e] += 1
    for e in range(count, 0, -1):  # every entry has moved to the next one's beginning
        first[e] = first[e - 1]
    first[0] = 0


@inlined
def grouped_linear(block, store, acc):  # type: ignore[no-untyped-def]
    """x [P, K], sorted by expert, times the matrices [E, N, K] of their experts, laid out in panels -> [P, N]. Work item: some
    panels of an expert. Rows of an expert are those from first[e] to first[e + 1]."""
    a = carray(block, 1, GROUPED_LINEAR)[0]
    count, depth, width, lanes = a.count, a.depth, a.width, lanes_of_panel(acc)
    first, num_panels = int64s(a.first, count + 1), panel_count(width, lanes)
    chunk = max(1, (num_panels + _CHUNKS - 1) // _CHUNKS)
    matrix_bytes = (width + lanes - 1) // lanes * lanes * depth * size_of(store)
    scratch = np.empty(ROWS * COLUMNS * lanes, acc)
    item, claimed = 0, next_item(block)
    for e in range(count):
        num_rows = first[e + 1] - first[e]
        if num_rows == 0:
            continue
        for number in range(0, num_panels, chunk):
            if item == claimed:
                own = a.x + first[e] * depth * size_of(store)
                rows = rows_as_acc(own, num_rows * depth, store, acc)
                plain = a.bias == 0 and len(rows) == 0
                bias = carray(pointer(a.bias + e * width * size_of(store)), width, store)
                for panel in range(number, min(number + chunk, num_panels)):
                    panel_product(panel, rows.ctypes.data if len(rows) else own, depth * size_of(acc),
                                  a.weight + e * matrix_bytes, a.bias != 0, bias, a.out + first[e] * width * size_of(store),
                                  width * size_of(store), num_rows, depth, width, plain, scratch, store, acc)
                if len(rows):
                    rows[0] = acc(0)  # it lives until here
                claimed = next_item(block)
            item += 1
    scratch[0] = acc(0)


@inlined
def combine(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: a row. out [R, N] = sum over its experts j of shares[j] * x[place[j]], in their order."""
    a = carray(block, 1, COMBINE)[0]
    num_rows, active, width = a.num_rows, a.active, a.width
    shares, place = carray(pointer(a.shares), (num_rows, active), acc), carray(pointer(a.place), (num_rows, active), np.int64)
    out = carray(pointer(a.out), (num_rows, width), store)
    total = np.empty(width, acc)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        for i in range(width):
            total[i] = acc(0)
        for j in range(active):
            source = carray(pointer(a.x + place[row, j] * width * size_of(store)), width, store)
            share = shares[row, j]
            for i in range(width):
                total[i] += share * to_acc(source[i])
        for i in range(width):
            out[row, i] = to_store(total[i], store)
