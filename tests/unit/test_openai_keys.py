"""Keys of callers, and the tenants that several keys stand for."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from backend.openai_frontend.access import Keys, tenant_of, tenant_salt
from backend.openai_frontend.errors import ApiError

SALTS = st.none() | st.text(min_size=1)


def calls(keys, path="/v1/completions", **headers):
    return Keys(keys).tenant(path, Headers(headers))


def test_one_key_or_none_makes_all_callers_one_tenant():
    assert calls(()) == ""
    assert calls(("a",), authorization="Bearer a") == ""


def test_several_keys_are_several_tenants():
    first, second = (calls(("a", "b"), authorization=f"Bearer {key}") for key in "ab")
    assert first != second
    assert first
    assert second


@pytest.mark.parametrize("path", ["/metrics", "/explain"])
def test_figures_of_all_tenants_are_for_the_first_key(path):
    assert calls(("a", "b"), path, authorization="Bearer a")
    with pytest.raises(ApiError) as error:
        calls(("a", "b"), path, authorization="Bearer b")
    assert error.value.status == 403
    for wrong in ("Bearer c", "Bearer", "a", ""):
        with pytest.raises(ApiError) as error:
            calls(("a", "b"), path, authorization=wrong)
        assert error.value.status == 401


@given(st.text(), st.text(), SALTS, SALTS)
def test_no_salt_that_a_client_chooses_is_another_tenant_s(key, other, salt, guess):
    assume(key != other)
    mine = tenant_salt(tenant_of(key), salt)
    assert tenant_salt(tenant_of(other), guess) != mine
    assert tenant_salt(tenant_of(other), mine) != mine
    assert tenant_salt(tenant_of(key), salt) == mine


@given(SALTS)
def test_a_single_tenant_s_salts_stay_its_own(salt):
    assert tenant_salt("", salt) == salt
