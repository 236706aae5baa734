"""TensorRT-LLM's executor: written against recorded signatures, run on a fake only."""
