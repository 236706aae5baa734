"""The text model under the name of NVIDIA's ensemble."""

from backend.triton_adapter.generation_model import TritonPythonModel  # noqa: F401
