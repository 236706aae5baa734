"""The tokenizer under the name of NVIDIA's postprocessing."""

from backend.triton_adapter.tokens_model import TritonPythonModel  # noqa: F401
