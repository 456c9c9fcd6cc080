"""The suffix drafter: what followed the longest suffix of this text when it last occurred, in the prompt, in the
answers of the same group or in earlier rollouts of the prompt; or, shared, in whatever was generated before.

Owns the texts, one automaton per distinct prompt, and their memory. Knows nothing of the policy, the engine or torch.
Each request inserts its tokens as they are accepted, so the state to draft from is at hand and a token costs the same
whatever the history's length.
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

from paceline.drafters.automaton import COUNT, HEAD, LEN, LINK, NEXT, ROOT, TARGET, TOKEN, Automaton

MAX_EDGES = 32
"""Continuations considered per context: those used last."""
MAX_BACKOFF_HOPS = 32
_MAX_MATCH, _NUM_TOTALS = 16, 4  # reliability is kept by match length (capped) and occurrences: 1, 2-3, 4-7, 8 and more
_PRIOR_TRIALS, _MAX_TRIALS = 4.0, 256.0
_WATCHED = 8  # depth-1 guesses remembered per request, to be compared with the token that came
_SHARE_UNIT = 2.0**-30

# The jitted half takes few arrays, because each costs a call about 0.2 us. Columns of
_ROW, _LAST, _SLOT, _BUDGET, _SEED, _POSITION, _NOISY = 0, 1, 2, 3, 4, 5, 6  # `asks` [B, 7] int64
_TOKENS, _PARENTS, _DEPTHS = 0, 1, 2  # `nodes` [3, B, N] int32
_HITS, _EXPECTED = 0, 1  # `learned` [lengths, occurrences, 2]: hits; summed shares of the guesses (hits if those hold)
_MATCH, _TOTAL, _NUM_WATCHED, _SHARE, _FIRST_WATCHED = 0, 1, 2, 3, 4  # `watched` [slots, 4 + _WATCHED] int32: guesses


class SuffixDrafts(NamedTuple):
    """Draft trees of a batch; a row's first `count` columns are its nodes, parents before children, best first."""

    tokens: NDArray[np.int64]  # [B, N]
    parents: NDArray[np.int32]  # [B, N] column of the parent in the same row; -1: child of the root
    depths: NDArray[np.int32]  # [B, N] 1: child of the root
    survival: NDArray[np.float32]  # [B, N] estimated chance that the node is accepted
    num_nodes: NDArray[np.int32]  # [B]


class _Text:
    """One answer. `slot`: where its state and its guesses are while it lives, then -1; `joined`: it starts at the prompt's end,
    nothing was cut off."""

    __slots__ = ("joined", "slot", "tokens")

    def __init__(self, slot: int) -> None:
        self.tokens, self.slot, self.joined = array("i"), slot, True


