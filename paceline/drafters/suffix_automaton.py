"""A generalised suffix automaton in flat arrays: all substrings of several growing texts, and how often each token followed them.

It is our own because the suffix drafter needs the exact counts of all continuations of a context, to rank them together with the
policy's sampling noise; suffix trees of speculative decoding libraries return finished drafts only.

A state is a set of substrings that end at the same positions; its suffix link leads to the longest suffix that also ends
elsewhere. A text is extended from the state of the whole text (`last`), so several texts can grow in turns and share a prefix.
Counts are kept on edges: count(u, c) is how often the strings of state u were followed by token c, which is the number of end
positions of the edge's target. They are exact for the `COUNT_HOPS` longest suffixes of every position.

Only the compiled functions that Python calls are cached on disk, with one signature each: two processes that store a second
signature at the same time can confuse the two.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.jit_cache import cached_njit

LEN, LINK, HEAD = 0, 1, 2  # columns of `states`: longest string's length, suffix link (-1 at the root), first edge (-1: none)
# Columns of `edges`; NEXT and PREV link the edges of one state, the most recently used one first.
STATE, TOKEN, TARGET, NEXT, PREV, COUNT = 0, 1, 2, 3, 4, 5
NUM_STATES, NUM_EDGES = 0, 1  # entries of `sizes`
ROOT = 0
COUNT_HOPS = 32
"""Number of suffixes of a new position whose counts are updated. It is bounded because a text like aaaa... has as many
suffixes with states of their own as it has tokens."""

_GROWTH = 1.5
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiplicative hashing


class SuffixAutomaton:
    """The automaton's arrays, which grow by half when they are full. The hash table maps (state, token) to the index of the edge;
    the key is stored in the edge only."""

    def __init__(self, num_tokens: int = 64) -> None:
        """num_tokens: Expected number of tokens of all texts."""
        num_tokens = max(16, num_tokens)
        self.states = np.empty((num_tokens * 3 // 2 + 2, 3), dtype=np.int32)
        self.edges = np.empty((num_tokens * 2, 6), dtype=np.int32)
        self.table = _empty_table(len(self.edges))
        self.sizes = np.array([1, 0], dtype=np.int64)
        self.states[ROOT] = (0, -1, -1)
        self.nbytes = self._measure()
        """Size of the arrays in bytes."""

    def extend(self, last: int, tokens: NDArray[np.int32]) -> int:
        """Appends tokens to the text whose state is `last` (ROOT for a new text). Returns the text's new state."""
        lasts = np.array([last])
        self.extend_all(lasts, np.zeros(1, np.int64), np.array([len(tokens)]), tokens)
        return int(lasts[0])

    def extend_all(self, lasts: NDArray[np.int64], which: NDArray[np.int64], ends: NDArray[np.int64], tokens: NDArray[np.int32],
                   done: int = 0) -> None:
        """Appends tokens to several texts and updates their states in place.

        Args:
            lasts: States of all texts.
            which: Indices into `lasts` of the texts to extend.
            ends: For each of them, where its part of `tokens` ends; it starts where the previous one's ends.
            tokens: Tokens of all of them, concatenated.
            done: Where the first one's part starts.
        """
        end = int(ends[-1])
        while done < end:
            done = _extend(self.states, self.edges, self.table, self.sizes, lasts, which, ends, tokens, done)
            if done < end:
                self._grow()

    def _grow(self) -> None:
        num_states, num_edges = int(self.sizes[NUM_STATES]), int(self.sizes[NUM_EDGES])
        if num_states + 2 > len(self.states):
            self.states = _enlarged(self.states, num_states)
        else:
            self.edges = _enlarged(self.edges, num_edges)
            self.table = _empty_table(len(self.edges))
            _fill_table(self.edges, self.table, num_edges)
        self.nbytes = self._measure()

    def _measure(self) -> int:
        return self.states.nbytes + self.edges.nbytes + self.table.nbytes + self.sizes.nbytes


def _enlarged(rows: NDArray[np.int32], used: int) -> NDArray[np.int32]:
    larger = np.empty((int(len(rows) * _GROWTH) + 64, rows.shape[1]), dtype=rows.dtype)
    larger[:used] = rows[:used]
    return larger


