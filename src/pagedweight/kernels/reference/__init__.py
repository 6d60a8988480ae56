"""The contract in plain torch: what the other kernels are tested against."""
