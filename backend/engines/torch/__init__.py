"""The readable reference engine: decoders of transformers on torch, CPU and CUDA."""
