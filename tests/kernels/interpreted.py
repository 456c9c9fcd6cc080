"""Triton through its interpreter, where there is no GPU. Importing this module skips the test file if that is not possible."""

from __future__ import annotations

import importlib.util
import os
import sys

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
