import json

import pytest

from backend.kinds import KINDS
from tests.hot_paths import RECORD, code, digests


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.measured])
def test_code_that_a_pass_runs_does_not_change_without_a_word_on_its_times(kind):
    """``tests/hot_paths.py`` says what to do when this fails."""
    assert digests()[kind] == json.loads(RECORD.read_text())[kind]


def test_words_and_layout_are_no_change():
    plain = "def f(x):\n    return x  # as it is\n"
    told = 'def f(x):\n    """Give it back."""\n\n    return x\n'
    assert code(plain) == code(told)
    assert code(plain) != code("def f(x):\n    return -x\n")
