"""One thread a process: two workers of pytest and the engines they start share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
