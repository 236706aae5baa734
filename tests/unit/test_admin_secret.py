"""Which administrative commands need the secret of the run."""

import os

import pytest

from backend.request import ErrorCode, RequestError
from backend.triton_adapter.admin_secret import VARIABLE, check_secret, ensure_secret

GUARDED = ["set speculation=off", "reload drafts", "explain", "learned", "switches", " set x", "?"]


@pytest.mark.parametrize("command", GUARDED)
@pytest.mark.parametrize(
    ("given", "words"), [("", "needs the secret"), ("another", "is not the one"), ("né", "not the")]
)
def test_a_command_without_the_secret_is_refused(monkeypatch, command, given, words):
    monkeypatch.setenv(VARIABLE, "right")
    with pytest.raises(RequestError, match=words) as error:
        check_secret(command, given)
    assert error.value.code == ErrorCode.INVALID_ARGUMENT
    assert "right" not in error.value.message
    check_secret(command, "right")


@pytest.mark.parametrize("command", GUARDED)
@pytest.mark.parametrize("unset", ["", None])
def test_without_a_secret_of_the_run_commands_are_off(monkeypatch, command, unset):
    monkeypatch.delenv(VARIABLE, raising=False)
    if unset is not None:
        monkeypatch.setenv(VARIABLE, unset)
    for given in ("", "any"):
        with pytest.raises(RequestError, match=f"off: set {VARIABLE}"):
            check_secret(command, given)


@pytest.mark.parametrize("command", ["health", " health "])
def test_probes_need_no_secret(monkeypatch, command):
    monkeypatch.setenv(VARIABLE, "right")
    check_secret(command, "")


def test_a_secret_is_drawn_once_unless_the_operator_gives_one(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    ensure_secret()
    drawn = os.environ[VARIABLE]
    ensure_secret()
    assert len(drawn) >= 32
    assert os.environ[VARIABLE] == drawn
    monkeypatch.setenv(VARIABLE, "given")
    ensure_secret()
    assert os.environ[VARIABLE] == "given"
