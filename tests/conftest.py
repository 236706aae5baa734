"""One thread a process: two workers of pytest and the engines they start share the cores. Without a
GPU, Triton's kernels run under its interpreter, which must be chosen before Triton is imported.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
