"""Messages between Triton's stubs and the engine process."""
