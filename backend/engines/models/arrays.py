"""Results of torch as the arrays that the loop samples from."""

from __future__ import annotations

import torch

from backend.sampling.distributions import Floats


def to_array(
    rows: torch.Tensor,  # [rows, ...]
) -> Floats:
    """Return rows in fp32 (fp64 stays). This waits for their device, also where there are none:
    the time of a pass without results is its own.
    """
    if rows.is_cuda and not len(rows):
        torch.cuda.current_stream(rows.device).synchronize()
    wide = rows if rows.dtype == torch.float64 else rows.float()
    array: Floats = wide.detach().cpu().numpy()
    return array
