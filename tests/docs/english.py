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


_FRONTED = re.compile(r"(?:^|[.?!] |\n\n)(?:What|Where|Whose|Who|Of)\b")
"""Beginnings of sentences that begin with their object, paragraphs an empty line apart."""


def foreign(text: str) -> list[str]:
    """Return the words of a text that it should do without."""
    return _PATTERN.findall(" ".join(text.split()))


def fronted(text: str) -> list[str]:
    """Return the beginnings of those sentences of a comment or docstring that are fronted."""
    paragraphs = re.split(r"\n\s*\n", text.strip('rf"# \n'))
    plain = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    return [found.strip(".?! \n") for found in _FRONTED.findall(plain)]


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
