"""A decoder step with verification as one TensorRT network. It shows correctness; it is no serving
path, and does not grow.
"""
