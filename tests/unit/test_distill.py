import json
import random
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from backend.engines.checkpoint import load
from backend.storage.manifest import vocabulary_sha256
from engines_build.distill import command as distill
from engines_build.distill import data as distill_data
from engines_build.distill import export as distill_export
from engines_build.distill import train as distill_train
from engines_build.distill.arguments import parse
from engines_build.distill.generate import Shards, Teacher, _Row
from engines_build.distill.overlap import OverlapError
from engines_build.distill.train import (
    Sample,
    accepted_by_position,
    choose_shortlist,
    load_samples,
    plain_samples,
    tokens_per_step,
    top_cross_entropy,
)

pytestmark = pytest.mark.slow

SHORTLIST = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random two-layer Llama with a byte-level tokenizer of about 300 tokens."""
    folder = tmp_path_factory.mktemp("target")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["SELECT name FROM customers"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
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
    values |= {
        "judged": "sql",
        "tokens": 1500,
        "held-out-tokens": 400,
        "train-tokens": 8000,
        "batch": 4,
        "slots": 4,
        "answers": 1,
    }
    values |= {"warm-up-tokens": 3000} | changes
    return parse([word for name, value in values.items() for word in (f"--{name}", str(value))])


@pytest.fixture
def relative(target, tmp_path):
    """A function that makes a random model of another architecture and returns it with its
    folder.
    """

    def make(kind):
        small = {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        small |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        rope["original_max_position_embeddings"] = 16
        torch.manual_seed(1)
        if kind == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**small, tie_word_embeddings=True))
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.q_proj.bias)
        else:
            model = LlamaForCausalLM(
                LlamaConfig(**small, rope_parameters=rope, attention_bias=True)
            )
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.o_proj.bias)
        model.float().save_pretrained(tmp_path / kind)
        return model, tmp_path / kind

    return make


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
    assert (
        eos in load_file(finished[0] / "draft" / "model.safetensors")["lm_head.token_ids"].tolist()
    )


def test_the_card_names_scores_seed_and_data(finished):
    card = (finished[0] / "draft" / "README.md").read_text()
    assert "| sql |" in card
    assert "Seed 0" in card
    assert f"{finished[1]['generated_tokens']:,} tokens" in card


def curve(folder):
    return [path.read_text() for path in sorted(folder.glob("*.jsonl"))]


def test_a_second_run_reuses_shards_and_checkpoint_and_gives_the_same_draft(target, finished):
    folder = finished[0]
    before, curves = load_file(folder / "draft" / "model.safetensors"), curve(folder / "draft.work")
    shards = {p: p.stat().st_mtime_ns for p in folder.rglob("shard-*.safetensors")}
    distill.distil(arguments(target, folder))
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("shard-*.safetensors")} == shards
    after = load_file(folder / "draft" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert curve(folder / "draft.work") == curves


def test_the_same_seed_and_token_budget_give_the_same_loss_curve_stopped_or_not(
    target, finished, tmp_path, monkeypatch
):
    curves = curve(finished[0] / "draft.work")
    monkeypatch.setattr(distill_train, "_STEPS_PER_LINE", 2)
    monkeypatch.setattr(distill_train, "_CHECKPOINT_S", 0.0)
    whole = arguments(target, tmp_path / "whole")
    distill.distil(whole)
    stopped, steps, step = arguments(target, tmp_path / "stopped"), [], distill_train.Trainer._step

    def stop(self, *arguments):
        steps.append(1)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(distill_train.Trainer, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        distill.distil(stopped)
    distill.distil(stopped)
    assert curve(stopped.work) == curve(whole.work)
    assert any(json.loads(line)["loss"] > 0 for line in curve(whole.work)[0].splitlines())
    assert [c.splitlines()[-1].split('"loss"')[0] for c in curve(whole.work)] == [
        c.splitlines()[-1].split('"loss"')[0] for c in curves
    ]


def test_a_draft_that_starts_from_another_has_its_shape_and_shortlist_and_learns_on(
    target, finished, tmp_path
):
    folder, _ = finished
    values = {
        "target": target,
        "out": tmp_path / "on",
        "work": folder / "draft.work",
        "start": folder / "draft",
        "sources": "sql",
    }
    values |= {
        "judged": "sql",
        "tokens": 1500,
        "held-out-tokens": 400,
        "train-tokens": 2000,
        "batch": 4,
        "learning-rate": 1e-3,
    }
    report = distill.distil(
        parse([word for name, value in values.items() for word in (f"--{name}", str(value))])
    )
    before, after = (
        load_file(path / "model.safetensors") for path in (folder / "draft", tmp_path / "on")
    )
    assert torch.equal(before["lm_head.token_ids"], after["lm_head.token_ids"])
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert report["training"]["tokens"] >= 2000
    assert "Begun with the weights and the shortlist of `draft`" in (
        tmp_path / "on/README.md"
    ).read_text("utf-8")


def test_shards_of_another_target_are_refused(target, finished, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    distill_export.write_weights({name: t + 1 for name, t in weights.items()}, other)
    with pytest.raises(ValueError, match="another target"):
        distill.distil(arguments(other, tmp_path, work=finished[0] / "draft.work"))


def test_training_on_what_judges_fails_with_the_counts_or_leaves_it_out(
    target, finished, tmp_path, monkeypatch
):
    work = finished[0] / "draft.work"
    samples = load_samples(Shards(work / "train"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    words = re.findall(
        r"\w+", tokenizer.decode(samples[0].tokens[: samples[0].prompt_tokens].tolist())
    )
    monkeypatch.setitem(
        distill_data.JUDGED, "sql", lambda: [" ".join(words[-13:])]
    )  # reaches from the schema into the question
    with pytest.raises(
        OverlapError,
        match=r"sequences: of \d+, these share a run of 13 words with an evaluation set: 1 with "
        r"sql",
    ):
        distill.distil(arguments(target, tmp_path, work=work))
    args = arguments(target, tmp_path, work=work)
    args.drop_overlap = True
    assert len(distill.unjudged(args, samples, tokenizer)) == len(samples) - 1


def test_more_tokens_are_generated_behind_the_old_shards(target, finished, tmp_path):
    work = finished[0] / "draft.work"
    old = Shards(work / "train")
    args = arguments(target, tmp_path, work=work, tokens=old.generated + 500)
    distill.distil(args)
    new = Shards(work / "train")
    assert new.generated >= old.generated + 500
    assert new.next_prompt > old.next_prompt


def test_large_weights_are_sharded_below_the_limit(target, finished, monkeypatch, tmp_path):
    monkeypatch.setattr(distill_export, "MAX_FILE_BYTES", 2**16 + 20_000)
    weights = load_file(finished[0] / "draft" / "model.safetensors")
    ids = weights.pop("lm_head.token_ids")
    draft = LlamaForCausalLM(
        LlamaConfig(**json.loads((finished[0] / "draft" / "config.json").read_text()))
    )
    draft.lm_head = torch.nn.Linear(32, SHORTLIST, bias=False)
    draft.load_state_dict(weights)
    distill_export.export(draft, ids, target / "tokenizer.json", tmp_path)
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(where.values())) > 1
    for name, file in where.items():
        assert torch.equal(
            load_file(tmp_path / file)[name], {**weights, "lm_head.token_ids": ids}[name]
        )


def test_the_served_model_answers_prompts_beside_each_other(target, tmp_path):
    """Logits of transformers, answers to one prompt from its shared KV, prompts beside answers."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    teacher = Teacher(*load(target, "fp32"), slots=20)
    numbers = random.Random(1)

    def row(prompt_tokens, blocks=None, prompt=None):
        tokens = prompt or numbers.choices(range(model.config.vocab_size), k=prompt_tokens)
        return _Row(0, prompt_tokens, list(tokens), 0.0, blocks or teacher.begin(prompt_tokens))

    def check(rows):
        with torch.inference_mode():
            found = teacher.step(rows).clone()
            for one, logits in zip(rows, found, strict=True):
                want = model(torch.tensor([one.tokens])).logits[0, -1]
                torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
                one.tokens.append(int(want.argmax()))

    rows = [row(count) for count in (3, 40, 64, 1, 33)]
    check(rows)
    for first in rows[1:3]:
        teacher.hold(first)
    teacher.end(rows[1])
    again = [replace(first, blocks=teacher.again(first)) for first in rows[1:3]]
    for one in again:
        one.tokens = [*one.tokens[: one.prompt_tokens], 7]
        one.seen = one.prompt_tokens // 32 * 32
    rows = [rows[0], again[0], row(90), *rows[2:], again[1]]
    for _ in range(3):
        check(rows)


