"""The contract on the CPU: planes read in place by code that numba compiles at first use."""
