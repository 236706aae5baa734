"""A decoder step with verification as one TensorRT network. It shows correctness; it is no serving
path, and does not grow.
"""

LIBRARIES = ("tensorrt_rtx", "tensorrt")
"""The libraries that compile and read networks; a folder names no other module."""
