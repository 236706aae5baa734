"""The parts that all step engines share: turns to passes, KV by sequence, verdicts to tokens."""
