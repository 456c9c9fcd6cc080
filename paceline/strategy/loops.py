"""The loops over drafted nodes, compiled: a look or a decision is made of many small arrays, for each of which numpy takes longer
to be called than to compute. Of what is compiled each function has one signature and is kept on disk.

nodes: [4, M] int64 line (in order), parent (-1: the root; before its children), depth and rank, as in `Watched`.
"""
# Compiled, not run, by Python:
# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.jit_cache import cached_njit

DEPTHS, RANKS, GAPS = 8, 4, 8
EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Of the drafter's own estimates: how far ahead of the rest a guess is."""
BANDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
"""From which estimate on, that a node is accepted, parents and all."""
TRUST = 4.0
"""Nodes that the drafter's own estimate counts as."""
KEEP_NODES = 2000.0
OF_ALL = 16.0
"""Lines that what is known of all requests counts as for those of one quality."""


@njit
def _bin(depth, rank, chance):
    gap = 0
    while gap < GAPS - 1 and EDGES[gap] < chance:
        gap += 1
    return ((min(depth, DEPTHS) - 1) * RANKS + min(rank, RANKS - 1)) * GAPS + gap


@njit
def _chance(table, place, own):
    return (table[1, place] + TRUST * own) / (table[0, place] + TRUST)


@cached_njit()
def learn_outcomes(nodes, chance, tested, hit, table, bands, keep_bands):
    """What came of nodes: into `table` [2, bins] tested and accepted ones, `bands` [2, bands] all and accepted ones by the
    drafter's own estimate. Returns how many were tested, should have been accepted by what was known, and were."""
    _, parent, depth, rank = nodes
    count, expected = tested.sum(), 0.0
    for node in range(len(depth)):
        if tested[node]:
            expected += _chance(table, _bin(depth[node], rank[node], chance[node]), chance[node])
    if count > 0:
        table *= max(0.5, 1 - count / KEEP_NODES)
    bands *= min(max(0.5, 1 - len(depth) / KEEP_NODES), keep_bands)
    own = chance.copy()
    for node in range(len(depth)):
        if parent[node] >= 0:
            own[node] *= own[parent[node]]
        band = len(BANDS) - 1
        while own[node] < BANDS[band] and band > 0:
            band -= 1
        bands[0, band] += 1
        bands[1, band] += hit[node]
        place = _bin(depth[node], rank[node], chance[node])
        table[0, place] += tested[node]
        table[1, place] += hit[node]
    return count, expected, hit.sum()


@cached_njit()
def survival_of(nodes, chance, table):
    """[M] the chance that each node is accepted."""
    _, parent, depth, rank = nodes
    found = np.empty(len(depth))
    for node in range(len(depth)):
        found[node] = _chance(table, _bin(depth[node], rank[node], chance[node]), chance[node])
        if parent[node] >= 0:
            found[node] *= found[parent[node]]
    return found


@cached_njit()
def add_lines(nodes, survival, quality, budget, shapes, keep, sums):
    """Adds nodes of the first lines, whose qualities [L] are given, to sums [3, S, Q, N] (lines that might have an n-th node,
    that have one, its chance) of each shape [S, 2] that holds them, the likeliest of a line first. budget: a line that does not
    have so many nodes has no more; 0: nothing is known of more. keep: of what the sums were; shapes of depth 0 are left alone."""
    line, parent, depth, rank = nodes
    survival = np.maximum(survival, 1e-9)
    wide = rank.copy()  # the largest rank on a node's path: a narrower tree would not hold it
    count = np.searchsorted(line, len(quality))
    order = np.empty(count, np.int64)
    for node in range(count):
        if parent[node] >= 0:
            wide[node] = max(wide[node], wide[parent[node]])
        place = node  # by insertion: they are nearly in order
        while place > 0 and line[order[place - 1]] == line[node] and survival[order[place - 1]] < survival[node]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = node
    for s in range(len(shapes)):
        if shapes[s, 0] == 0:
            continue
        sums[:, s] *= keep
        for q in quality:
            sums[0, s, q, :budget] += 1
        place, last = 0, -1
        for node in order:
            if depth[node] > shapes[s, 0] or wide[node] >= shapes[s, 1]:
                continue
            if line[node] != last:
                place, last = 0, line[node]
            if place < sums.shape[3]:
                sums[0, s, quality[last], place] += place >= budget
                sums[1, s, quality[last], place] += 1
                sums[2, s, quality[last], place] += survival[node]
            place += 1


