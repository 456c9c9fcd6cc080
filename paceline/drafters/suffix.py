"""The suffix drafter: it drafts what followed the longest suffix of a text when that suffix occurred before.

The history of a request is its prompt, the other answers of its group and earlier rollouts of the same prompt, or, with a shared
history, everything generated before. There is one suffix automaton per distinct prompt. Accepted tokens are inserted as they
come, so the state to draft from is always at hand and the cost per token does not grow with the history.

It is our own rather than a library's suffix tree because continuations are ranked by their counts together with the noise that
the policy will sample with, which needs all counts of a context and not a finished draft. `benchmarks/cpu/suffix_vs_arctic.py`
compares it with arctic-inference's suffix decoding.

The drafter owns its texts and automata. It knows nothing of the policy, the engine or torch tensors.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.drafters.suffix_automaton import COUNT, HEAD, LEN, LINK, NEXT, ROOT, TARGET, TOKEN, SuffixAutomaton
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
_NUM_TRACKED = 8  # depth-1 predictions remembered per request, to be compared with the token that is sampled
_SHARE_UNIT = 2.0**-30
_PROMPT_BYTES, _TEXT_BYTES = 1280, 192  # Python objects per prompt and per text, as tracemalloc counts them
_MIN_TOKENS = 16  # texts of active requests are never cut to fewer tokens

# The compiled functions take few arrays, because each argument adds about 0.2 us to a call. Columns of
_ROW, _LAST, _SLOT, _BUDGET, _SEED, _POSITION, _SAMPLED = 0, 1, 2, 3, 4, 5, 6  # `queries` [B, 7] int64
_TOKENS, _PARENTS, _DEPTHS = 0, 1, 2  # `nodes` [3, B, N] int32
_HITS, _EXPECTED = 0, 1  # `reliability` [lengths, occurrences, 2]: hits, and the summed shares of the predictions
_MATCH, _TOTAL, _COUNT, _SHARE, _FIRST = 0, 1, 2, 3, 4  # `tracked` [slots, 4 + _NUM_TRACKED] int32: depth-1 predictions


class SuffixDrafts(NamedTuple):
    """Draft trees of a batch. The first `num_nodes` columns of a row are its nodes, most likely first, parents before their
    children."""

    tokens: NDArray[np.int64]  # [B, N]
    parents: NDArray[np.int32]  # [B, N] column of the parent in the same row, -1 for children of the root
    depths: NDArray[np.int32]  # [B, N] 1 for children of the root
    survival: NDArray[np.float32]  # [B, N] estimated probability that the node is accepted
    num_nodes: NDArray[np.int32]  # [B]


class _Text:
    """One answer. `slot` is the index of its state and its predictions while the request is active, -1 afterwards. `after_prompt`
    tells that it continues the prompt, as its beginning was not dropped."""

    __slots__ = ("after_prompt", "slot", "tokens")

    def __init__(self, slot: int) -> None:
        self.tokens, self.slot, self.after_prompt = array("i"), slot, True


class _Prompt:
    """One distinct prompt: its tokens, its answers (finished ones oldest first) and the automaton over all of them."""

    __slots__ = ("active", "automaton", "end", "finished", "key", "nbytes", "num_tokens", "tokens")

    def __init__(self, key: bytes) -> None:
        self.key, self.tokens, self.end, self.automaton = key, array("i", key), ROOT, SuffixAutomaton(2 * len(key) // 4)
        self.active: dict[int, _Text] = {}
        self.finished: list[_Text] = []
        self.num_tokens = self.nbytes = 0  # `nbytes`: as last measured

    def measure(self) -> int:
        """Returns the size in bytes."""
        num_texts = len(self.active) + len(self.finished)
        return self.automaton.nbytes + len(self.key) + 4 * self.num_tokens + _PROMPT_BYTES + _TEXT_BYTES * num_texts


class SuffixDrafter:
    """Drafts from repetitions in the history of each prompt."""

    def __init__(self, max_bytes: int = 1 << 28, max_tokens_per_prompt: int = 262_144, min_match: int = 1,
                 min_survival: float = 0.2, shared: bool = False) -> None:
        """Creates a drafter without history.

        Args:
            max_bytes: Largest size of the history, of all prompts together. A token takes about 130 bytes. Texts of active
                requests are cut to stay within it, but keep their last tokens.
            max_tokens_per_prompt: Largest number of tokens kept per prompt.
            min_match: Length of the shortest suffix to draft from.
            min_survival: Nodes that are less likely to be accepted are not drafted.
            shared: Whether all prompts share one history, for tasks whose answers resemble each other. `max_tokens_per_prompt`
                then bounds the shared history.
        """
        for name, value in (("max_bytes", max_bytes), ("max_tokens_per_prompt", max_tokens_per_prompt),
                            ("min_match", min_match)):
            if value < 1:
                raise ValueError(f"{name}: {value} must be an integer >= 1")
        if not 0.0 <= min_survival <= 1.0:
            raise ValueError(f"min_survival: {min_survival} must be in [0, 1]")
        self.max_bytes, self.max_tokens_per_prompt = max_bytes, max_tokens_per_prompt
        self.min_match, self.min_survival, self.shared = min_match, min_survival, shared
        self.clear()

    def clear(self) -> None:
        """Forgets all texts, those of active requests included, and the learned reliability."""
        self._prompts: dict[bytes, _Prompt] = {}
        self._idle: OrderedDict[bytes, _Prompt] = OrderedDict()  # without active requests, least recently used first
        self._by_request: dict[int, tuple[_Prompt, _Text]] = {}  # active requests
        self._free_slots: list[int] = []
        self._num_tokens = self._nbytes = 0
        self._reliability = _prior()
        self._tracked = np.zeros((0, _FIRST + _NUM_TRACKED), np.int32)
        self._last = np.zeros(0, np.int64)  # by slot: state of the whole text

    def __contains__(self, request_id: int) -> bool:
        """Returns whether a request is active."""
        return request_id in self._by_request

    @property
    def num_tokens(self) -> int:
        """Number of tokens kept."""
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Size of the history in bytes."""
        return self._nbytes

    def start(self, request_id: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Adds a request. generated: Tokens that it has already generated."""
        if request_id in self._by_request:
            raise ValueError(f"request_id: {request_id} is already active")
        if self.shared:
            prompt, generated = (), [*prompt, *generated]
        key = array("i", prompt).tobytes()
        entry = self._prompts.get(key)
        if entry is None:
            entry = self._prompts[key] = _Prompt(key)
        self._idle.pop(key, None)
        text = entry.active[request_id] = _Text(self._take_slot())
        self._by_request[request_id] = entry, text
        if entry.num_tokens == 0 and self._has_room(entry, len(entry.tokens)):
            entry.end = entry.automaton.extend(ROOT, np.frombuffer(entry.tokens, np.int32))
        self._last[text.slot] = entry.end
        self.extend(request_id, generated)

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """Appends accepted tokens of a request. The first one is compared with the last draft's predictions to learn their
        reliability."""
        self.extend_all({request_id: list(tokens)})

    def extend_all(self, accepted: Mapping[int, list[int]]) -> None:
        """Appends the accepted tokens of all requests of a step. The overhead of a compiled call exceeds its work, so consecutive
        requests of one prompt share a call."""
        if not accepted:
            return
        found = [self._by_request[request_id] for request_id in accepted]
        tokens = np.fromiter(chain.from_iterable(accepted.values()), np.int32)
        ends = np.cumsum(np.fromiter(map(len, accepted.values()), np.int64))
        slots = np.array([text.slot for _, text in found])
        _update_reliability(self._reliability, self._tracked, slots, ends, tokens)
        end, done, rest = 0, 0, iter(accepted.values())
        for entry, own in groupby(found, itemgetter(0)):
            first, before = end, done
            for _, text in own:
                text.tokens.fromlist(next(rest))  # only this group: rebuilding an automaton inserts all tokens of its texts
                end += 1
            done = int(ends[end - 1])
            if self._has_room(entry, done - before):
                entry.automaton.extend_all(self._last, slots[first:end], ends[first:end], tokens, before)
                self._measure(entry)
        self._make_room()

    def finish(self, request_id: int) -> None:
        """Removes a finished request. Its tokens remain in the history until they are evicted."""
        entry, text = self._by_request.pop(request_id)
        del entry.active[request_id]
        self._free_slots.append(text.slot)
        self._tracked[text.slot, _COUNT] = 0
        text.slot = -1
        if text.tokens:
            entry.finished.append(text)
        if not entry.active:
            self._idle[entry.key] = entry

    @classmethod
    def warm_up(cls) -> None:
        """Compiles what drafting needs, or loads it from the cache of compiled functions."""
        drafter, one = cls(), np.ones(1, np.int64)
        drafter.start(0, [1, 2, 3, 1, 2, 3, 1], [2])
        drafter.draft([0], 2, 2, 4 * one, one, one, np.ones(1, np.float32), 0.5)
        drafter.extend_all({0: [3]})
        drafter.finish(0)

    def draft(self, request_ids: Sequence[int], depth: int, width: int, budgets: NDArray[np.integer],
              seeds: NDArray[np.integer], positions: NDArray[np.integer], temperatures: NDArray[np.floating],
              tau: float, min_survival: float = 0.0) -> SuffixDrafts:
        """Drafts trees for a batch of requests, best first.

        Args:
            request_ids: The requests.
            depth: Largest depth of a tree.
            width: Largest number of children of a node.
            budgets: [B] largest number of nodes of each tree.
            seeds: [B] sampling seeds.
            positions: [B] positions of the next token, which the nodes at depth 1 predict.
            temperatures: [B] sampling temperatures; 0 ranks by counts alone.
            tau: Temperature of the ranking, see `_rank`; 0 ranks by counts alone.
            min_survival: Nodes that are less likely to be accepted than this, or than the drafter's own limit, are left out.
        """
        num_rows, num_nodes = len(request_ids), int(np.max(budgets, initial=0))
        found = [self._by_request[request_id] for request_id in request_ids]
        queries = np.empty((num_rows, 7), np.int64)
        queries[:, _ROW], queries[:, _SLOT] = np.arange(num_rows), [text.slot for _, text in found]
        queries[:, _LAST] = self._last[queries[:, _SLOT]]
        queries[:, _BUDGET], queries[:, _POSITION] = budgets, positions
        queries[:, _SEED] = np.asarray(seeds).astype(np.int64)  # wraps around and keeps the 64 bits
        queries[:, _SAMPLED] = np.asarray(temperatures) > 0
        nodes, survival = np.zeros((3, num_rows, num_nodes), np.int32), np.zeros((num_rows, num_nodes), np.float32)
        nodes[_PARENTS], count = -1, np.zeros(num_rows, np.int32)
        lasts, end = queries[:, _LAST].tolist(), 0
        for entry, own in groupby(found, itemgetter(0)):
            first, end = end, end + len(list(own))
            if any(self._has_context(entry.automaton.states, last) for last in lasts[first:end]):
                _draft(entry.automaton.states, entry.automaton.edges, queries[first:end], depth, width, float(tau),
                       self.min_match, max(min_survival, self.min_survival), self._reliability, self._tracked, nodes, survival,
                       count)
        return SuffixDrafts(nodes[_TOKENS].astype(np.int64), nodes[_PARENTS], nodes[_DEPTHS], survival, count)

    def _has_context(self, states: NDArray[np.int32], last: int) -> bool:
        """Returns whether a suffix of the text occurred before. This cheap test avoids most calls for text that never repeats."""
        return states.item(last, HEAD) >= 0 or states.item(states.item(last, LINK), LEN) >= self.min_match

    def reset(self) -> None:
        """Drops the finished texts and the learned reliability. Texts of active requests stay."""
        self._reliability = _prior()
        self._tracked[:, _COUNT] = 0
        for entry in list(self._idle.values()):
            self._drop(entry)
        for entry in self._prompts.values():
            entry.finished.clear()
            self._rebuild(entry, self.max_tokens_per_prompt)

    def _take_slot(self) -> int:
        if not self._free_slots:
            num_old = len(self._tracked)
            num_slots = max(64, 2 * num_old)
            fresh = np.zeros((num_slots - num_old, self._tracked.shape[1]), np.int32)
            self._tracked = np.concatenate((self._tracked, fresh))
            self._last = np.concatenate((self._last, np.full(len(fresh), ROOT)))
            self._free_slots = list(range(num_slots - 1, num_old - 1, -1))
        return self._free_slots.pop()

    def _has_room(self, entry: _Prompt, num_new: int) -> bool:
        """Returns whether the automaton has room for the tokens that its texts just got. If not, it has been rebuilt with a
        part of all their tokens, these included."""
        entry.num_tokens += num_new
        self._num_tokens += num_new
        if entry.num_tokens > self.max_tokens_per_prompt:
            self._rebuild(entry, self.max_tokens_per_prompt // 2)
            return False
        return True

    def _measure(self, entry: _Prompt) -> None:
        before, entry.nbytes = entry.nbytes, entry.measure()
        self._nbytes += entry.nbytes - before

    def _make_room(self) -> None:
        while self._nbytes > self.max_bytes and self._idle:
            self._drop(next(iter(self._idle.values())))
        while self._nbytes > self.max_bytes:  # prompts with active texts alone exceed the bound: halve the largest
            largest = max(self._prompts.values(), key=lambda p: p.num_tokens)
            if largest.num_tokens <= _MIN_TOKENS * (len(largest.active) + 1):
                return
            self._rebuild(largest, largest.num_tokens // 2)

    def _drop(self, entry: _Prompt) -> None:
        del self._idle[entry.key], self._prompts[entry.key]
        self._num_tokens -= entry.num_tokens
        self._nbytes -= entry.nbytes

    def _rebuild(self, entry: _Prompt, budget: int) -> None:
        """Rebuilds a prompt's automaton with at most `budget` tokens: the prompt and the active texts (if necessary only the end
        of each, in equal shares), then the newest finished texts that fit."""
        active = list(entry.active.values())
        left = budget - len(entry.tokens) - sum(len(text.tokens) for text in active)
        if left < 0:
            share = budget // (len(active) + 1)
            entry.tokens = entry.tokens[max(0, len(entry.tokens) - share):]
            for text in active:
                if len(text.tokens) > share:
                    text.tokens, text.after_prompt = text.tokens[len(text.tokens) - share:], False
        first = len(entry.finished)
        while first > 0 and left >= len(entry.finished[first - 1].tokens):
            first -= 1
            left -= len(entry.finished[first].tokens)
        entry.finished = entry.finished[first:]
        texts = entry.finished + active
        self._num_tokens -= entry.num_tokens
        entry.num_tokens = len(entry.tokens) + sum(len(text.tokens) for text in texts)
        self._num_tokens += entry.num_tokens
        entry.automaton = SuffixAutomaton(entry.num_tokens)
        entry.end = entry.automaton.extend(ROOT, np.frombuffer(entry.tokens, np.int32))
        for text in texts:
            last = entry.automaton.extend(entry.end if text.after_prompt else ROOT, np.frombuffer(text.tokens, np.int32))
            if text.slot >= 0:
                self._last[text.slot] = last
        self._measure(entry)


def _prior() -> NDArray[np.float64]:
    """Returns the initial reliability, which rises with the match length: 0.15, 0.33, 0.46, 0.58 ... 0.97."""
    prior = 1.0 - 0.85 * 2.0 ** (-(np.arange(_MAX_MATCH + 1.0) - 1.0) / 3.0)
    reliability = np.full((_MAX_MATCH + 1, _NUM_TOTALS, 2), _PRIOR_TRIALS)
    reliability[:, :, _HITS] *= np.clip(prior, 0.05, 1.0)[:, None]
    return reliability


@cached_njit()
def _update_reliability(reliability, tracked, slots, ends, tokens):
    """Compares the first token that each slot got with its predictions."""
    begin = 0
    for slot, end in zip(slots, ends):  # noqa: B905 (numba does not support `strict`)
        prediction = tracked[slot]
        if begin < end and prediction[_COUNT] > 0:
            outcome = reliability[prediction[_MATCH], prediction[_TOTAL]]
            outcome[_EXPECTED] += prediction[_SHARE] * _SHARE_UNIT
            for i in range(prediction[_COUNT]):
                if prediction[_FIRST + i] == tokens[begin]:
                    outcome[_HITS] += 1.0
            if outcome[_EXPECTED] > _MAX_TRIALS:  # decay, because the policy changes
                outcome *= 0.5
            prediction[_COUNT] = 0
        begin = end


@njit
def _gumbel(seed, position, token):
    """The noise G(seed, position, token) as `paceline.kernels.noise` defines it."""
    x0, x1, x2, x3 = philox(np.uint32(token >> 2), np.uint32(position), np.uint32(seed), np.uint32(seed >> np.uint64(32)))
    low, high = (x1 if token & 1 else x0), (x3 if token & 1 else x2)
    return gumbel_from_bits(high if token & 2 else low)


@cached_njit()
def _draft(states, edges, queries, depth, width, tau, min_match, min_survival, reliability, tracked, nodes, survival, count):
    """Grows the trees of requests that share a prompt: repeatedly takes the most likely candidate and adds its children as
    candidates."""
    edge_of, share_of = np.empty(MAX_EDGES, np.int64), np.empty(MAX_EDGES, np.float64)
    width = min(width, MAX_EDGES)
    candidate_survival = np.empty(width * (nodes.shape[2] + 1), np.float64)
    candidate_edge, candidate_parent, candidate_match = np.empty((3, len(candidate_survival)), np.int64)
    for query in queries:
        row, state, noise_scale = query[_ROW], query[_LAST], tau * query[_SAMPLED]
        node, level, match, reached, num_candidates = -1, 0, np.int64(states[state, LEN]), 1.0, 0
        tracked[query[_SLOT], _COUNT] = 0
        while True:
            if level < depth:
                state, match = _context(states, state, match, min_match)
                if state >= 0:
                    num, total = _rank(states, edges, state, width, noise_scale, np.uint64(query[_SEED]),
                                       query[_POSITION] + level, edge_of, share_of)
                    length, occurrences = min(match, _MAX_MATCH), _occurrences(total)
                    if level == 0:
                        _track(tracked[query[_SLOT]], length, occurrences, edges, edge_of, share_of, num)
                    trust = reliability[length, occurrences, _HITS] / reliability[length, occurrences, _EXPECTED]
                    for i in range(num):
                        chance = reached * min(1.0, trust * share_of[i])
                        if chance < min_survival:
                            break  # shares are in descending order
                        candidate_survival[num_candidates], candidate_edge[num_candidates] = chance, edge_of[i]
                        candidate_parent[num_candidates], candidate_match[num_candidates] = node, match + 1
                        num_candidates += 1
            if num_candidates == 0 or node + 1 >= query[_BUDGET]:
                break
            best = np.argmax(candidate_survival[:num_candidates])
            node += 1  # nodes are numbered in the order in which they are taken
            reached, edge = candidate_survival[best], candidate_edge[best]
            parent, match = candidate_parent[best], candidate_match[best]
            num_candidates -= 1
            candidate_survival[best], candidate_edge[best] = candidate_survival[num_candidates], candidate_edge[num_candidates]
            candidate_parent[best], candidate_match[best] = candidate_parent[num_candidates], candidate_match[num_candidates]
            state, level = edges[edge, TARGET], 1 if parent < 0 else nodes[_DEPTHS, row, parent] + 1
            nodes[_TOKENS, row, node], nodes[_PARENTS, row, node] = edges[edge, TOKEN], parent
            nodes[_DEPTHS, row, node], survival[row, node] = level, reached
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
    num, share = min(num, _NUM_TRACKED), 0.0
    for i in range(num):
        prediction[_FIRST + i] = edges[edge_of[i], TOKEN]
        share += share_of[i]
    prediction[_MATCH], prediction[_TOTAL] = length, occurrences
    prediction[_COUNT], prediction[_SHARE] = num, int(share / _SHARE_UNIT)
