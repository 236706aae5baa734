"""Offline tools: checkpoints, drafts, latency tables."""
