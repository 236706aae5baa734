"""Words that pages and code do without, each with what to say instead."""

import io
import re
import tokenize
from collections.abc import Iterator

INSTEAD = {
    "behind": "after",
    "beside": "next to, along with",
    "besides(?=[.,:;)])": "also",
    "anew": "again",
    "told": "reported",
    r"held(?!\W(?:back|out|a lock)\b)": "matched, accepted, kept",
    "so many": "this many, or the number's name",
    "hangs on": "depends on",
    "comes to": "is",
    "laws?": "distribution",
    "nobody|whoever": "no request, any client",
    "(?<!each )(?<!many )(?<!none )of which": "two sentences",
}
"""Patterns of plain text, words one space apart."""
_PATTERN = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)


def foreign(text: str) -> list[str]:
    """Return the words of a text that it should do without."""
    return _PATTERN.findall(" ".join(text.split()))


def prose_and_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the comments, docstrings and names of a module. Other strings are
    data, and so is what a docstring has between double backticks.
    """
    begins = True  # a statement: a string there is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string.replace("_", " ")
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and begins):
            yield token.start[0], re.sub("``.*?``", "", token.string, flags=re.DOTALL)
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            begins = False
