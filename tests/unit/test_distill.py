import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from backend.manifest import vocabulary_sha256
from engines_build import distill
from engines_build.distill_generate import Shards, Teacher
from engines_build.distill_train import Sample, choose_shortlist, load_samples, plain_samples, tokens_per_step, top_cross_entropy

SHORTLIST = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random two-layer Llama with a byte-level tokenizer of about 300 tokens."""
    folder = tmp_path_factory.mktemp("target")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["SELECT name FROM customers"] * 9, trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config.num_key_value_heads, config.head_dim, config.tie_word_embeddings = 2, 16, True
    config.eos_token_id = tokenizer.eos_token_id
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def arguments(model, folder, **changes):
    values = {
        "target": model,
        "out": folder / "draft",
        "sources": "sql",
        "hidden": 32,
        "layers": 1,
        "head-dim": 16,
        "shortlist": SHORTLIST,
    }
    values |= {"tokens": 1500, "held-out-tokens": 400, "epochs": 2, "batch": 4, "slots": 4, "minutes": 2, "warm-up-tokens": 3000} | changes
    return distill.parse([word for name, value in values.items() for word in (f"--{name}", str(value))])


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, distill.distil(arguments(target, folder))


def test_the_exported_folder_keeps_the_loader_contract(target, finished):
    folder = finished[0] / "draft"
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == SHORTLIST
    assert config["vocabulary_sha256"] == vocabulary_sha256(target / "tokenizer.json")
    ids = weights.pop("lm_head.token_ids")
    assert ids.dtype == torch.int32
    assert ids.shape == (SHORTLIST,)
    assert all(w.dtype == torch.bfloat16 for w in weights.values())
    assert weights["lm_head.weight"].shape == (SHORTLIST, 32)
    draft = LlamaForCausalLM(LlamaConfig(**config))
    draft.lm_head = torch.nn.Linear(32, SHORTLIST, bias=False)
    draft.load_state_dict({k: w.float() for k, w in weights.items()})


def test_the_shortlist_contains_the_end_of_text(target, finished):
    eos = json.loads((target / "config.json").read_text())["eos_token_id"]
    assert eos in load_file(finished[0] / "draft" / "model.safetensors")["lm_head.token_ids"].tolist()


def test_the_card_names_scores_seed_and_data(finished):
    card = (finished[0] / "draft" / "README.md").read_text()
    assert "| sql |" in card
    assert "Seed 0" in card
    assert f"{finished[1]['generated_tokens']:,} tokens" in card


def test_a_second_run_reuses_shards_and_checkpoint_and_gives_the_same_draft(target, finished):
    folder = finished[0]
    before = load_file(folder / "draft" / "model.safetensors")
    shards = {p: p.stat().st_mtime_ns for p in folder.rglob("shard-*.safetensors")}
    distill.distil(arguments(target, folder))
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("shard-*.safetensors")} == shards
    after = load_file(folder / "draft" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_more_tokens_are_generated_behind_the_old_shards(target, finished, tmp_path):
    work = finished[0] / "draft.work"
    old = Shards(work / "train")
    args = arguments(target, tmp_path, work=work, tokens=old.generated + 500)
    distill.distil(args)
    new = Shards(work / "train")
    assert new.generated >= old.generated + 500
    assert new.next_prompt > old.next_prompt


def test_large_weights_are_sharded_below_the_limit(target, finished, monkeypatch, tmp_path):
    monkeypatch.setattr(distill, "MAX_SHARD_BYTES", 2**16 + 20_000)
    weights = load_file(finished[0] / "draft" / "model.safetensors")
    ids = weights.pop("lm_head.token_ids")
    draft = LlamaForCausalLM(LlamaConfig(**json.loads((finished[0] / "draft" / "config.json").read_text())))
    draft.lm_head = torch.nn.Linear(32, SHORTLIST, bias=False)
    draft.load_state_dict(weights)
    distill.export(draft, ids, target, tmp_path)
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(where.values())) > 1
    for name, file in where.items():
        assert torch.equal(load_file(tmp_path / file)[name], {**weights, "lm_head.token_ids": ids}[name])


def test_the_teacher_gives_the_logits_of_transformers(target):
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    teacher = Teacher(model, slots=20, dtype=torch.float32)
    tokens = torch.randint(0, model.config.vocab_size, (9,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = model(tokens[None]).logits[0]
        teacher.prefill(2, [5, 6, 7])
        prefill = teacher.prefill(18, tokens[:8].tolist())
        step = teacher.decode(torch.full((20,), int(tokens[8])))[18]
    torch.testing.assert_close(prefill, want[:8], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step, want[8], rtol=1e-4, atol=1e-5)


def test_the_kept_laws_are_the_teachers_at_every_position(target, finished):
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    sample = load_samples(Shards(finished[0] / "draft.work" / "train"))[3]
    with torch.inference_mode():
        laws = model(sample.tokens[None].long()).logits[0, :-1].log_softmax(dim=1)
    assert len(sample.top_ids) == len(sample.tokens) - 1
    torch.testing.assert_close(laws.gather(1, sample.top_ids.long()), sample.top_logprobs.float(), rtol=0, atol=0.05)


def test_greedy_answers_follow_the_kept_laws(finished):
    for s in load_samples(Shards(finished[0] / "draft.work" / "held_out")):
        assert torch.equal(s.tokens[s.prompt_tokens :], s.top_ids[s.prompt_tokens - 1 :, 0])


def test_cross_entropy_over_all_classes_is_the_full_one():
    p, logits = torch.tensor([[0.5, 0.2, 0.3]]), torch.tensor([[1.0, 0.0, -1.0]])
    loss = top_cross_entropy(logits, torch.tensor([[1, 0, 2]]), p[:, [1, 0, 2]].log())
    torch.testing.assert_close(loss, -(p * logits.log_softmax(dim=1)).sum())


def test_unkept_mass_is_one_class_and_tokens_outside_the_shortlist_have_none():
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    q = logits.softmax(dim=1)[0]
    loss = top_cross_entropy(logits, torch.tensor([[0, -1]]), torch.tensor([[0.6, 0.1]]).log())
    torch.testing.assert_close(loss, -(0.6 * q[0].log() + 0.3 * (1 - q[0]).log()))


def test_tokens_per_step_counts_runs_and_the_bonus_token():
    match = torch.tensor([True, True, False, False, True])
    assert tokens_per_step([match], k=2) == 5 / 3  # TT+bonus, miss, T at the end
    assert tokens_per_step([torch.zeros(7, dtype=torch.bool)], k=4) == 1.0
    assert tokens_per_step([torch.ones(10, dtype=torch.bool)], k=4) == 5.0


def test_plain_text_is_cut_to_samples_that_predict_their_own_next_token(target):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    samples = plain_samples(["SELECT name FROM customers " * 300, "short"], tokenizer, tokens=500, seed=0)
    assert 1 <= len(samples) <= 2
    for s in samples:
        assert torch.equal(s.tokens[1:], s.top_ids[:, 0])
        assert float(s.top_logprobs.abs().sum()) == 0.0


def test_the_shortlist_follows_the_teachers_own_text_not_the_prompt():
    laws = torch.tensor([[7], [3], [3], [5]])
    sample = Sample(torch.tensor([1, 2, 3, 3, 5]), 2, "sql", laws, torch.zeros(4, 1).half())
    assert choose_shortlist([sample], 3, 10, {9}).tolist() == [3, 5, 9]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tokens", 0),
        ("minutes", -1),
        ("warm-up-tokens", -5),
        ("head-dim", 24),
        ("sources", "nowhere"),
        ("sources", "wordnet"),
        ("target", "/nowhere"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(target, tmp_path, capsys, flag, value):
    with pytest.raises(SystemExit):
        arguments(target, tmp_path, **{flag: value})
    message = capsys.readouterr().err
    assert f"--{flag}" in message
    assert str(value) in message
