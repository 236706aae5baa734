"""No text is refused from its bytes that the tokenizer fits into the context."""

import json
import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from backend.limits import NO_BOUND
from backend.tokenizer import load_tokenizer

pytestmark = pytest.mark.medium

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "f" * 32,
    "=" * 40 + " " * 33 + "\n" * 20,
    "\u65e5\u672c\u8a9e \u00e9\u00e8 e\u0301 \U0001f600 \U0001d41a 12345 67890",
]
LIGATURE = "\ufdfa"
ADDED = ["<|end|>", "<|a longer special token|>", "\u00e9<fancy>"]


def byte_level(*steps, normalizer=None, **options):
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, **options)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=ADDED[:1],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens(ADDED)
    return library


def sentence_piece(
    normalizer=None, pre_tokenizer=None, model=models.BPE, added=ADDED, byte_fallback=True
):
    """As Llama 2's: bytes for what is not in the vocabulary, a mark for a space."""
    pieces = [
        "\u2581",
        "\u2581t",
        "th",
        "he",
        "\u2581the",
        "\u2581\u2581",
        "q",
        "t",
        "h",
        "e",
        "=",
        "==",
    ]
    names = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    merges = [("\u2581", "t"), ("t", "h"), ("h", "e"), ("\u2581t", "he"), ("=", "=")]
    merges.append(("\u2581", "\u2581"))
    if model is models.BPE:
        vocabulary = {name: number for number, name in enumerate(names)}
        kind = models.BPE(
            vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
        )
    else:
        kind = model([(name, -float(len(name))) for name in names], 0, byte_fallback=True)
    library = tokenizers.Tokenizer(kind)
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(list(added))
    return library


def llama_2():
    replace = normalizers.Replace(" ", "\u2581")
    return sentence_piece(normalizers.Sequence([normalizers.Prepend("\u2581"), replace]))


def grown():
    """An added token that is matched in the normalised text, as which it is 11 times as long."""
    library = byte_level(normalizer=normalizers.NFKC())
    library.add_tokens([AddedToken(LIGATURE * 20, normalized=True)])
    return library


def pruned(**options):
    """As SmolLM2's: some bytes have no token and are left out without a word."""
    spec = json.loads(byte_level(**options).to_str())
    for character in ("\u0104", "\u011d", "q"):  # 4 and 0x1d as characters
        del spec["model"]["vocab"][character]
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "q" not in "".join(pair)]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


SWALLOWING = [
    AddedToken("<|left|>", lstrip=True, special=True),
    AddedToken("<|both|>", lstrip=True, rstrip=True, special=True, normalized=False),
    AddedToken("two words", rstrip=True, normalized=True),
]
SPLIT = tokenizers.Regex(r"\p{L}+|\p{N}{1,3}|[^\p{L}\p{N}]+")
MAKERS = {
    "GPT-2": byte_level,
    "no cuts": lambda: byte_level(use_regex=False),
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "Llama 3": lambda: byte_level(pre_tokenizers.Split(SPLIT, "isolated"), use_regex=False),
    "NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "grown": grown,
    "NFD": lambda: byte_level(normalizer=normalizers.NFD()),
    "shorter": lambda: byte_level(normalizer=normalizers.Replace("fox jumps", "f")),
    "pruned": pruned,
    "Llama 2": llama_2,
    "Metaspace": lambda: sentence_piece(pre_tokenizer=pre_tokenizers.Metaspace()),
    "Unigram": lambda: sentence_piece(
        pre_tokenizer=pre_tokenizers.Metaspace(), model=models.Unigram
    ),
    "swallowing": lambda: sentence_piece(
        normalizers.Replace(" ", "\u2581"), added=[*ADDED, *SWALLOWING]
    ),
}
UNBOUNDED = {
    "normaliser drops": lambda: byte_level(normalizer=normalizers.StripAccents()),
    "normaliser lowers": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "replaced by nothing": lambda: byte_level(normalizer=normalizers.Replace("a", "")),
    "a pattern": lambda: byte_level(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
    "bytes drop from what a normaliser makes": lambda: pruned(normalizer=normalizers.NFC()),
    "unknown tokens fuse": lambda: sentence_piece(byte_fallback=False),
    "cuts drop": lambda: byte_level(pre_tokenizers.WhitespaceSplit()),
    "split drops": lambda: byte_level(pre_tokenizers.Split(" ", "removed")),
}


def loaded(library, folder):
    library.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request, tmp_path_factory):
    return loaded(MAKERS[request.param](), tmp_path_factory.mktemp("tokenizer"))


FRAGMENTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from([*ADDED, *(str(token.content) for token in SWALLOWING), "fox jumps", "the"]),
    st.builds(
        str.__mul__,
        st.sampled_from([" ", "=", "\n", "\u3000", "\u0390", "\U0001d6ca\u0308\u0301", "e\u0301"]),
        st.integers(1, 300),
    ),
    st.builds(str.__mul__, st.sampled_from(CORPUS), st.integers(1, 3)),
)


@given(st.lists(FRAGMENTS, max_size=8).map("".join))
def test_a_text_that_fits_is_never_refused(tokenizer, text):
    if any("\ud800" <= character < "\ue000" for character in text):
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tokenizer._library.encode(text, add_special_tokens=False).ids
    assert tokenizer.bound.fits(text, len(ids))


def worst_texts(tokenizer):
    """Texts of as many bytes a token as there are."""
    pieces = {*map(bytes.decode, filter(bytes.isascii, tokenizer.token_bytes)), *ADDED}
    for piece in sorted(pieces, key=len)[-20:]:
        yield piece * 50
        yield "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in piece) * 50
        yield piece.replace("f", "fox jumps") * 50
        yield piece * 50 + "\u2581" * 100
        yield ("\x04\x1dq" * 30).join(piece) * 50
        yield unicodedata.normalize("NFD", piece * 50)
    yield unicodedata.normalize("NFKC", LIGATURE * 200)
    for token in SWALLOWING:
        yield (" " * 1000 + str(token.content) + "\u3000" * 1000) * 3


def test_nor_is_the_longest_text_of_that_many_tokens(tokenizer):
    for text in worst_texts(tokenizer):
        assert tokenizer.bound.fits(text, len(tokenizer.encode(text, add_special_tokens=False)))


def test_every_one_of_them_has_a_bound(tokenizer):
    assert tokenizer.bound.bytes_per_token < 1000
    assert not tokenizer.bound.fits("\u65e5" * 10_000, 10)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_drops_text_has_none(name, tmp_path):
    assert loaded(UNBOUNDED[name](), tmp_path).bound == NO_BOUND
