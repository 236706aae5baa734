"""The text model under the name of NVIDIA's BLS model."""

from backend.triton_adapter.generation_model import TritonPythonModel  # noqa: F401
