"""The text model under the name of NVIDIA's ensemble."""

from backend.triton_adapter.text_model import TritonPythonModel  # noqa: F401
