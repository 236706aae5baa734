"""The model of token ids, under the name of NVIDIA's."""

from backend.triton_adapter.generation_model import TritonPythonModel  # noqa: F401
