"""The owner of the engine process."""

from backend.triton_adapter.owner_model import TritonPythonModel  # noqa: F401
