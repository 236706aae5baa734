import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from backend.tokenizer import IncrementalDecoder, load_tokenizer

SPECIAL = "<|end|>"


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "t"), ("h", "e"), ("â", "Ĥ"), ("âĤ", "¬"), ("ð", "Ł"), ("Ã", "©")]
    words = [SPECIAL, *alphabet, *("".join(pair) for pair in pairs)]
    library = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([SPECIAL])
    library.add_tokens(["<added one>", "<über>", "€"])
    return library


def metaspace():
    words = [
        SPECIAL,
        *(f"<0x{value:02X}>" for value in range(256)),
        "▁",
        "▁the",
        "▁▁",
        "é",
        "€",
        "a",
    ]
    library = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([SPECIAL])
    return library


def load(library):
    with tempfile.TemporaryDirectory() as name:
        library.save(f"{name}/tokenizer.json")
        (Path(name) / "config.json").write_text(json.dumps({"eos_token_id": 0}))
        return load_tokenizer(Path(name))


LIBRARIES = {"byte_level": byte_level(), "metaspace": metaspace()}
OURS = {name: load(library) for name, library in LIBRARIES.items()}


def decode(name, ids):
    decoder = IncrementalDecoder(OURS[name].token_bytes, strip_space=OURS[name].strips_space)
    return [decoder.push(token_id) for token_id in ids] + [decoder.finish()]


@given(st.data())
def test_any_ids_of_a_byte_level_tokenizer_decode_as_the_library_decodes_them(data):
    ids = data.draw(st.lists(st.integers(0, OURS["byte_level"].vocab_size + 2), max_size=30))
    assert "".join(decode("byte_level", ids)) == LIBRARIES["byte_level"].decode(ids)


@given(
    st.lists(st.sampled_from(["▁", "▁the", "▁▁", "é", "€", "a", SPECIAL, *"ñ€😀 \n"]), max_size=30)
)
def test_ids_of_a_byte_fallback_tokenizer_whose_bytes_are_text_decode_as_in_the_library(pieces):
    library = LIBRARIES["metaspace"]
    ids = []
    for piece in pieces:
        known = library.token_to_id(piece)
        ids += (
            [known]
            if known is not None
            else [library.token_to_id(f"<0x{value:02X}>") for value in piece.encode()]
        )
    assert "".join(decode("metaspace", ids)) == library.decode(ids)


@pytest.mark.parametrize("name", OURS)
@given(st.data())
def test_what_was_streamed_is_never_taken_back(name, data):
    ids = data.draw(st.lists(st.integers(0, OURS[name].vocab_size - 1), max_size=30))
    pushed = decode(name, ids)[:-1]
    for cut in range(len(ids)):
        assert decode(name, ids[: cut + 1])[:-1] == pushed[: cut + 1]
