"""CPU kernels: compiled with numba for any instruction set, run on the threads of torch's OpenMP runtime."""