def _empty_table(num_edges: int) -> NDArray[np.int32]:
    """Returns a hash table for this many edges that is at most two thirds full."""
    return np.full(1 << (num_edges * 3 // 2).bit_length(), -1, dtype=np.int32)


@njit
def _slot(table, state, token):
    key = (np.uint64(state) << np.uint64(32)) | np.uint64(token)
    return np.int64(((key * np.uint64(_GOLDEN)) >> np.uint64(32)) & np.uint64(len(table) - 1))


@cached_njit()
def _fill_table(edges, table, num_edges):
    for edge in range(num_edges):
        _enter(edges, table, edge)


@njit
def _enter(edges, table, edge):
    slot = _slot(table, edges[edge, STATE], edges[edge, TOKEN])
    while table[slot] >= 0:
        slot = (slot + 1) & (len(table) - 1)
    table[slot] = edge


@njit
def _find(edges, table, state, token):
    """Returns the index of the edge, or -1."""
    slot = _slot(table, state, token)
    while True:
        edge = table[slot]
        if edge < 0 or (edges[edge, STATE] == state and edges[edge, TOKEN] == token):
            return edge
        slot = (slot + 1) & (len(table) - 1)


@cached_njit()
def _extend(states, edges, table, sizes, lasts, which, ends, tokens, done):
    """Does the work of `extend_all` until the arrays are full. Returns the number of tokens inserted so far."""
    for text in range(len(which)):
        while done < ends[text]:
            last = _insert(states, edges, table, sizes, lasts[which[text]], tokens[done])
            if last < 0:
                return done
            lasts[which[text]] = last
            done += 1
    return done


@njit
def _insert(states, edges, table, sizes, last, token):
    """Appends one token. Returns the new state of the text, or -1 if the arrays are full."""
    # Only reads: count the suffixes of the text that were never followed by `token`, and find the longest one that was.
    missing, prefix, edge = 0, last, _find(edges, table, last, token)
    while edge < 0:
        missing += 1
        prefix = states[prefix, LINK]
        if prefix < 0:
            break
        edge = _find(edges, table, prefix, token)
    target, split, num_copied = -1, False, 0
    if edge >= 0:
        target = edges[edge, TARGET]
        split = states[target, LEN] != states[prefix, LEN] + 1
        if split:
            num_copied = _num_edges_of(states, edges, target) + 1
    if sizes[NUM_STATES] + 2 > len(states) or sizes[NUM_EDGES] + missing + num_copied > len(edges):
        return -1
    # Writes. New edges come before the split, because the state to be split may be one that just got an edge.
    new = -1
    if missing > 0:
        new = _add_state(states, sizes, states[last, LEN] + 1, ROOT)
        source = last
        for _ in range(missing):
            _add_edge(states, edges, table, sizes, source, token, new)
            source = states[source, LINK]
    suffix = target
    if split:
        suffix = _split(states, edges, table, sizes, target, states[prefix, LEN] + 1)
    if edge >= 0:
        _count(states, edges, table, prefix, token, target, suffix)
    if missing > 0:
        states[new, LINK] = max(suffix, ROOT)
    return new if missing > 0 else suffix


@njit
def _num_edges_of(states, edges, state):
    num, edge = 0, states[state, HEAD]
    while edge >= 0:
        num += 1
        edge = edges[edge, NEXT]
    return num


@njit
def _add_state(states, sizes, length, link):
    state = sizes[NUM_STATES]
    sizes[NUM_STATES] += 1
    states[state, LEN] = length
    states[state, LINK] = link
    states[state, HEAD] = -1
    return state


@njit
def _add_edge(states, edges, table, sizes, state, token, target):
    edge = sizes[NUM_EDGES]
    sizes[NUM_EDGES] += 1
    edges[edge, STATE] = state
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, COUNT] = 1
    _push_front(states, edges, state, edge)
    _enter(edges, table, edge)


@njit
def _push_front(states, edges, state, edge):
    head = states[state, HEAD]
    edges[edge, NEXT] = head
    edges[edge, PREV] = -1
    if head >= 0:
        edges[head, PREV] = edge
    states[state, HEAD] = edge


@njit
def _split(states, edges, table, sizes, state, length):
    """Splits off a new state for the strings of `state` up to `length`, which are about to end where the longer ones do not. It
    gets copies of the state's edges with the same counts."""
    short = _add_state(states, sizes, length, states[state, LINK])
    states[state, LINK] = short
    tail, original = -1, states[state, HEAD]
    while original >= 0:
        edge = sizes[NUM_EDGES]
        sizes[NUM_EDGES] += 1
        edges[edge] = edges[original]
        edges[edge, STATE] = short
        edges[edge, PREV] = tail
        edges[edge, NEXT] = -1
        if tail < 0:
            states[short, HEAD] = edge
        else:
            edges[tail, NEXT] = edge
        _enter(edges, table, edge)
        tail, original = edge, edges[original, NEXT]
    return short


@njit
def _count(states, edges, table, prefix, token, target, suffix):
    """Counts one more `token` after `prefix` and its suffixes. Their edges that led to `target` lead to `suffix` from now on."""
    hops = 0
    while prefix >= 0:
        edge = _find(edges, table, prefix, token)
        redirect = target != suffix and edges[edge, TARGET] == target
        if hops >= COUNT_HOPS and not redirect:
            return
        if redirect:
            edges[edge, TARGET] = suffix
        edges[edge, COUNT] += 1
        if states[prefix, HEAD] != edge:
            following, previous = edges[edge, NEXT], edges[edge, PREV]
            edges[previous, NEXT] = following
            if following >= 0:
                edges[following, PREV] = previous
            _push_front(states, edges, prefix, edge)
        prefix = states[prefix, LINK]
        hops += 1
