import json
import re

import pytest
import torch
from transformers import AutoTokenizer

from backend.engines.checkpoint import load, read_config
from backend.engines.head.folder import made_for
from backend.engines.head.network import load as load_head
from backend.storage.manifest import check_pair, read_manifest, weights_sha256
from backend.tokenizer import load_tokenizer
from engines_build.distill import command as distill
from engines_build.distill import family as distill_family
from engines_build.distill import unlikelihood as distill_unlikelihood
from engines_build.distill.arguments import parse
from engines_build.distill.corpora import Corpus
from engines_build.distill.family import Member, dialogues_of, family_texts, pieces
from engines_build.distill.train import Sample, Shape

pytestmark = pytest.mark.slow

MEMBERS = (Member("tiny-small", Shape(32, 1, 16, 4096)), Member("tiny-head"))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A family of two drafts, trained for a few steps."""
    folder = tmp_path_factory.mktemp("family")
    values = {
        "family": "tiny",
        "out": folder / "out",
        "work": folder / "work",
        "judged": "sql",
        "workloads": "sql",
    }
    values |= {
        "sources": "sql,stdlib",
        "hidden": 64,
        "layers": 2,
        "head-dim": 32,
        "target-tokens": 40_000,
        "unlikelihood-tokens": 2048,
    }
    values |= {
        "tokens": 200,
        "held-out-tokens": 200,
        "slots": 4,
        "warm-up-tokens": 0,
        "train-tokens": 3000,
        "batch": 4,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_family, "_QUESTIONS_PER_SCHEMA", 1)
        patch.setattr(distill, "DRAFTS", MEMBERS)
        patch.setattr(distill_unlikelihood, "CONTINUATIONS", 4)
        patch.setattr(distill_unlikelihood, "NEW_TOKENS", 24)
        distill.make_family(
            parse([word for name, value in values.items() for word in (f"--{name}", str(value))])
        )
    return folder / "out"


def test_the_target_loads_with_its_tokenizer_and_its_drafts_are_its_own(family):
    config, weights = load(family / "tiny-target", "fp32")
    assert (config.vocab_size, config.num_layers, config.tied) == (4096, 2, True)
    assert "lm_head.weight" not in weights
    tokenizer = load_tokenizer(family / "tiny-target")
    assert tokenizer.end_ids == {0, 2}
    text = "SELECT name FROM customers WHERE city = 'Łódź';\n"
    assert b"".join(tokenizer.token_bytes[i] for i in tokenizer.encode(text)).decode() == text
    check_pair(read_manifest(family / "tiny-target"), read_manifest(family / "tiny-small"))
    assert read_config(family / "tiny-small").draft_vocab_size == 4096
    assert made_for(family / "tiny-head") == weights_sha256(family / "tiny-target")
    assert load_head(family / "tiny-head")[0].config.layers == (1, 2)


def test_the_cards_name_losses_licences_and_the_command(family):
    card = (family / "tiny-target" / "README.md").read_text()
    assert "| sql |" in card
    assert "Apache-2.0" in card
    assert "--family tiny" in card
    assert "Then 2,048 tokens were read while it unlearnt its greedy loops" in card
    assert re.search(r"\| code \| 0\.\d\d, then 0\.\d\d \|", card)
    assert "(sql)" in (family / "tiny-small" / "README.md").read_text()


def test_the_targets_loss_falls(family):
    curve = [
        json.loads(line)
        for line in (family.parent / "work" / "tiny-target.jsonl").read_text().splitlines()
    ]
    assert curve[-1]["tokens"] >= 40_000
    assert curve[-1]["loss"] < 8.28  # that of all 4,096 tokens alike is 8.32


def test_texts_hold_questions_with_their_answers_in_a_seeded_order():
    corpora = [Corpus(["sql"], None, False, seed) for seed in (0, 0, 1)]
    first, again, other = (family_texts(corpus, ["hello"]) for corpus in corpora)
    assert first == again
    assert sorted(first) != sorted(other)
    assert any("SELECT" in text and "<|im_end|>" in text for text in first)
    assert "hello" in first


def test_pieces_are_full_and_lose_no_text(family):
    tokenizer = AutoTokenizer.from_pretrained(family / "tiny-target")
    texts = ["SELECT name FROM customers; " * 60, "CREATE TABLE hotels " * 90]
    found = list(pieces(texts, tokenizer))
    assert all(len(s.tokens) == 256 and torch.equal(s.tokens[1:], s.top_ids[:, 0]) for s in found)
    whole = [token for text in texts for token in [*tokenizer(text)["input_ids"], 0]]
    joined = torch.cat([s.tokens for s in found]).tolist()
    assert joined == whole[: len(joined)]
    assert len(whole) - len(joined) < 256


def test_dialogues_come_without_the_larger_models_system_message(family):
    tokenizer = AutoTokenizer.from_pretrained(family / "tiny-target")
    text = (
        "<|im_start|>system\nYou are "
        "another.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"
    )
    sample = Sample(
        torch.tensor(tokenizer(text)["input_ids"]), 3, "chat", torch.zeros(1, 1), torch.zeros(1, 1)
    )
    assert dialogues_of([sample], tokenizer) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--family", "tiny", "--target", "somewhere"], "--target, --family"),
        (["--family", "tiny", "--dialogues", "somewhere"], "--dialogue-tokenizer"),
        (["--family", "tiny", "--target-tokens", "0"], "--target-tokens: must be positive, got 0"),
        (
            ["--family", "tiny", "--unlikelihood-tokens", "-1"],
            "--unlikelihood-tokens: must not be negative, got -1",
        ),
    ],
)
def test_flags_that_do_not_fit_a_family_are_named(tmp_path, capsys, flags, named):
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--sources", "sql", *flags])
    assert named in capsys.readouterr().err


def test_the_device_is_checked_before_anything_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--family", "tiny", "--sources", "sql", "--device", "cuda"])
    assert "--device: cuda is not available here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        parse(
            ["--out", str(tmp_path), "--family", "tiny", "--sources", "sql", "--device", "cuda"]
        ).device
        == "cuda"
    )
