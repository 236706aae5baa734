"""What operators ask for while the service runs, and before it starts."""
