"""Reading of grammars in a child process, which may be killed by what it reads."""

import json
import os
import signal

import pytest

from backend.sampling.guides import Grammars
from backend.sampling.reading import GrammarProcess, TryAgainError
from backend.tokenizer import ByteTokenizer

ENDLESS = {
    "a multiple of a prime": {"type": "integer", "multipleOf": 99_999_989},
    "many patterns": {
        "allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(10, 40)]
    },
}


@pytest.fixture(scope="module")
def process():
    """The child, with a second of processor time for each grammar."""
    reader = GrammarProcess(300, longest_s=1)
    yield reader
    reader.close()


@pytest.mark.medium
@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_that_takes_long_is_refused_and_the_next_is_read(process, name):
    with pytest.raises(ValueError, match="it takes over 1 s to read"):
        process.read("json_schema", json.dumps(ENDLESS[name]))
    assert "json_schema" in process.read("json_schema", '{"type": "null"}')


@pytest.mark.medium
def test_the_child_reads_what_the_parser_takes_and_says_what_is_wrong(process):
    assert process.read("regex", "[a-z]+\u2028é")
    assert process.read("ebnf_grammar", 'start: <[299]> "a"')
    for kind, text, reason in (
        ("ebnf_grammar", 'start: <[301]> "a"', "Token range end too large"),
        ("json_schema", '{"type": "nope"}', "Invalid type: nope"),
        ("json_schema", "[1]", "must be an object or a boolean"),
        ("json_schema", '{"oneOf": [{}, {}]}', "oneOf at #: alternatives 1 and 2"),
        ("regex", "[ab", "unclosed character class"),
    ):
        with pytest.raises(ValueError, match=reason):
            process.read(kind, text)


@pytest.mark.medium
def test_a_deep_grammar_does_not_end_the_child(process):
    links = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(2000)}
    assert process.read(
        "json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": links | {"d2000": {}}})
    )


@pytest.mark.medium
def test_a_child_that_dies_is_started_again(process):
    assert process.read("regex", "a")
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.read("regex", "b")


@pytest.mark.medium
def test_a_child_that_dies_while_it_reads_refuses_nothing_for_good(process, monkeypatch):
    assert process.read("regex", "a")
    os.kill(process._process.pid, signal.SIGSTOP)
    os.waitpid(process._process.pid, os.WUNTRACED)  # until it has stopped
    monkeypatch.setattr("backend.sampling.reading.LONGEST_WAIT_S", 0.1)
    grammars = Grammars(ByteTokenizer(), read=process.read)
    with pytest.raises(TryAgainError, match="try again later"):
        process.read("regex", "c")
    monkeypatch.undo()
    assert grammars.guide("regex", "c", ByteTokenizer().end_ids).mask([])[ord("c")]
