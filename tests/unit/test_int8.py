"""Matrices in int8: exact integer products, rows that no batch changes, and nothing lost but what
rounding the weights loses.
"""

import pytest
import torch

from backend.engines.torch import int8
from backend.engines.torch.checkpoint import CheckpointError
from backend.engines.torch.int8 import Int8Linear

pytestmark = pytest.mark.skipif(
    not int8._exact(), reason="no exact int8 products on this processor"
)


def rounded(weight):
    """The weight that int8 keeps, in float64."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scales).round().double() * scales.double()


@pytest.mark.parametrize("outlier", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_that_of_the_rounded_weight_but_for_two_digits_of_a_row(outlier, dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 200), torch.randn(96)
    rows = torch.randn(7, 200)
    rows[:, 3] *= outlier
    rows = rows.to(dtype)
    exact = rows.double() @ rounded(weight).T + bias.double()
    step = (
        rows.double().abs().amax(1, keepdim=True) / 127 / 254
    )  # a half of it is lost of every element
    bound = 0.51 * step * rounded(weight).abs().sum(1) + exact.abs() * torch.finfo(dtype).eps + 1e-4
    found = (
        Int8Linear(weight.to(dtype).float(), bias)(rows)
        if dtype == torch.float32
        else Int8Linear(weight, bias)(rows)
    )
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= bound).all()


def test_a_row_is_the_same_to_the_bit_in_any_batch():
    torch.manual_seed(1)
    linear, rows = Int8Linear(torch.randn(300, 576)), torch.randn(40, 576).bfloat16()
    rows[::3, 5] *= 300.0
    together = linear(rows)
    for first, end in ((0, 1), (1, 3), (7, 16), (16, 40)):
        assert torch.equal(linear(rows[first:end]), together[first:end])


def test_rows_and_weights_of_zeros_give_zeros():
    weight = torch.randn(5, 64)
    weight[2] = 0.0
    found = Int8Linear(weight)(torch.stack([torch.zeros(64), torch.ones(64)]).bfloat16())
    assert not found.isnan().any()
    assert (found[0] == 0).all()
    assert found[1, 2] == 0


def test_a_processor_that_saturates_is_refused(monkeypatch):
    monkeypatch.setattr(int8, "_multiply", lambda digits, packed: torch.full((2, 4), 32767.0))
    with pytest.raises(CheckpointError, match="VNNI"):
        Int8Linear(torch.ones(4, 64))
