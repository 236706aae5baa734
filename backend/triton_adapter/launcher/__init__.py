"""``python -m backend.triton_adapter.launcher``: run the packaged tritonserver with this project's models and keep it running."""
