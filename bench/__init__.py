"""Measurements: the load sweep, peers, the simulator's evidence, the CUDA probe, single parts."""
