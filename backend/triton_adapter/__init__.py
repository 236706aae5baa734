"""The only package that knows Triton: it turns tensors into wire messages and back."""