class _Prompt:
    """One distinct prompt: its text, its answers (finished ones oldest first) and the automaton over all of them."""

    __slots__ = ("automaton", "end", "finished", "key", "live", "num_tokens", "tokens")

    def __init__(self, key: bytes) -> None:
        self.key, self.tokens, self.end, self.automaton = key, array("i", key), ROOT, Automaton(2 * len(key) // 4)
        self.live: dict[int, _Text] = {}
        self.finished: list[_Text] = []
        self.num_tokens = 0


class SuffixDrafter:
    """Drafts from repetition. `max_tokens` bounds the remembered tokens of all prompts together. `shared`: all prompts have one
    history, for tasks whose answers resemble each other (then `max_tokens_per_prompt` bounds that)."""

    def __init__(self, max_tokens: int = 4_000_000, max_tokens_per_prompt: int = 262_144, min_match: int = 1,
                 min_survival: float = 0.2, shared: bool = False) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_tokens_per_prompt", max_tokens_per_prompt),
                            ("min_match", min_match)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not an integer >= 1")
        if not 0.0 <= min_survival <= 1.0:
            raise ValueError(f"min_survival: {min_survival} is not in [0, 1]")
        self.max_tokens, self.max_tokens_per_prompt = max_tokens, min(max_tokens, max_tokens_per_prompt)
        self.min_match, self.min_survival, self.shared = min_match, min_survival, shared
        self._prompts: dict[bytes, _Prompt] = {}
        self._idle: OrderedDict[bytes, _Prompt] = OrderedDict()  # without live requests, least recently used first
        self._by_request: dict[int, tuple[_Prompt, _Text]] = {}  # that live
        self._free_slots: list[int] = []
        self._num_tokens = 0
        self._learned = _prior()
        self._watched = np.zeros((0, _FIRST_WATCHED + _WATCHED), np.int32)
        self._last = np.zeros(0, np.int64)  # by slot: state of the text

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        return sum(p.automaton.nbytes + len(p.key) + 4 * p.num_tokens for p in self._prompts.values())

    def start(self, request_id: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        if request_id in self._by_request:
            raise ValueError(f"request_id: {request_id} is already live")
        if self.shared:
            prompt, generated = (), [*prompt, *generated]
        key = array("i", prompt).tobytes()
        entry = self._prompts.get(key)
        if entry is None:
            entry = self._prompts[key] = _Prompt(key)
        self._idle.pop(key, None)
        text = entry.live[request_id] = _Text(self._take_slot())
        self._by_request[request_id] = entry, text
        if entry.num_tokens == 0 and self._takes(entry, len(entry.tokens)):
            entry.end = entry.automaton.extend(ROOT, np.frombuffer(entry.tokens, np.int32))
        self._last[text.slot] = entry.end
        self.extend(request_id, generated)

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """Append accepted tokens. The first is compared with what the last draft guessed for its place."""
        self.extend_all({request_id: list(tokens)})

    def extend_all(self, accepted: Mapping[int, list[int]]) -> None:
        """Likewise for all requests of a step: a jitted call costs more than what it does, so there is one for those of a prompt
        that stand side by side."""
        if not accepted:
            return
        found = [self._by_request[request_id] for request_id in accepted]
        tokens = np.fromiter(chain.from_iterable(accepted.values()), np.int32)
        ends = np.cumsum(np.fromiter(map(len, accepted.values()), np.int64))
        slots = np.array([text.slot for _, text in found])
        _learn(self._learned, self._watched, slots, ends, tokens)
        end, done, rest = 0, 0, iter(accepted.values())
        for entry, own in groupby(found, itemgetter(0)):
            first, before = end, done
            for _, text in own:
                text.tokens.fromlist(next(rest))  # of this group alone: a rebuilt automaton holds all that its texts have
                end += 1
            done = int(ends[end - 1])
            if self._takes(entry, done - before):
                entry.automaton.extend_all(self._last, slots[first:end], ends[first:end], tokens, before)
        self._make_room()

    def finish(self, request_id: int) -> None:
        """The request ends; its text stays as history until evicted."""
        entry, text = self._by_request.pop(request_id)
        del entry.live[request_id]
        self._free_slots.append(text.slot)
        self._watched[text.slot, _NUM_WATCHED] = 0
        text.slot = -1
        if text.tokens:
            entry.finished.append(text)
        if not entry.live:
            self._idle[entry.key] = entry

    def draft(self, request_ids: Sequence[int], depth: int, width: int, budgets: NDArray[np.integer],
              seeds: NDArray[np.integer], positions: NDArray[np.integer], temperatures: NDArray[np.floating],
              tau: float, min_survival: float = 0.0) -> SuffixDrafts:
        """Best-first trees of at most `budgets[b]` nodes; depth-1 nodes guess the token at `positions[b]`. Nodes less likely to
        be accepted than `min_survival` (or the drafter's own) are left out."""
        num_rows, num_nodes = len(request_ids), int(np.max(budgets, initial=0))
        found = [self._by_request[request_id] for request_id in request_ids]
        asks = np.empty((num_rows, 7), np.int64)
        asks[:, _ROW], asks[:, _SLOT] = np.arange(num_rows), [text.slot for _, text in found]
        asks[:, _LAST] = self._last[asks[:, _SLOT]]
        asks[:, _BUDGET], asks[:, _POSITION] = budgets, positions
        asks[:, _SEED] = np.asarray(seeds).astype(np.int64)  # wraps: the same 64 bits
        asks[:, _NOISY] = np.asarray(temperatures) > 0
        nodes, survival = np.zeros((3, num_rows, num_nodes), np.int32), np.zeros((num_rows, num_nodes), np.float32)
        nodes[_PARENTS], count = -1, np.zeros(num_rows, np.int32)
        lasts, end = asks[:, _LAST].tolist(), 0
        for entry, own in groupby(found, itemgetter(0)):
            first, end = end, end + len(list(own))
            if any(self._has_context(entry.automaton.states, last) for last in lasts[first:end]):
                _draft(entry.automaton.states, entry.automaton.edges, asks[first:end], depth, width, float(tau),
                       self.min_match, max(min_survival, self.min_survival), self._learned, self._watched, nodes, survival, count)
        return SuffixDrafts(nodes[_TOKENS].astype(np.int64), nodes[_PARENTS], nodes[_DEPTHS], survival, count)

    def _has_context(self, states: NDArray[np.int32], last: int) -> bool:
        """Whether any of the text's ends occurred before: on text that never repeats the answer is cheap and mostly no."""
        return states.item(last, HEAD) >= 0 or states.item(states.item(last, LINK), LEN) >= self.min_match

    def reset(self) -> None:
        """Drop finished texts and what was learnt of reliability; live texts stay."""
        self._learned = _prior()
        self._watched[:, _NUM_WATCHED] = 0
        for entry in list(self._idle.values()):
            self._drop(entry)
        for entry in self._prompts.values():
            entry.finished.clear()
            self._rebuild(entry, self.max_tokens_per_prompt)

    def _take_slot(self) -> int:
        if not self._free_slots:
            num_old = len(self._watched)
            num_slots = max(64, 2 * num_old)
            fresh = np.zeros((num_slots - num_old, self._watched.shape[1]), np.int32)
            self._watched = np.concatenate((self._watched, fresh))
            self._last = np.concatenate((self._last, np.full(len(fresh), ROOT)))
            self._free_slots = list(range(num_slots - 1, num_old - 1, -1))
        return self._free_slots.pop()

    def _takes(self, entry: _Prompt, num_new: int) -> bool:
        """Whether its automaton has room for what its texts just got; if not, it has been rebuilt with some of all they have."""
        entry.num_tokens += num_new
        self._num_tokens += num_new
        if entry.num_tokens > self.max_tokens_per_prompt:
            self._rebuild(entry, self.max_tokens_per_prompt // 2)
            return False
        return True

    def _make_room(self) -> None:
        while self._num_tokens > self.max_tokens and self._idle:
            self._drop(next(iter(self._idle.values())))
        while self._num_tokens > self.max_tokens:  # live texts alone are too many: halve where most is to be had
            largest = max(self._prompts.values(), key=lambda p: p.num_tokens)
            self._rebuild(largest, largest.num_tokens // 2)

    def _drop(self, entry: _Prompt) -> None:
        del self._idle[entry.key], self._prompts[entry.key]
        self._num_tokens -= entry.num_tokens

    def _rebuild(self, entry: _Prompt, budget: int) -> None:
        """Keep at most `budget` tokens: the prompt, live texts (if need be only an equal share of each, the last part),
        then the newest whole finished ones."""
        live = list(entry.live.values())
        left = budget - len(entry.tokens) - sum(len(text.tokens) for text in live)
        if left < 0:
            share = budget // (len(live) + 1)
            entry.tokens = entry.tokens[max(0, len(entry.tokens) - share):]
            for text in live:
                if len(text.tokens) > share:
                    text.tokens, text.joined = text.tokens[len(text.tokens) - share:], False
        first = len(entry.finished)
        while first > 0 and left >= len(entry.finished[first - 1].tokens):
            first -= 1
            left -= len(entry.finished[first].tokens)
        entry.finished = entry.finished[first:]
        texts = entry.finished + live
        self._num_tokens -= entry.num_tokens
        entry.num_tokens = len(entry.tokens) + sum(len(text.tokens) for text in texts)
        self._num_tokens += entry.num_tokens
        entry.automaton = Automaton(entry.num_tokens)
        entry.end = entry.automaton.extend(ROOT, np.frombuffer(entry.tokens, np.int32))
        for text in texts:
            last = entry.automaton.extend(entry.end if text.joined else ROOT, np.frombuffer(text.tokens, np.int32))
            if text.slot >= 0:
                self._last[text.slot] = last


def _prior() -> NDArray[np.float64]:
    """Long matches are trusted until they fail, matches of one token are not: 0.15, 0.33, 0.46, 0.58 ... 0.97."""
    prior = 1.0 - 0.85 * 2.0 ** (-(np.arange(_MAX_MATCH + 1.0) - 1.0) / 3.0)
    learned = np.full((_MAX_MATCH + 1, _NUM_TOTALS, 2), _PRIOR_TRIALS)
    learned[:, :, _HITS] *= np.clip(prior, 0.05, 1.0)[:, None]
    return learned


@njit(cache=True)
def _learn(learned, watched, slots, ends, tokens):
    """Compare the first token that each slot got with its guesses."""
    begin = 0
    for slot, end in zip(slots, ends):  # noqa: B905 numba knows no `strict`
        guess = watched[slot]
        if begin < end and guess[_NUM_WATCHED] > 0:
            outcome = learned[guess[_MATCH], guess[_TOTAL]]
            outcome[_EXPECTED] += guess[_SHARE] * _SHARE_UNIT
            for i in range(guess[_NUM_WATCHED]):
                if guess[_FIRST_WATCHED + i] == tokens[begin]:
                    outcome[_HITS] += 1.0
            if outcome[_EXPECTED] > _MAX_TRIALS:  # forget slowly: the policy changes
                outcome *= 0.5
            guess[_NUM_WATCHED] = 0
        begin = end


@njit
def _gumbel(seed, position, token):
    """G(seed, position, token): Philox 4x32-10, key = seed, counter = (token // 4, position, 0, 0), lane token % 4."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    k0, k1 = seed & low, seed >> shift
    c0, c1, c2, c3 = np.uint64(token // 4), np.uint64(position) & low, np.uint64(0), np.uint64(0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & low, (a >> shift) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    lane = token % 4
    x = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
    return -math.log(-math.log1p(-(np.float64(x) + 0.5) * 2.0**-32))


@njit(cache=True)
def _draft(states, edges, asks, depth, width, tau, min_match, min_survival, learned, watched, nodes, survival, count):
    """Grow the trees of all requests of one prompt: time and again take the likeliest open guess, and guess on."""
    edge_of, share_of = np.empty(MAX_EDGES, np.int64), np.empty(MAX_EDGES, np.float64)
    width = min(width, MAX_EDGES)
    open_chance = np.empty(width * (nodes.shape[2] + 1), np.float64)
    open_edge, open_parent, open_match = np.empty((3, len(open_chance)), np.int64)
    for ask in asks:
        row, state, noise_scale = ask[_ROW], ask[_LAST], tau * ask[_NOISY]
        node, level, match, reached, num_open = -1, 0, np.int64(states[state, LEN]), 1.0, 0
        watched[ask[_SLOT], _NUM_WATCHED] = 0
        while True:
            if level < depth:
                state, match = _context(states, state, match, min_match)
                if state >= 0:
                    num, total = _rank(states, edges, state, width, noise_scale, np.uint64(ask[_SEED]),
                                       ask[_POSITION] + level, edge_of, share_of)
                    length, occurrences = min(match, _MAX_MATCH), _occurrences(total)
                    if level == 0:
                        _watch(watched[ask[_SLOT]], length, occurrences, edges, edge_of, share_of, num)
                    reliability = learned[length, occurrences, _HITS] / learned[length, occurrences, _EXPECTED]
                    for i in range(num):
                        chance = reached * min(1.0, reliability * share_of[i])
                        if chance < min_survival:
                            break  # shares fall
                        open_chance[num_open], open_edge[num_open] = chance, edge_of[i]
                        open_parent[num_open], open_match[num_open] = node, match + 1
                        num_open += 1
            if num_open == 0 or node + 1 >= ask[_BUDGET]:
                break
            best = np.argmax(open_chance[:num_open])
            node += 1  # nodes are numbered in the order they are taken
            reached, edge, parent, match = open_chance[best], open_edge[best], open_parent[best], open_match[best]
            num_open -= 1
            open_chance[best], open_edge[best] = open_chance[num_open], open_edge[num_open]
            open_parent[best], open_match[best] = open_parent[num_open], open_match[num_open]
            state, level = edges[edge, TARGET], 1 if parent < 0 else nodes[_DEPTHS, row, parent] + 1
            nodes[_TOKENS, row, node], nodes[_PARENTS, row, node] = edges[edge, TOKEN], parent
            nodes[_DEPTHS, row, node], survival[row, node] = level, reached
        count[row] = node + 1


@njit
def _context(states, state, match, min_match):
    """The longest suffix that was followed by something, and its length; -1 when none has `min_match` tokens."""
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
    """Fill in the best `width` continuations, best first, and each one's share; returns (how many, occurrences).

    Without noise: by count; share = count / total. With noise: by z = log(count / total) / tau + G; softmax(z)."""
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
    return 0 if total < 2 else 1 if total < 4 else 2 if total < 8 else 3


@njit
def _watch(guess, length, occurrences, edges, edge_of, share_of, num):
    """Remember the depth-1 guesses, drafted or not, so that a context once distrusted can earn its trust back."""
    num, share = min(num, _WATCHED), 0.0
    for i in range(num):
        guess[_FIRST_WATCHED + i] = edges[edge_of[i], TOKEN]
        share += share_of[i]
    guess[_MATCH], guess[_TOTAL] = length, occurrences
    guess[_NUM_WATCHED], guess[_SHARE] = num, int(share / _SHARE_UNIT)
