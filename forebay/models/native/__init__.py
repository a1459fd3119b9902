"""Compiled kernels for the CPU: whole decoder layers over paged keys and values in C, built on this machine at first use."""
