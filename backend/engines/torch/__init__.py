"""The readable reference engine: one Llama forward on torch, CPU and CUDA."""
