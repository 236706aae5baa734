"""Engines and tables of TensorRT-LLM, with its own programs."""
