"""The paged KV cache: which request holds which page (`pages`, no torch), and the tensors behind the pages (`store`)."""

from paceline.cache.pages import PageAllocator, PrefixMatch
from paceline.cache.store import PagedStore

__all__ = ["PageAllocator", "PagedStore", "PrefixMatch"]
