"""vLLM as a hosted target: its engine, scheduler and workers, and Spindle's front."""
