"""Sampling with shared noise, and the thresholds of top-k, top-p and min-p."""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from paceline.kernels.cpu.arguments import SAMPLE
from paceline.kernels.cpu.jit.base import fast, fast_exp, inlined, max_of, next_item, ordered, pointer, to_acc
from paceline.kernels.cpu.jit.noise import NOISE_BLOCK, W_SCALE32, gumbel_from_bits, philox_block

_BLOCK = 64
"""Logits whose maximum is looked at instead of all of them while the k-th largest is searched."""


@inlined
def sample(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: row. See `draw` for how the noise of most tokens is never turned into a Gumbel number. If `given` is there, it
    holds the tokens, and the sample is ignored: their log-probabilities are computed by the same instructions."""
    a = carray(block, 1, SAMPLE)[0]
    num_rows, vocab = a.num_rows, a.vocab
    logits = carray(pointer(a.logits), (num_rows, vocab), store)
    token, logprob = carray(pointer(a.token), num_rows, np.int64), carray(pointer(a.logprob), num_rows, acc)
    seeds, positions = carray(pointer(a.seed), num_rows, np.int64), carray(pointer(a.position), num_rows, np.int64)
    temperatures, top_ks = carray(pointer(a.temperature), num_rows, np.float32), carray(pointer(a.top_k), num_rows, np.int32)
    top_ps, min_ps = carray(pointer(a.top_p), num_rows, np.float32), carray(pointer(a.min_p), num_rows, np.float32)
    given = carray(pointer(a.given if a.given != 0 else a.token), num_rows, np.int64)
    scaled = np.empty(vocab, acc)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        greedy = temperatures[row] == 0
        if not scale_logits(logits[row], acc(1) if greedy else acc(temperatures[row]), scaled, acc):
            token[row], logprob[row] = -1, np.nan
            continue
        best = first_largest(scaled)
        if greedy:
            token[row], logprob[row] = best, acc(0)
            continue
        bound = acc(-np.inf)
        if 0 < top_ks[row] < vocab or top_ps[row] < 1 or min_ps[row] > 0:
            bound = threshold(scaled, scaled[best], np.int64(top_ks[row]), np.float64(top_ps[row]),
                               np.float64(min_ps[row]), acc)
        chosen, mass = draw(scaled, best, bound, seeds[row], np.uint32(positions[row]), acc)
        if a.given != 0:
            chosen = given[row]
            if scaled[chosen] < bound:
                mass += math.exp(np.float64(scaled[chosen] - scaled[best]))
        token[row] = chosen
        logprob[row] = scaled[chosen] - (scaled[best] + acc(math.log(mass)))


@inlined
def scale_logits(logits, temperature, scaled, acc):  # type: ignore[no-untyped-def]
    """scaled = logits / temperature; whether its maximum is finite and nothing is NaN. Integers vectorise without
    fast-math, and NaN of either sign lies outside the infinities."""
    low, high = ordered(acc(np.inf)), ordered(acc(-np.inf))
    for i in range(len(scaled)):
        x = to_acc(logits[i]) / temperature
        scaled[i] = x
        key = ordered(x)
        low = min(low, key)
        high = max(high, key)
    return ordered(acc(-np.inf)) <= low and ordered(acc(-np.inf)) < high and high < ordered(acc(np.inf))


@inlined
def first_largest(x):  # type: ignore[no-untyped-def]
    best = max_of(x, len(x))
    for i in range(len(x)):
        if x[i] == best:
            return i
    return 0


@inlined
def draw(s, best, bound, seed, position, acc):  # type: ignore[no-untyped-def]
    """(argmax of s + G over s >= bound, sum of exp(s - s[best]) over the same).

    A token beats the best value b so far only if G > b - s, that is E < exp(s - b); and w <= E. So only tokens with
    w <= exp(s - b) are looked at closer: a handful. exp(s - max) is needed for the sum anyway. A block without any
    exp(s - b) above the smallest w, 2^-33, is passed over without making its bits."""
    top, vocab = s[best], len(s)
    k0, k1 = np.uint32(seed), np.uint32(seed >> 32)
    words, scratch = np.empty(NOISE_BLOCK, np.uint32), np.empty(NOISE_BLOCK, np.uint32)
    e = np.empty(NOISE_BLOCK, acc)
    philox_block(best // 4, position, k0, k1, scratch, words)
    value = s[best] + gumbel_from_bits(words[best % 4])
    slack = 1e-3 + 4e-7 * abs(top)  # far more than the roundings of s, of s + G and of the logarithms
    reach = acc(math.exp(np.float64(top - value) + slack))
    mass = 0.0
    for start in range(0, vocab, NOISE_BLOCK):
        size = min(NOISE_BLOCK, vocab - start)
        mass += exp_block(s[start : start + size], top, bound, e, acc)
        if max_of(e, size) * reach < acc(2.0**-33):
            continue
        philox_block(start // 4, position, k0, k1, scratch, words)
        if count_near(words, e, size, reach) == 0:
            continue
        for i in range(size):
            if np.float32(words[i]) * W_SCALE32 <= e[i] * reach and s[start + i] >= bound:
                noisy = s[start + i] + gumbel_from_bits(words[i])
                if noisy > value or (noisy == value and start + i < best):
                    best, value = start + i, noisy
                    reach = acc(math.exp(np.float64(top - value) + slack))
    return best, mass


@fast
def exp_block(s, top, bound, e, acc):  # type: ignore[no-untyped-def]
    total = acc(0)
    for i in range(len(s)):
        x = fast_exp(s[i] - top)
        x = x if s[i] >= bound else acc(0)
        e[i] = x
        total += x
    return np.float64(total)


@inlined
def count_near(words, e, size, reach):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(size):
        count += np.float32(words[i]) * W_SCALE32 <= e[i] * reach
    return count


@inlined
def threshold(s, top, top_k, top_p, min_p, acc):  # type: ignore[no-untyped-def]
    """What `reference.ops.thresholds` gives for one row, without sorting it all."""
    vocab = len(s)
    bound = acc(-np.inf)
    if 0 < top_k < vocab:
        # The k-th largest of block maxima is a lower bound of the k-th largest: only what reaches it is sorted.
        num_blocks = (vocab + _BLOCK - 1) // _BLOCK
        if top_k <= num_blocks:
            maxima = np.empty(num_blocks, acc)
            for i in range(num_blocks):
                part = s[i * _BLOCK : (i + 1) * _BLOCK]
                maxima[i] = max_of(part, len(part))
            bound = np.sort(maxima)[num_blocks - top_k]
        rest = np.sort(s[s >= bound])
        bound = rest[len(rest) - top_k]
    if top_p < 1:
        bound = top_p_bound(s, top, top_p, bound, acc)
    if min_p > 0:
        bound = max(bound, acc(top + acc(math.log(min_p))))
    return bound


@inlined
def top_p_bound(s, top, top_p, bound, acc):  # type: ignore[no-untyped-def]
    """Weigh bins an eighth of a nat wide, find the one in which top_p is reached, and sort that one alone."""
    bins, e, mass = np.zeros(256), np.empty(NOISE_BLOCK, acc), 0.0
    for start in range(0, len(s), NOISE_BLOCK):
        part = s[start : start + NOISE_BLOCK]
        mass += exp_block(part, top, bound, e, acc)
        for i in range(len(part)):
            if e[i] > acc(0):
                bins[nat_bin(part[i], top)] += e[i]
    target, reached, chosen = top_p * mass, 0.0, 0
    while chosen < 255 and reached + bins[chosen] < target:
        reached += bins[chosen]
        chosen += 1
    members, count = np.empty(len(s), acc), 0
    for i in range(len(s)):
        if s[i] >= bound and s[i] > -np.inf and nat_bin(s[i], top) == chosen:
            members[count] = s[i]
            count += 1
    members = np.sort(members[:count])
    for i in range(count - 1, -1, -1):
        bound = members[i]
        reached += math.exp(np.float64(members[i]) - np.float64(top))
        if reached >= target:
            break
    return bound


@inlined
def nat_bin(x, top):  # type: ignore[no-untyped-def]
    return min(np.int64(min((np.float64(top) - np.float64(x)) * 8.0, 255.0)), 255)
