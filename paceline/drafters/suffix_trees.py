"""The suffix drafter's compiled functions: they grow draft trees from an automaton and learn how reliable its counts are."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.drafters.suffix_automaton import COUNT, HEAD, LEN, LINK, NEXT, TARGET, TOKEN
from paceline.jit_cache import cached_njit
from paceline.kernels.cpu.jit.noise import gumbel_from_bits, philox

MAX_EDGES = 32
"""Number of continuations considered per context: the most recently used ones."""
MAX_BACKOFF_HOPS = 32
"""Number of suffix links followed in search of a context that has continuations."""

# Reliability, which turns shares of counts into acceptance probabilities, is learned per match length (capped at _MAX_MATCH) and
# number of occurrences of the context (1, 2-3, 4-7, 8 and more).
_MAX_MATCH, _NUM_TOTALS = 16, 4
_PRIOR_TRIALS, _MAX_TRIALS = 4.0, 256.0
NUM_TRACKED = 8  # depth-1 predictions remembered per request, to be compared with the token that is sampled
_SHARE_UNIT = 2.0**-30

# The compiled functions take few arrays, because each argument adds about 0.2 us to a call.
SLOT, BUDGET, SEED, POSITION, SAMPLED = 0, 1, 2, 3, 4  # lines of `queries` [5, B] int64
TOKENS, PARENTS, DEPTHS = 0, 1, 2  # `nodes` [3, B, N] int64
_HITS, _EXPECTED = 0, 1  # `reliability` [lengths, occurrences, 2]: hits, and the summed shares of the predictions
_MATCH, _TOTAL, NUM_PREDICTED, _SHARE, FIRST_PREDICTED = 0, 1, 2, 3, 4  # `tracked` [slots, 4 + NUM_TRACKED] int32, of depth 1


def initial_reliability() -> NDArray[np.float64]:
    """Returns the initial reliability, which rises with the match length: 0.15, 0.33, 0.46, 0.58 ... 0.97."""
    prior = 1.0 - 0.85 * 2.0 ** (-(np.arange(_MAX_MATCH + 1.0) - 1.0) / 3.0)
    reliability = np.full((_MAX_MATCH + 1, _NUM_TOTALS, 2), _PRIOR_TRIALS)
    reliability[:, :, _HITS] *= np.clip(prior, 0.05, 1.0)[:, None]
    return reliability


@cached_njit()
def update_reliability(reliability, tracked, slots, ends, tokens):
    """Compares the first token that each slot got with its predictions."""
    begin = 0
    for slot, end in zip(slots, ends):  # noqa: B905 (numba does not support `strict`)
        prediction = tracked[slot]
        if begin < end and prediction[NUM_PREDICTED] > 0:
            outcome = reliability[prediction[_MATCH], prediction[_TOTAL]]
            outcome[_EXPECTED] += prediction[_SHARE] * _SHARE_UNIT
            for i in range(prediction[NUM_PREDICTED]):
                if prediction[FIRST_PREDICTED + i] == tokens[begin]:
                    outcome[_HITS] += 1.0
            if outcome[_EXPECTED] > _MAX_TRIALS:  # decay, because the policy changes
                outcome *= 0.5
            prediction[NUM_PREDICTED] = 0
        begin = end


@njit
def _gumbel(seed, position, token):
    """The noise G(seed, position, token) as `paceline.kernels.noise` defines it."""
    x0, x1, x2, x3 = philox(np.uint32(token >> 2), np.uint32(position), np.uint32(seed), np.uint32(seed >> np.uint64(32)))
    low, high = (x1 if token & 1 else x0), (x3 if token & 1 else x2)
    return gumbel_from_bits(high if token & 2 else low)


@cached_njit()
def grow_trees(states, edges, lasts, queries, first, end, depth, width, tau, min_match, min_survival, reliability, tracked, nodes,
               survival, count):
    """Grows the trees of the requests first..end, which share a prompt: repeatedly takes the most likely candidate and adds its
    children as candidates."""
    edge_of, share_of = np.empty(MAX_EDGES, np.int64), np.empty(MAX_EDGES, np.float64)
    width = min(width, MAX_EDGES)
    candidate_survival = np.empty(width * (nodes.shape[2] + 1), np.float64)
    candidate_edge, candidate_parent, candidate_match = np.empty((3, len(candidate_survival)), np.int64)
    for row in range(first, end):
        query = queries[:, row]
        state, noise_scale = lasts[query[SLOT]], tau * query[SAMPLED]
        node, level, match, reached, num_candidates = -1, 0, np.int64(states[state, LEN]), 1.0, 0
        tracked[query[SLOT], NUM_PREDICTED] = 0
        while True:
            if level < depth:
                state, match = _context(states, state, match, min_match)
                if state >= 0:
                    num, total = _rank(states, edges, state, width, noise_scale, np.uint64(query[SEED]),
                                       query[POSITION] + level, edge_of, share_of)
                    length, occurrences = min(match, _MAX_MATCH), _occurrences(total)
                    if level == 0:
                        _track(tracked[query[SLOT]], length, occurrences, edges, edge_of, share_of, num)
                    trust = reliability[length, occurrences, _HITS] / reliability[length, occurrences, _EXPECTED]
                    for i in range(num):
                        chance = reached * min(1.0, trust * share_of[i])
                        if chance < min_survival:
                            break  # shares are in descending order
                        candidate_survival[num_candidates], candidate_edge[num_candidates] = chance, edge_of[i]
                        candidate_parent[num_candidates], candidate_match[num_candidates] = node, match + 1
                        num_candidates += 1
            if num_candidates == 0 or node + 1 >= query[BUDGET]:
                break
            best = np.argmax(candidate_survival[:num_candidates])
            node += 1  # nodes are numbered in the order in which they are taken
            reached, edge = candidate_survival[best], candidate_edge[best]
            parent, match = candidate_parent[best], candidate_match[best]
            num_candidates -= 1
            candidate_survival[best], candidate_edge[best] = candidate_survival[num_candidates], candidate_edge[num_candidates]
            candidate_parent[best], candidate_match[best] = candidate_parent[num_candidates], candidate_match[num_candidates]
            state, level = edges[edge, TARGET], 1 if parent < 0 else nodes[DEPTHS, row, parent] + 1
            nodes[TOKENS, row, node], nodes[PARENTS, row, node] = edges[edge, TOKEN], parent
            nodes[DEPTHS, row, node], survival[row, node] = level, reached
        count[row] = node + 1


@njit
def _context(states, state, match, min_match):
    """Returns the state of the longest suffix that was followed by a token, and its length; -1 if none has `min_match` tokens."""
    for _ in range(MAX_BACKOFF_HOPS):
        if match < min_match:
            break
        if states[state, HEAD] >= 0:
            return state, match
        state = states[state, LINK]
        match = np.int64(states[state, LEN])
    return -1, match


@njit
def _rank(states, edges, state, width, noise_scale, seed, position, edge_of, share_of):
    """Ranks the continuations of a context and fills in the best `width` of them with their shares, best first. Returns their
    number and the number of occurrences of the context.

    Without noise they are ranked by count, with share = count / total. With noise they are ranked by
    z = log(count / total) / tau + G, with share = softmax(z)."""
    num, total, edge = 0, 0, states[state, HEAD]
    while edge >= 0 and num < MAX_EDGES:
        edge_of[num], share_of[num] = edge, edges[edge, COUNT]
        total += edges[edge, COUNT]
        num += 1
        edge = edges[edge, NEXT]
    norm = float(total)
    if noise_scale > 0.0 and num > 1:
        largest = -math.inf
        for i in range(num):
            noise = _gumbel(seed, position, edges[edge_of[i], TOKEN])
            share_of[i] = math.log(share_of[i] / total) / noise_scale + noise
            largest = max(largest, share_of[i])
        norm = 0.0
        for i in range(num):
            share_of[i] = math.exp(share_of[i] - largest)
            norm += share_of[i]
    num_best = min(num, width)
    for i in range(num_best):
        best = i
        for j in range(i + 1, num):
            if share_of[j] > share_of[best]:
                best = j
        edge_of[i], edge_of[best] = edge_of[best], edge_of[i]
        share_of[i], share_of[best] = share_of[best], share_of[i]
        share_of[i] /= norm
    return num_best, total


@njit
def _occurrences(total):
    """Returns the bucket of a number of occurrences: 1, 2-3, 4-7, 8 and more."""
    return 0 if total < 2 else 1 if total < 4 else 2 if total < 8 else 3


@njit
def _track(prediction, length, occurrences, edges, edge_of, share_of, num):
    """Remembers the predictions at depth 1, drafted or not, so that a context that was unreliable can become reliable again."""
    num, share = min(num, NUM_TRACKED), 0.0
    for i in range(num):
        prediction[FIRST_PREDICTED + i] = edges[edge_of[i], TOKEN]
        share += share_of[i]
    prediction[_MATCH], prediction[_TOTAL] = length, occurrences
    prediction[NUM_PREDICTED], prediction[_SHARE] = num, int(share / _SHARE_UNIT)
