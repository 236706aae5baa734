"""TensorRT-LLM's LLM API as a hosted engine: written from its sources, run on a fake only."""
