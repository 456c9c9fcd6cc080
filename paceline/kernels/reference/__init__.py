"""The reference kernels in plain torch: any device and dtype, differentiable. Every faster backend is tested against them."""
