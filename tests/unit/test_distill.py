import json
import random
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from engines_build.distill import data as distill_data
from engines_build.distill import train as distill_train
from engines_build.distill.generate import Shards, Teacher, _GeneratedText
from engines_build.distill.head import HeadSample, _tokens_per_step, load_head_samples
from engines_build.distill.make_head import distil_head
from engines_build.distill.overlap import OverlapError
from engines_build.distill.train import choose_shortlist, top_cross_entropy
from tests.unit.training import arguments, write_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


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
    return folder, distil_head(arguments(target, folder))


def test_the_shortlist_contains_the_end_of_text(target, finished):
    eos = json.loads((target / "config.json").read_text())["eos_token_id"]
    assert eos in load_file(finished[0] / "draft" / "model.safetensors")["token_ids"].tolist()


def curve(folder):
    return [path.read_text() for path in sorted(folder.glob("*.jsonl"))]


def test_a_second_run_reuses_shards_and_checkpoint_and_gives_the_same_draft(target, finished):
    folder = finished[0]
    before, curves = load_file(folder / "draft" / "model.safetensors"), curve(folder / "draft.work")
    shards = {p: p.stat().st_mtime_ns for p in folder.rglob("shard-*.safetensors")}
    distil_head(arguments(target, folder))
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
    distil_head(whole)
    stopped, steps, step = (
        arguments(target, tmp_path / "stopped"),
        [],
        distill_train.HeadTrainer._step,
    )

    def stop(self, *arguments):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(distill_train.HeadTrainer, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        distil_head(stopped)
    distil_head(stopped)
    lines = (curve(args.work)[0].splitlines() for args in (stopped, whole))
    for one, other in zip(*lines, strict=True):
        assert json.loads(one) == pytest.approx(json.loads(other), rel=0.01, abs=0.01)
    assert any(json.loads(line)["loss"] > 0 for line in curve(whole.work)[0].splitlines())
    assert [c.splitlines()[-1].split('"loss"')[0] for c in curve(whole.work)] == [
        c.splitlines()[-1].split('"loss"')[0] for c in curves
    ]


def test_shards_of_another_target_are_refused(target, finished, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    save_file({name: t + 1 for name, t in weights.items()}, other / "model.safetensors")
    with pytest.raises(ValueError, match="another target"):
        distil_head(arguments(other, tmp_path, work=finished[0] / "draft.work"))


def test_training_on_what_judges_fails_with_the_counts_or_leaves_it_out(
    target, finished, tmp_path, monkeypatch
):
    work = finished[0] / "draft.work"
    samples = load_head_samples(Shards(work / "train-1-2"), 2)
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
        distil_head(arguments(target, tmp_path, work=work))
    args = arguments(target, tmp_path, work=work)
    args.drop_overlap = True
    assert len(distill_data.drop_judged(args, samples, tokenizer)) == len(samples) - 1


def test_more_tokens_are_generated_after_the_old_shards(target, finished, tmp_path):
    work = finished[0] / "draft.work"
    old = Shards(work / "train-1-2")
    args = arguments(target, tmp_path, work=work, tokens=old.generated + 500)
    distil_head(args)
    new = Shards(work / "train-1-2")
    assert new.generated >= old.generated + 500
    assert new.next_prompt > old.next_prompt


def test_the_served_model_answers_prompts_in_one_batch(target, tmp_path):
    """Logits of transformers, answers to one prompt from its shared KV, prompts with answers."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    teacher = Teacher(target, "fp32", slots=20)
    numbers = random.Random(1)

    def row(prompt_tokens, blocks=None, prompt=None):
        tokens = prompt or numbers.choices(range(model.config.vocab_size), k=prompt_tokens)
        return _GeneratedText(
            0, prompt_tokens, list(tokens), 0.0, blocks or teacher.begin(prompt_tokens)
        )

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
        one.computed_tokens = one.prompt_tokens // 32 * 32
    rows = [rows[0], again[0], row(90), *rows[2:], again[1]]
    for _ in range(3):
        check(rows)


@pytest.mark.parametrize("kind", ["qwen2", "llama3"])
def test_the_teacher_knows_biases_untied_heads_and_scaled_rope(relative, kind):
    model, folder = relative(kind)
    teacher = Teacher(folder, "fp32", slots=2)
    tokens = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    row = _GeneratedText(0, 39, tokens[:39], 0.0, teacher.begin(39))
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(teacher.step([row])[0], want[38], rtol=1e-4, atol=1e-4)
        row.tokens.append(tokens[39])
        torch.testing.assert_close(teacher.step([row])[0], want[39], rtol=1e-4, atol=1e-4)


def test_the_kept_distributions_are_the_teachers(target, finished):
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    sample = load_head_samples(Shards(finished[0] / "draft.work" / "train-1-2"), 2)[3]
    with torch.inference_mode():
        logprobs = model(sample.tokens[None].long()).logits[0, :-1].log_softmax(dim=1)
    own = logprobs[sample.prompt_tokens - 1 :]
    assert len(sample.top_ids) == len(own)
    torch.testing.assert_close(
        own.gather(1, sample.top_ids.long()), sample.top_logprobs.float(), rtol=0, atol=0.05
    )


def test_greedy_answers_follow_the_kept_distributions(finished):
    for s in load_head_samples(Shards(finished[0] / "draft.work" / "held_out-1-2"), 2):
        assert torch.equal(s.tokens[s.prompt_tokens :], s.top_ids[:, 0])


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
    def rate(match, k):
        return _tokens_per_step([[match[ahead:] for ahead in range(8)]], k)

    # TT+bonus, miss, T+bonus at the end
    assert rate(torch.tensor([True, True, False, False, True]), k=2) == 6 / 3
    assert rate(torch.zeros(7, dtype=torch.bool), k=4) == 1.0
    assert rate(torch.ones(10, dtype=torch.bool), k=4) == 5.0


def test_a_token_budget_takes_the_first_sequences_that_fill_it():
    samples = [
        HeadSample(torch.zeros(3 + own), 3, "sql", True, *[torch.zeros(1)] * 3)
        for own in (5, 5, 5, 5)
    ]
    budgets = {1: 1, 5: 1, 6: 2, 10: 2, 11: 3, 20: 4, 99: 4}
    assert {n: len(distill_data.first_tokens(samples, n)) for n in budgets} == budgets


def test_the_shortlist_has_what_the_teacher_expects_most():
    logprobs = torch.tensor([[3], [3], [5], [7]]), torch.tensor([[0.0], [0.0], [0.0], [-1.0]])
    assert choose_shortlist([logprobs], 3, 10, {9}).tolist() == [3, 5, 9]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tokens", 0),
        ("minutes", -1),
        ("start-share", 1.5),
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
