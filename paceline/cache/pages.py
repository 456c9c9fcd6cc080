"""The page allocator: which pages are in use, prefix sharing between requests, and eviction of unused pages. No torch.

A page is free (empty), held (its reference count is positive), or kept: no request holds it, but it contains a known prefix that
a later request may share. Kept pages count as available and are evicted oldest first. There are never more kept pages than the
largest number of pages that were held at the same time, so memory use follows the running requests and not the finished ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_ROOT = 0
_Key = tuple[int | str, tuple[int, ...]]


class PrefixMatch(NamedTuple):
    """Pages that contain the beginning of a token sequence; the caller holds a reference to each of them."""

    pages: list[int]
    """Full pages, which can be shared as they are."""
    tail: int | None
    """A page whose first `num_tail` tokens match, too. It must be copied, because its owner continues to write behind them."""
    num_tail: int


class PageAllocator:
    """Reference-counted pages of the KV cache, with an index of the prefixes that they contain."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"cache: {num_pages} pages of {page_size} tokens cannot hold anything")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))  # lowest page on top: memory is touched as it is needed
        self._refs = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._num_held = self._most_held = 0
        # A prefix is a chain of pages. Key: (node of the page before, tokens of this page); exact, not a hash. A salt is the
        # node before the first page of its prefixes.
        self._nodes: dict[_Key, tuple[int, int]] = {}  # key -> (node, page)
        self._keys: dict[int, _Key] = {}  # page -> key
        self._next_node = _ROOT + 1

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Number of pages that somebody holds."""
        return self._num_held

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each, or None, without a change, if too few are available."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        self._num_held += count
        self._most_held = max(self._most_held, self._num_held)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. Pages with a known prefix are kept until their memory is needed."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} was released too often"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._num_held -= 1
                if page in self._keys:
                    self._kept[page] = None
                else:
                    self._free.append(page)
        while len(self._kept) > self._most_held:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
            self._free.append(page)

    def match(self, tokens: Sequence[int], salt: str | None = None) -> PrefixMatch:
        """Find the longest known prefix of `tokens` among those that were published with the same salt. The caller gets a
        reference to every page of the result."""
        size, pages = self.page_size, []
        node: int | str = _ROOT if salt is None else salt
        for start in range(0, len(tokens) - size + 1, size):
            found = self._nodes.get((node, tuple(tokens[start : start + size])))
            if found is None:
                break
            node, page = found
            pages.append(self._hold(page))
        rest = tuple(tokens[len(pages) * size :])
        found = self._nodes.get((node, rest)) if 0 < len(rest) < size else None
        if found is None:
            return PrefixMatch(pages, None, 0)
        return PrefixMatch(pages, self._hold(found[1]), len(rest))

    def publish(self, tokens: Sequence[int], pages: Sequence[int], salt: str | None = None) -> None:
        """Make a prefix known: `pages` contain the complete keys and values of `tokens` (the last page possibly in part), and
        other requests with the same salt may share them from now on."""
        size = self.page_size
        node: int | str = _ROOT if salt is None else salt
        for index, page in enumerate(pages[: self.pages_for(len(tokens))]):
            key = (node, tuple(tokens[index * size : (index + 1) * size]))
            found = self._nodes.get(key)
            if found is None:
                assert self._refs[page] > 0, f"page {page} was published but is not held"
                self._forget(page)
                found = self._nodes[key] = (self._next_node, page)
                self._keys[page] = key
                self._next_node += 1
            node = found[0]

    def reset(self, held: Collection[int] = ()) -> None:
        """Make all pages free and forget all prefixes, whoever holds a page now. Only the pages `held` keep one reference."""
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if page not in held]
        self._refs = [int(page in held) for page in range(self.num_pages)]
        self._kept.clear()
        self._nodes.clear()
        self._keys.clear()
        self._num_held = len(held)

    def drop_prefixes(self) -> None:
        """Forget all prefixes, because the weights changed. Held pages stay with the requests that hold them."""
        self._nodes.clear()
        self._keys.clear()
        self._free.extend(self._kept)
        self._kept.clear()

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one state, and that the prefix index is consistent."""
        free, kept = set(self._free), set(self._kept)
        held = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert all(refs >= 0 for refs in self._refs), "negative reference count"
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & kept and not free & held and not kept & held, "a page is in two states"
        assert len(free) + len(kept) + len(held) == self.num_pages, "a page is lost"
        assert len(held) == self._num_held <= self._most_held and len(kept) <= self._most_held, "held pages miscounted"
        assert kept <= self._keys.keys(), "a page without a prefix is kept"
        assert not free & self._keys.keys(), "a free page has a prefix"
        assert {key: page for page, key in self._keys.items()} == {k: page for k, (_, page) in self._nodes.items()}

    def _hold(self, page: int) -> int:
        """Take one more reference to a held or kept page."""
        if self._refs[page] == 0:
            del self._kept[page]
            self._num_held += 1
            self._most_held = max(self._most_held, self._num_held)
        self._refs[page] += 1
        return page

    def _forget(self, page: int) -> None:
        """Remove a page from the prefix index."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._nodes[key]
