"""Policies over traces of a real target with two drafts: ``python -m bench.traces``."""
