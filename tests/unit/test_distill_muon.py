import pytest
import torch

from engines_build.distill.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_an_orthogonal_step_has_the_directions_of_the_gradient_and_about_one_length(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonal(matrix) @ right.T
    assert values.max() > 1.5 * values.min()
    lengths = found.diagonal()
    assert lengths.min() > 0.6
    assert lengths.max() < 1.25
    assert (found - lengths.diag()).abs().max() < 1e-4


def test_steps_are_of_adamw_s_size_and_shrink_what_has_no_gradient():
    matrix = torch.nn.Parameter(torch.ones(32, 128))
    optimiser = Muon([matrix], lr=0.01, weight_decay=0.0)
    matrix.grad = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    optimiser.step()
    size = (matrix.detach() - 1).square().mean().sqrt().item()
    assert 0.5 * 0.2 * 0.01 < size < 1.5 * 0.2 * 0.01
    still = torch.nn.Parameter(torch.ones(4, 4))
    still.grad = torch.zeros(4, 4)
    Muon([still], lr=0.01, weight_decay=0.5).step()
    torch.testing.assert_close(still.detach(), torch.full((4, 4), 0.995))


def test_it_finds_a_matrix_from_what_it_does():
    noise = torch.Generator().manual_seed(1)
    wanted, inputs = (torch.randn(shape, generator=noise) for shape in ((12, 20), (20, 256)))
    matrix = torch.nn.Parameter(torch.zeros(12, 20))
    optimiser = Muon([matrix], lr=0.1, weight_decay=0.0)
    for step in range(300):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / 300)
        optimiser.zero_grad()
        ((matrix - wanted) @ inputs).square().mean().backward()
        optimiser.step()
    assert (matrix - wanted).abs().mean() < 0.02


def test_it_goes_on_from_what_was_saved():
    def run(optimiser, matrix, steps):
        for seed in steps:
            matrix.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            optimiser.step()

    whole = torch.nn.Parameter(torch.zeros(8, 8))
    run(Muon([whole], lr=0.1), whole, range(6))
    parts = torch.nn.Parameter(torch.zeros(8, 8))
    first = Muon([parts], lr=0.1)
    run(first, parts, range(3))
    second = Muon([parts], lr=0.1)
    second.load_state_dict(first.state_dict())
    run(second, parts, range(3, 6))
    torch.testing.assert_close(whole, parts)
