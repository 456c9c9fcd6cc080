"""Paged storage: which page belongs to whom (`pages`, no torch) and what lies in it (`store`)."""

from paceline.cache.pages import PageAllocator, PrefixMatch
from paceline.cache.store import PagedStore

__all__ = ["PageAllocator", "PagedStore", "PrefixMatch"]
