"""The only package that knows Triton: it turns tensors into messages and back."""
