"""Triton through its interpreter, where there is no GPU. Importing this module skips the test file if that is not possible."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not CUDA:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported without its interpreter: run this file alone", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        """Triton 3.6's interpreter turns arrays of one element into numbers with int(), which numpy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_index

    # What follows makes the interpreter faster; kernels compute what they computed before.

    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False)  # computes all integers twice, and compares nothing

    _patch_lang, _np_dtype = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)

    @functools.cache
    def _languages(fn: Callable[..., Any]) -> list[Any]:
        language = interpreter.tl
        return [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (language, language.core)]

    def _patch_once(fn: Callable[..., Any]) -> interpreter._LangPatchScope:
        """The interpreter patches the language again for each function that a kernel calls."""
        languages = _languages(fn)
        if languages and not any(interpreter.tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return _patch_lang(fn)

    def _get_np_dtype(dtype: Any) -> Any:
        """The interpreter makes a dictionary of all types for each question."""
        element = dtype.element_ty if isinstance(dtype, interpreter.tl.block_type) else dtype
        return _np_dtype(interpreter.tl.uint64 if isinstance(element, interpreter.tl.pointer_type) else element)

    interpreter._patch_lang, interpreter._get_np_dtype = _patch_once, _get_np_dtype

# Triton's interpreter multiplies bfloat16 matrices as if they were integers.
HALF = torch.bfloat16 if CUDA else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF])


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(ours: torch.Tensor, theirs: torch.Tensor, factor: float = 1.0) -> None:
    """Require equality up to the usual tolerance of the dtype, or so many times as much."""
    tolerance = factor * TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def tree_mask(parents: list[int]) -> list[list[int]]:
    words = []
    for node in range(len(parents)):
        word, above = 1 << node, node
        while above:
            above = parents[above]
            word |= 1 << above
        words.append([word, 0])
    return words
