import numpy as np
import pytest

from policy.deviation import bounded, posterior


def covariances(rng, n, drafts):
    root = rng.normal(size=(n, drafts, drafts))
    return 0.2 * root @ root.swapaxes(1, 2) + 0.1 * np.eye(drafts)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_the_posterior_is_that_of_normal_observations_however_many_rows_there_are(rows, drafts):
    rng = np.random.default_rng(rows)
    covariance, weight = covariances(rng, rows, drafts), rng.exponential(3.0, (rows, drafts)) * (rng.random((rows, drafts)) < 0.7)
    pull, expected = rng.normal(size=(rows, drafts)) * (weight > 0), rng.normal(size=(rows, drafts))
    mean, after = posterior(covariance, weight, pull, expected)
    assert (mean.shape, after.shape) == ((rows, drafts), (rows, drafts, drafts))
    for row in range(rows):
        prior = np.linalg.inv(covariance[row])
        known = np.linalg.inv(prior + np.diag(weight[row]))
        np.testing.assert_allclose(after[row], known, atol=1e-12)
        np.testing.assert_allclose(mean[row], known @ (prior @ expected[row] + pull[row]), atol=1e-12)


@pytest.mark.parametrize(
    "variances", [(1.0, 2.0, 0.5), (1e-6, 1.0, 1.0), (50.0, 1.0, 1.0), (4.0, 4.0, 4.0), (8.9, 8.9, 8.9), (-0.1, 1.0, 1.0)]
)
def test_a_bounded_covariance_has_its_axes_and_variances_within_bounds(variances):
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    given = (axes * variances) @ axes.T
    np.testing.assert_allclose(bounded(given), (axes * np.clip(variances, 1e-3, 9.0)) @ axes.T, atol=1e-12)