@pytest.mark.parametrize("kind", ["qwen2", "llama3"])
def test_the_teacher_knows_biases_untied_heads_and_scaled_rope(relative, kind):
    model, folder = relative(kind)
    teacher = Teacher(*load(folder, "fp32"), slots=2)
    tokens = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    row = _Row(0, 39, tokens[:39], 0.0, teacher.begin(39))
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(teacher.step([row])[0], want[38], rtol=1e-4, atol=1e-4)
        row.tokens.append(tokens[39])
        torch.testing.assert_close(teacher.step([row])[0], want[39], rtol=1e-4, atol=1e-4)


def test_the_kept_laws_are_the_teachers_behind_the_prompt_and_the_next_token_within_it(
    target, finished
):
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    sample = load_samples(Shards(finished[0] / "draft.work" / "train"))[3]
    with torch.inference_mode():
        laws = model(sample.tokens[None].long()).logits[0, :-1].log_softmax(dim=1)
    assert len(sample.top_ids) == len(sample.tokens) - 1
    own, prompt = slice(sample.prompt_tokens - 1, None), slice(sample.prompt_tokens - 1)
    torch.testing.assert_close(
        laws.gather(1, sample.top_ids.long())[own],
        sample.top_logprobs[own].float(),
        rtol=0,
        atol=0.05,
    )
    assert torch.equal(sample.top_ids[prompt, 0], sample.tokens[1 : sample.prompt_tokens])
    assert torch.equal(
        sample.top_logprobs[prompt].float().exp().sum(dim=1), torch.ones(sample.prompt_tokens - 1)
    )


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


