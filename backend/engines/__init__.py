"""Engines of the port ``backend.engines.port.Engine``; the only modules that know a tensor library,
imported lazily.
"""
