"""Triton kernels for CUDA devices. Import `ops` only where Triton is installed."""
