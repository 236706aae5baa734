"""Decoders of transformers for every engine: their attention, their refusals and their weights."""
