"""A look at the metadata of a GGUF file before a library reads it: arrays are as long as the file has room for, and hold no
arrays. The library would go on reading behind the end of the file, and make an object of every element."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type; texts and arrays are not among them."""
_MAX_ELEMENTS = 1 << 24
"""Largest length of an array: several times that of the largest vocabulary."""


def check_gguf_metadata(path: Path) -> None:
    """ValueError or struct.error unless the metadata of the file can be read to its end."""
    if not path.stat().st_size:
        raise ValueError("the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(data).walk()


class _Walk:
    """Goes through the metadata without keeping any of it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4  # behind the magic number, which the library looks at
        version = struct.unpack_from("<I", data, 4)[0]
        self._order = ">" if version & 0xFFFF == 0 else "<"

    def walk(self) -> None:
        """Go to the end of the metadata and of the list of tensors."""
        self._number("I")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        for _ in range(num_values):
            self._text()
            self._value(self._number("I"))
        for _ in range(num_tensors):
            self._text()
            self._skip(8 * self._number("I") + 12)  # sizes, type and offset

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            kind, length = self._number("I"), self._number("Q")
            if length > _MAX_ELEMENTS:
                raise ValueError(f"an array of {length} elements")
            if kind == _STRING:
                for _ in range(length):
                    self._text()
            else:
                self._skip(length * self._size(kind))
        else:
            self._skip(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise ValueError("an array of arrays" if kind == _ARRAY else f"a value of the unknown type {kind}")
        return _SIZES[kind]

    def _text(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, kind: str) -> int:
        found = struct.unpack_from(self._order + kind, self._data, self._at)[0]
        self._skip(struct.calcsize(kind))
        return int(found)

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._data):
            raise ValueError("it ends within its metadata")
