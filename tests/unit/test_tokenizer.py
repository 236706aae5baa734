import json
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from backend.checked_settings import ConfigError
from backend.request import RequestError
from backend.tokenizer import ByteTokenizer, IncrementalDecoder, TokenizerError, load_tokenizer
from tests.fakes.checkpoints import LFS_POINTER

TEXTS = [
    "hello world",
    "naïve café — ½ €5",
    "日本語のテスト",
    "👩‍👩‍👧 family 😀!",
    "tabs\tand\n\nlines  \n",
    "",
    " leading",
]


def byte_level():
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    library.add_tokens(["<plain added>"])
    return library


def metaspace(strip=True):
    words = ["▁", "▁he", "llo", "▁world", "é", "▁▁", "<0xZZ>"]
    vocabulary = {
        token: i
        for i, token in enumerate(
            ["<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *words]
        )
    }
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    library.add_special_tokens(["<s>", "</s>"])
    return library


def folder_of(path, library, **config):
    path.mkdir(parents=True, exist_ok=True)
    library.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 1, **config}))
    return path


def decode(table, ids, **options):
    decoder = IncrementalDecoder(table, **options)
    return "".join(map(decoder.push, ids)) + decoder.finish()


def test_byte_level_text_survives_token_by_token(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level()))
    for text in TEXTS:
        assert decode(tokenizer.token_bytes, tokenizer.encode(text)) == text


def test_a_character_cut_over_tokens_appears_when_it_is_whole(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level()))
    ids = [tokenizer.token_bytes.index(bytes([value])) for value in "€".encode()]
    decoder = IncrementalDecoder(tokenizer.token_bytes)
    assert [decoder.push(token) for token in ids] == ["", "", "€"]
    assert decoder.finish() == ""


def test_an_incomplete_tail_is_flushed_as_one_replacement_character(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level()))
    ids = [tokenizer.token_bytes.index(bytes([value])) for value in "€".encode()[:2]]
    assert decode(tokenizer.token_bytes, ids) == "�"


def test_special_tokens_and_padding_ids_are_no_text_but_added_words_are(tmp_path):
    library = byte_level()
    tokenizer = load_tokenizer(folder_of(tmp_path, library))
    special, added = library.token_to_id("<|end|>"), library.token_to_id("<plain added>")
    assert (
        decode(tokenizer.token_bytes, [special, added, tokenizer.vocab_size + 7]) == "<plain added>"
    )
    assert tokenizer.special_tokens == {"<|end|>": special}
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_metaspace_and_byte_fallback_tokens_have_their_bytes(tmp_path):
    library = metaspace()
    tokenizer = load_tokenizer(folder_of(tmp_path, library))
    ids = [
        library.token_to_id(token)
        for token in ["<s>", "▁he", "llo", "▁world", "<0xE2>", "<0x82>", "<0xAC>", "▁▁", "<0xZZ>"]
    ]
    assert decode(tokenizer.token_bytes, ids) == " hello world€  <0xZZ>"
    assert decode(tokenizer.token_bytes, ids, strip_space=tokenizer.strips_space) == library.decode(
        ids
    )


def test_only_a_decoder_with_strip_drops_the_first_space(tmp_path):
    assert load_tokenizer(folder_of(tmp_path / "a", metaspace())).strips_space
    assert not load_tokenizer(folder_of(tmp_path / "b", metaspace(strip=False))).strips_space


def test_another_decoder_is_refused_by_name(tmp_path):
    library = byte_level()
    library.decoder = decoders.WordPiece()
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: decoder .*WordPiece.* not supported"
    ):
        load_tokenizer(folder_of(tmp_path, library))


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.tokenizer\.json"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot load .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(LFS_POINTER)
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json is a Git LFS pointer, .*`git lfs pull`"
    ):
        load_tokenizer(tmp_path)


END, ADDED = 0, 300
"""Ids of ``<|end|>`` and ``<plain added>`` in ``byte_level``."""


def ends_of(path, config, generation=None, **names):
    """Return the end ids of a folder with these files, that of the tokenizer first."""
    folder = folder_of(path, byte_level(), **{"eos_token_id": None, **config})
    for name, content in {"generation_config": generation, **names}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.end_id in tokenizer.end_ids
    return [tokenizer.end_id, *sorted(tokenizer.end_ids - {tokenizer.end_id})]


NAMED = {"tokenizer_config": {"eos_token": "<|end|>"}}


