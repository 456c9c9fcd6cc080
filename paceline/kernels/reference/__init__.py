"""Plain torch kernels: the reference, on any device, differentiable. Every faster family is tested against them."""
