"""Describes and compiles the networks of ``backend.engines.trt_graph``, which show correctness and
are no serving path.
"""
