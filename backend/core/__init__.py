"""The loop, and what it works on: the batch, turns in flight, sessions, admission, KV blocks."""
