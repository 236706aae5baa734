"""Whatever the texts of other tenants are, what is known of a tenant is the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.acceptance import AcceptanceConfig, AcceptanceModel
from policy.loops.acceptance import Chains, set_hazards
from policy.tenants import Tenants

K, DRAFTS = 4, 2
CHAIN = st.tuples(
    st.integers(0, 2),  # tenant
    st.integers(0, 1),  # which of its requests
    st.integers(0, DRAFTS - 1),
    st.integers(0, K),  # accepted
    st.integers(1, K),  # scored
    st.booleans(),  # its last
)


def hazards(state, requests):
    drafts, k_max = state.estimates.deviation.shape[1], state.estimates.draft_hazard.shape[2]
    hazard = np.empty((k_max, drafts, len(requests)))
    evidence = np.zeros((len(requests), drafts), np.int64)
    set_hazards(state.estimates, state.find(np.array(requests))[0], evidence, hazard)
    return hazard


def learnt(chains):
    """Estimates after chains, one a step, of requests that come with their first one."""
    model, tenants = AcceptanceModel(DRAFTS, K, AcceptanceConfig()), Tenants()
    state, over = model.start(), {}
    for tenant, which, draft, accepted, scored, last in chains:
        request = [100 * tenant + 10 * which + 1000 * over.get((tenant, which), 0)]
        before = tenants.rows
        tenants, emptied = tenants.admit(request, [tenant], 8)
        if emptied or tenants.rows != before:
            state = model.with_tenants(state, tenants.rows, emptied)
        state = model.admit(state, np.array(request), tenants.of(request))
        columns = (np.array([value]) for value in (draft, accepted, scored, 0))
        chains = Chains(np.array(request), *columns), Chains(*[np.zeros(0, np.int64)] * 5)
        state, _ = model.observe(state, chains[0], np.array([accepted + 1]), chains[1])
        if last:
            state, tenants = model.forget(state, request), tenants.without(request)
            over[tenant, which] = over.get((tenant, which), 0) + 1
    return model, state, tenants


@settings(max_examples=60)
@given(st.lists(CHAIN, max_size=40), st.integers(0, 2))
def test_other_texts_of_other_tenants_change_nothing_that_is_known_of_a_tenant(chains, tenant):
    others = [
        c if c[0] == tenant else (*c[:2], 1 - c[2], K - c[3], 1 + K - c[4], c[5]) for c in chains
    ]
    _, one, tenants = learnt(chains)
    _, other, _ = learnt(others)
    if tenant not in tenants.ids.tolist():
        return
    row = tenants.ids.tolist().index(tenant)
    for name in ("draft_accepted", "draft_reached", "draft_hazard", "variance"):
        columns = (
            getattr(s.estimates, name)[row * DRAFTS : (row + 1) * DRAFTS] for s in (one, other)
        )
        np.testing.assert_allclose(*columns, rtol=1e-12, atol=1e-12)
    assert one.estimates.requests[row] == other.estimates.requests[row]
    for request in [request for request, place in tenants.row.items() if place == row]:
        np.testing.assert_allclose(*(hazards(s, [request]) for s in (one, other)), rtol=1e-12)
