"""Measurements: the load sweep, peers beside it, and single parts."""
