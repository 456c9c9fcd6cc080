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

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.suffix_automaton import ROOT, SuffixAutomaton
from paceline.drafters.suffix_trees import (
    DEPTHS,
    FIRST_PREDICTED,
    NUM_PREDICTED,
    NUM_TRACKED,
    PARENTS,
    TOKENS,
    grow_trees,
    initial_reliability,
    update_reliability,
)

_PROMPT_BYTES, _TEXT_BYTES = 1280, 192  # Python objects per prompt and per text, as tracemalloc counts them
_MIN_TOKENS = 16  # texts of active requests are never cut to fewer tokens


class SuffixDrafts(NamedTuple):
    """Draft trees of a batch. The first `num_nodes` columns of a row are its nodes, most likely first, parents before their
    children."""

    nodes: NDArray[np.int64]
    """[3, B, N] token, column of the parent in the same row (-1 for children of the root), and depth (1 for these)."""
    survival: NDArray[np.float32]  # [B, N] estimated probability that the node is accepted
    num_nodes: NDArray[np.int64]  # [B]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self.nodes[TOKENS]

    @property
    def parents(self) -> NDArray[np.int64]:
        return self.nodes[PARENTS]

    @property
    def depths(self) -> NDArray[np.int64]:
        return self.nodes[DEPTHS]


_Key = tuple[str | None, bytes]
"""The salt of requests, and the tokens of their prompt."""


class _Text:
    """One answer. `slot` is the index of its state and its predictions while the request is active, -1 afterwards. `after_prompt`
    tells that it continues the prompt, as its beginning was not dropped."""

    __slots__ = ("after_prompt", "slot", "tokens")

    def __init__(self, slot: int) -> None:
        self.tokens, self.slot, self.after_prompt = array("i"), slot, True


class _Prompt:
    """One distinct prompt with its salt: its tokens, its answers (finished ones oldest first) and the automaton over them all."""

    __slots__ = ("active", "automaton", "end", "finished", "key", "nbytes", "num_tokens", "tokens")

    def __init__(self, key: _Key) -> None:
        tokens = array("i", key[1])
        self.key, self.tokens, self.end, self.automaton = key, tokens, ROOT, SuffixAutomaton(2 * len(tokens))
        self.active: dict[int, _Text] = {}
        self.finished: list[_Text] = []
        self.num_tokens = self.nbytes = 0  # `nbytes`: as last measured

    def measure(self) -> int:
        """Returns the size in bytes."""
        num_texts = len(self.active) + len(self.finished)
        return self.automaton.nbytes + len(self.key[1]) + 4 * self.num_tokens + _PROMPT_BYTES + _TEXT_BYTES * num_texts


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
        self._prompts: dict[_Key, _Prompt] = {}
        self._idle: OrderedDict[_Key, _Prompt] = OrderedDict()  # without active requests, least recently used first
        self._by_request: dict[int, tuple[_Prompt, _Text]] = {}  # active requests
        self._free_slots: list[int] = []
        self._num_tokens = self._nbytes = 0
        self._reliability = initial_reliability()
        self._tracked = np.zeros((0, FIRST_PREDICTED + NUM_TRACKED), np.int32)
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

    def start(self, request_id: int, prompt: Sequence[int], generated: Sequence[int] = (),
              salt: str | None = None) -> None:
        """Adds a request. generated: Tokens that it has already generated. salt: It shares history only with requests of the
        same salt."""
        if request_id in self._by_request:
            raise ValueError(f"request_id: {request_id} is already active")
        if self.shared:
            prompt, generated = (), [*prompt, *generated]
        key = salt, array("i", prompt).tobytes()
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
        ends = np.array(list(accumulate(map(len, accepted.values()))))
        slots = np.array([text.slot for _, text in found])
        update_reliability(self._reliability, self._tracked, slots, ends, tokens)
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
        self._tracked[text.slot, NUM_PREDICTED] = 0
        text.slot = -1
        if text.tokens:
            entry.finished.append(text)
        if not entry.active:
            self._idle[entry.key] = entry

    @classmethod
    def warm_up(cls) -> None:
        """Compiles what drafting needs, or loads it from the cache of compiled functions."""
        drafter = cls()
        drafter.start(0, [1, 2, 3, 1, 2, 3, 1], [2])
        drafter.draft([0], 2, 2, [4], [1], [1], [1.0], 0.5)
        drafter.extend_all({0: [3]})
        drafter.finish(0)

    def draft(self, request_ids: Sequence[int], depth: int, width: int, budgets: Sequence[int], seeds: Sequence[int],
              positions: Sequence[int], temperatures: Sequence[float], tau: float, min_survival: float = 0.0) -> SuffixDrafts:
        """Drafts trees for a batch of requests, best first.

        Args:
            request_ids: The requests.
            depth: Largest depth of a tree.
            width: Largest number of children of a node.
            budgets: Largest number of nodes of each tree.
            seeds: Sampling seeds, of which the lowest 64 bits count.
            positions: Positions of the next token, which the nodes at depth 1 predict.
            temperatures: Sampling temperatures; 0 ranks by counts alone.
            tau: Temperature of the ranking, see `_rank`; 0 ranks by counts alone.
            min_survival: Nodes that are less likely to be accepted than this, or than the drafter's own limit, are left out.
        """
        num_rows, num_nodes = len(request_ids), max(budgets, default=0)
        found = [self._by_request[request_id] for request_id in request_ids]
        # One conversion of lists: numpy takes longer for each array than for what is in it.
        queries = np.array(([text.slot for _, text in found], budgets, [as_int64(seed) for seed in seeds], positions,
                            [temperature > 0 for temperature in temperatures]), np.int64)
        nodes, survival = np.zeros((3, num_rows, num_nodes), np.int64), np.zeros((num_rows, num_nodes), np.float32)
        nodes[PARENTS], count, end = -1, np.zeros(num_rows, np.int64), 0
        for entry, own in groupby(found, itemgetter(0)):
            first, end = end, end + len(list(own))
            grow_trees(entry.automaton.states, entry.automaton.edges, self._last, queries, first, end, depth, width, float(tau),
                       self.min_match, max(min_survival, self.min_survival), self._reliability, self._tracked, nodes, survival,
                       count)
        return SuffixDrafts(nodes, survival, count)

    def reset(self) -> None:
        """Drops the finished texts and the learned reliability. Texts of active requests stay."""
        self._reliability = initial_reliability()
        self._tracked[:, NUM_PREDICTED] = 0
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


def as_int64(seed: int) -> int:
    """Returns the signed number with the lowest 64 bits of a seed."""
    low = seed & (2**64 - 1)
    return low - (low >> 63 << 64)
