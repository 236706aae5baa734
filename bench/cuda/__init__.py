"""What the CUDA engine's kernels, products and whole steps cost on a GPU, with random weights."""
