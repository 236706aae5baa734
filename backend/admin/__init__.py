"""Requests of operators while the service runs, and before it starts."""
