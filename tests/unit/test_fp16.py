"""Matrices in fp16: products in fp32 of weights that lose nothing but what fp16 loses."""

import pytest
import torch

from backend.engines.torch import fp16, llama
from backend.engines.torch.checkpoint import CheckpointError
from backend.engines.torch.fp16 import Fp16Linear

pytestmark = pytest.mark.skipif(not fp16.supported(), reason="no fp16 matrices on this processor")


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 7, 13, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_fp32s_of_the_rounded_weight(rows, dtype):
    torch.manual_seed(0)
    weight, bias, batch = torch.randn(100, 200), torch.randn(100), torch.randn(rows, 200).to(dtype)
    batch[:, 3] *= 300.0
    exact = batch.double() @ weight.half().double().T + bias.double()
    found = Fp16Linear(weight.half(), bias)(batch)
    assert found.dtype == dtype
    assert (
        (found.double() - exact).abs()
        <= 4e-6 * (batch.double().abs() @ weight.double().abs().T + 1)
    ).all()
    assert torch.equal(Fp16Linear(weight)(batch), Fp16Linear(weight.half())(batch))


def test_weights_that_were_bf16_are_the_same_but_for_the_smallest():
    torch.manual_seed(1)
    values = torch.randn(4000).bfloat16()
    weight = torch.cat([values, values * 2**-9, torch.tensor([65280.0]).bfloat16()])
    weight = weight[weight.abs() >= 2**-17]
    assert torch.equal(weight.half().double(), weight.double())
    tiny = torch.tensor([1e-6, 3e-8, 1e-9]).bfloat16()
    assert ((tiny.half().double() - tiny.double()).abs() <= 3e-8).all()


def test_a_processor_without_them_is_refused(monkeypatch):
    monkeypatch.setattr(fp16, "supported", lambda: False)
    with pytest.raises(CheckpointError, match="AVX2"):
        Fp16Linear(torch.ones(4, 64))
    with pytest.raises(CheckpointError, match="AVX2"):
        llama.Llama._linear(stand_in(), torch.ones(512, 512))


def test_small_weights_stay_plain():
    assert isinstance(llama.Llama._linear(stand_in(), torch.ones(16, 16).half()), llama.Linear)
    assert isinstance(llama.Llama._linear(stand_in(), torch.ones(512, 512).half()), Fp16Linear)


def stand_in():
    """What a model's matrices are made by."""
    model = object.__new__(llama.Llama)
    model._matrices, model.dtype = "fp16", torch.float32
    return model
