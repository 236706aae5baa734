"""Without a GPU the kernels run under Triton's interpreter, chosen before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