@pytest.mark.parametrize(
    ("config", "generation", "names", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [3, 4]}, {}, [3, 4]),
        ({"eos_token_id": 1}, {"eos_token_id": 5}, {}, [5]),
        ({"eos_token_id": [1, 2]}, {}, {}, [1, 2]),
        ({"eos_token_id": 1}, None, {}, [1]),
        ({"eos_token_id": 1}, None, NAMED, [END, 1]),
        ({"eos_token_id": 1}, {"eos_token_id": [7, END]}, NAMED, [END, 7]),
        ({}, None, NAMED, [END]),
        ({}, {"eos_token_id": []}, NAMED, [END]),
        ({"eos_token_id": 7}, None, {"special_tokens_map": {"eos_token": "<|end|>"}}, [END, 7]),
        (
            {"eos_token_id": 7},
            None,
            {"tokenizer_config": {"eos_token": {"content": "<plain added>", "special": False}}},
            [ADDED, 7],
        ),
        ({"eos_token_id": 7}, None, {"tokenizer_config": {"eos_token": "absent"}}, [7]),
        ({"eos_token_id": 7}, None, {"tokenizer_config": {"eos_token": None}}, [7]),
        ({"text_config": {"eos_token_id": 7, "vocab_size": 300}}, None, NAMED, [END, 7]),
        ({"eos_token_id": [320, 8], "vocab_size": 400}, None, {}, [8, 320]),
    ],
)
def test_the_ends_are_those_of_the_model_and_that_of_the_tokenizer(
    tmp_path, config, generation, names, expected
):
    assert ends_of(tmp_path, config, generation, **names) == expected


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        ({"eos_token_id": [3, 99999]}, {}, [3]),
        ({"eos_token_id": 99999}, NAMED, [END]),
        ({"eos_token_id": [-1, 3]}, NAMED, [END, 3]),
        ({"eos_token_id": 320, "vocab_size": 310}, NAMED, [END]),
        (
            {"eos_token_id": 3, "vocab_size": 290},
            {"tokenizer_config": {"eos_token": "<plain added>"}},
            [3],
        ),
    ],
)
def test_ends_that_the_model_has_no_row_for_are_left_out(tmp_path, caplog, config, names, expected):
    assert ends_of(tmp_path, config, **names) == expected
    if config["eos_token_id"] == 99999:
        assert "config.json: eos_token_id must be token ids below 301, got 99999" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "names no token that ends a text: neither an eos_token_id in generation_config.json"),
        ({"eos_token_id": 99999}, r"config\.json: eos_token_id must be token ids below 301, got 9"),
        ({"eos_token_id": "2"}, r"config\.json: eos_token_id must be token ids, got '2'"),
        ({"eos_token_id": 320, "vocab_size": 400}, "is one of the tokenizer's"),
    ],
)
def test_a_folder_without_an_end_is_refused(tmp_path, config, words):
    with pytest.raises(ConfigError, match=words):
        ends_of(tmp_path, config)


def test_special_tokens_are_added_only_on_request(tmp_path):
    library = byte_level()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    tokenizer = load_tokenizer(folder_of(tmp_path, library))
    assert tokenizer.encode("hello") == [0, *tokenizer.encode("hello", add_special_tokens=False)]


@pytest.mark.parametrize(
    "make",
    [lambda path: ByteTokenizer(), lambda path: load_tokenizer(folder_of(path, byte_level()))],
)
def test_a_lone_surrogate_is_an_invalid_argument(tmp_path, make):
    with pytest.raises(RequestError, match=r"lone surrogate .* at character 2") as error:
        make(tmp_path).encode("ab\ud800")
    assert error.value.code == "INVALID_ARGUMENT"


def test_the_byte_tokenizer_maps_bytes_and_ends_with_its_last_id():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert decode(tokenizer.token_bytes, [*tokenizer.encode("é!"), *tokenizer.end_ids]) == "é!"
    assert (tokenizer.vocab_size, tokenizer.end_ids) == (257, {256})


def test_other_threads_run_while_a_long_text_is_tokenised(tmp_path):
    """``Tokenizer.encode`` would hold Python's lock all the time."""
    tokenizer = load_tokenizer(folder_of(tmp_path, byte_level()))
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(tokenizer.encode, "1a " * 300_000)
        while not ids.done():
            turns += 1
            sleep(0.001)
    assert len(ids.result()) >= 300_000
    assert turns > 20
