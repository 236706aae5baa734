"""Engines behind ``backend.ports.Engine``; the only modules that know a tensor library, imported
lazily.
"""
