"""The CPU kernels as numba compiles them. A hash of this folder names the compiled code on disk."""