@cached_njit()
def means_of(sums, most):
    """[S, Q, most] survival and present, as in `Gain`, of sums as in `add_lines`."""
    survival, present = np.zeros((2, *sums.shape[1:3], most))
    for s in range(len(survival)):
        for n in range(most):
            lines, nodes, chances = sums[0, s, :, n].sum(), sums[1, s, :, n].sum(), sums[2, s, :, n].sum()
            if nodes == 0:
                break
            for q in range(sums.shape[2]):
                own = sums[1, s, q, n] + OF_ALL * nodes / lines
                survival[s, q, n] = (sums[2, s, q, n] + OF_ALL * chances / lines) / max(own, 1e-12)
                if n > 0:
                    survival[s, q, n] = min(survival[s, q, n], survival[s, q, n - 1])
                share = own / (sums[0, s, q, n] + OF_ALL)
                present[s, q, n] = share if share > 1e-6 else 0.0
    return survival, present


@cached_njit()
def as_now(survival, newest):
    """A larger shape is seen less often than the first node of all [Q]: what that has gained or lost meanwhile, the others
    [S, Q, N] have too, as powers of it."""
    for s in range(len(survival)):
        for q in range(len(newest)):
            then, now = np.log(min(max(survival[s, q, 0], 1e-3), 0.999)), np.log(min(max(newest[q], 1e-3), 0.999))
            power = min(max(now / then, 0.2), 5.0)
            for n in range(survival.shape[2]):
                if survival[s, q, n] == 0:
                    break
                survival[s, q, n] **= power


@njit
def _at(rows, x, y, slope, sizes):
    """ms of rows: `CostCurve.policy` at what they are padded to."""
    if len(sizes) > 0 and rows <= sizes[-1]:
        rows = sizes[np.searchsorted(sizes, rows)]
    if rows >= x[-1]:
        return y[-1] + (rows - x[-1]) * slope
    after = np.searchsorted(x, rows)
    if after == 0:
        return y[0]
    share = (rows - x[after - 1]) / (x[after] - x[after - 1])
    return y[after - 1] + share * (y[after] - y[after - 1])


@cached_njit()
def best_nodes(hoped, hoped_present, survival, present, counts, batch, most, max_rows, fixed, per_row, factor, x, y,
               slope, sizes):
    """Of each shape, nodes in the order of `hoped`, as many as give the most tokens per ms. hoped, survival and how many are
    present [S, Q, N]: as looks have shown and as it came lately; counts [Q] requests; most, fixed [S] nodes of each, ms beside
    those of rows. Returns [S, 6] as in `Option`, the rate 0 where there is no node, and [S, Q] nodes of a request."""
    figures, shares = np.zeros((len(hoped), 6)), np.zeros((len(hoped), len(counts)), np.int64)
    for s in range(len(hoped)):
        end = min(most[s], hoped.shape[2])  # what no look has shown is not there
        taken, place = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
        more_rows = more_tokens = hopes = rate = first_rows = first_ms = last_rows = last_ms = least = 0.0
        while True:
            q = -1
            for other in range(len(counts)):
                while place[other] < end and present[s, other, place[other]] * counts[other] <= 0:
                    place[other] += 1
                if place[other] < end and (q < 0 or hoped[s, other, place[other]] > hoped[s, q, place[q]]):
                    q = other
            if q < 0:
                break
            n = place[q]
            weight = present[s, q, n] * counts[q]
            more_rows += weight
            rows = batch + more_rows
            if rows > max_rows:
                break
            place[q] += 1
            taken[q] += 1
            more_tokens += survival[s, q, n] * weight
            hopes += hoped[s, q, n] * hoped_present[s, q, n] * counts[q]
            last_rows, last_ms = rows, (_at(rows, x, y, slope, sizes) + fixed[s] + per_row * rows) * factor
            if first_ms == 0:
                first_rows, first_ms = last_rows, last_ms
            if (batch + more_tokens) / last_ms > rate:
                rate, least = (batch + more_tokens) / last_ms, survival[s, q, n]
                figures[s, 0], figures[s, 1], figures[s, 2], figures[s, 3] = rate, batch + more_tokens, last_ms, rows
                figures[s, 4] = hopes
                shares[s] = taken
        price = min(rate * (last_ms - first_ms) / max(last_rows - first_rows, 1.0), least)
        figures[s, 5] = price
        # Of whom nobody is now get some, too: requests change their quality before the next decision. The last node taken is
        # often the price, and qualities not told apart yet differ by rounding only.
        for other in range(len(counts)):
            if counts[other] == 0:
                shares[s, other] = ((survival[s, other] > price - 1e-9) & (present[s, other] > 1e-6)).sum()
    return figures, shares
