"""Kernels of the CUDA engine, in Triton; only modules of this folder import it."""