def test_acceptance_by_position_counts_steps_of_eight():
    match = torch.tensor([True, True, False, False, True])  # TT+miss, miss, T at the end
    assert accepted_by_position([match]) == [2 / 3, 1 / 3, 0, 0, 0, 0, 0, 0]


def test_plain_text_is_cut_to_samples_that_predict_their_own_next_token(target):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    samples = plain_samples(
        ["SELECT name FROM customers " * 300, "short"], tokenizer, tokens=500, seed=0
    )
    assert 1 <= len(samples) <= 2
    for s in samples:
        assert torch.equal(s.tokens[1:], s.top_ids[:, 0])
        assert float(s.top_logprobs.abs().sum()) == 0.0


def test_a_token_budget_takes_the_first_sequences_that_fill_it():
    samples = [
        Sample(torch.zeros(3 + own), 3, "sql", torch.zeros(1), torch.zeros(1))
        for own in (5, 5, 5, 5)
    ]
    assert [len(distill.first_tokens(samples, tokens)) for tokens in (1, 5, 6, 10, 11, 20, 99)] == [
        1,
        1,
        2,
        2,
        3,
        4,
        4,
    ]


def test_the_shortlist_follows_the_teachers_own_text_not_the_prompt():
    laws = torch.tensor([[7], [3], [3], [5]])
    sample = Sample(torch.tensor([1, 2, 3, 3, 5]), 2, "sql", laws, torch.zeros(4, 1).half())
    assert choose_shortlist([sample.own_laws], 3, 10, {9}).tolist() == [3, 5, 9]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tokens", 0),
        ("minutes", -1),
        ("warm-up-tokens", -5),
        ("head-dim", 24),
        ("sources", "nowhere"),
        ("workloads", "poetry"),
        ("judged", "nowhere"),
        ("sources", "wordnet"),
        ("target", "/nowhere"),
        ("start", "/nowhere"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(target, tmp_path, capsys, flag, value):
    with pytest.raises(SystemExit):
        arguments(target, tmp_path, **{flag: value})
    message = capsys.readouterr().err
    assert f"--{flag}" in message
    assert str(value) in message
