"""Heads by large batches: what these answer and keep is what one request at a time gives."""

import json
import random
import subprocess
import sys
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import torch

from backend.engines.head.network import load as load_network
from backend.engines.models.llama import load_llama
from backend.storage.manifest import weights_sha256
from engines_build.distill import answer_files
from engines_build.distill.first_head import first_head
from engines_build.distill.generate import MAX_NEW_TOKENS, Teacher, _GeneratedText, answered, encode
from engines_build.distill.head import Unroller
from engines_build.distill.on_gpu.__main__ import main, parse, train
from engines_build.distill.on_gpu.answers import GeneratedAnswers, look
from engines_build.distill.on_gpu.batch_model import BatchModel, EncodedPrompt, lengths_of
from engines_build.distill.on_gpu.prompts import (
    PlainTokenizer,
    read_about,
    read_prompts,
    read_texts,
)
from engines_build.distill.overlap import grams
from engines_build.distill.train import Budget, HeadTrainer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "engines_build/drafts/tiny-target"
TAPS = (1, 3)
ENDS = {2}
# Everything of the Python environment that a GPU machine has not.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "openvino", "tritonclient", "grpc"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from engines_build.distill.on_gpu.__main__ import main
if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def model():
    config, weights = load_llama(TARGET, "fp32")
    torch.manual_seed(0)
    return BatchModel(config, weights, 4, TAPS, ENDS)


@pytest.fixture(scope="module")
def asked(prepared):
    return [
        *read_prompts(prepared / "prompts.npz", weights_sha256(TARGET))[:2],
        EncodedPrompt("qa", [7]),
    ]


@pytest.fixture(scope="module")
def greedy(model, asked):
    return model.generate(asked, [0.0] * 3)


def prompts_of(folder, *more):
    words = ["prompts", "--target", TARGET, "--out", folder, "--prompts", 12, "--judging", 3]
    words += ["--sources", "sql,stdlib", "--judged", "sql", "--seed", 3, *more]
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on_gpu") / "prompts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", *prompts_of(folder)])
        main()
    return folder


def words_of(folder, prepared, *more):
    words = ["train", "--target", TARGET, "--prompts", prepared, "--out", folder, "--device", "cpu"]
    words += ["--batch", 6, "--sequences", 1, "--tokens", 600, "--train-s", 1000, *more]
    return list(map(str, words))


@pytest.fixture(scope="module")
def first(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "head"
    script = folder.with_suffix(".py")
    script.write_text(WITHOUT)
    words = words_of(folder, prepared, "--train-tokens", 6_000)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, *words], check=True, cwd=ROOT, env=environment)
    return folder, json.loads((folder / "report.json").read_text())


def test_greedy_answers_of_a_batch_are_those_of_one_request_at_a_time(greedy, asked):
    teacher = Teacher(TARGET, "fp32", slots=1, taps=TAPS)
    assert len({len(one.tokens) for one in asked}) == 3
    for one, sample in zip(asked, greedy, strict=True):
        tokens = sample.tokens.tolist()
        assert tokens[: len(one.tokens)] == one.tokens
        expected = answered(teacher, tokens, len(one.tokens), 0, 0.0)
        assert expected.top_ids[1][:, 0].tolist() == tokens[len(one.tokens) :]
        wanted = expected.top_logprobs[1][:, :4]
        torch.testing.assert_close(sample.top_logprobs[:, :4].float(), wanted, rtol=0.01, atol=0.01)
        torch.testing.assert_close(sample.features, expected.features[0], rtol=0.02, atol=0.02)


def test_answers_read_again_have_the_distributions_and_states_that_generating_had(
    model, asked, greedy
):
    answers = [sample.tokens[sample.prompt_tokens :].tolist() for sample in greedy]
    again = model.read(asked, answers, [sample.greedy for sample in greedy])
    for old, new in zip(greedy, again, strict=True):
        assert new.tokens.tolist() == old.tokens.tolist()
        same = (new.prompt_tokens, new.workload, new.greedy)
        assert same == (old.prompt_tokens, old.workload, old.greedy)
        torch.testing.assert_close(new.features, old.features, rtol=0.02, atol=0.02)
        wanted, found = (s.top_logprobs[:, :4].float() for s in (old, new))
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)
        assert torch.equal(new.top_ids[:, 0], old.top_ids[:, 0])


def test_a_sampled_text_departs_from_the_greedy_one_and_its_neighbour_does_not(
    model, asked, greedy
):
    mixed = model.generate(asked, [1.0, 0.0, 0.0])
    assert mixed[0].tokens.tolist() != greedy[0].tokens.tolist()
    assert mixed[1].tokens.tolist() == greedy[1].tokens.tolist()
    assert [sample.greedy for sample in mixed] == [False, True, True]


def test_texts_end_where_the_generator_ends_them():
    rng = random.Random(1)
    texts = [[rng.choice([3, 4, 9]) for _ in range(150)] for _ in range(40)]
    texts += [[5, 6, 7] * 50, [5] * 150, list(range(10, 140)) + [2] * 20]
    texts += [[*range(10, 70), *range(10, 18), *range(20, 40)] * 2]
    texts = [text[:150] + [8] * (150 - len(text)) for text in texts]
    found = lengths_of(torch.tensor(texts), torch.tensor([2, 9])).tolist()
    for text, length in zip(texts, found, strict=True):
        rows = (_GeneratedText(0, 0, text[:n], 0.0, []) for n in range(1, 151))
        wanted = next((len(row.tokens) for row in rows if row.is_over({2, 9})), 150)
        assert length == wanted
    assert len(set(found)) > 5


def test_a_text_that_shares_a_run_with_what_judges_is_left_out(model, prepared, tmp_path):
    tokenizer = PlainTokenizer(TARGET, None)
    run = "alpha beta gamma delta one two three four five six seven eight nine"
    for name in ("about.json", "judged.npy"):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    judged = [*np.load(prepared / "judged.npy").tolist(), *grams(run)]
    np.save(tmp_path / "judged.npy", np.array(judged, np.uint64))
    plain = tokenizer.plain
    question = plain.encode("What is new?").ids
    answers = [f"Well: {run}.", f"Well: {run.removesuffix(' nine')}. " + "And so on. " * 30]
    texts = [
        ("chat", question + plain.encode(text).ids, len(question), False)
        for text in [*answers, *answers]
    ]
    shared, follow_ups = look(TARGET, tmp_path, texts, "0")
    assert shared == [True, False, True, False]
    assert len(follow_ups) == 1
    assert follow_ups[0].workload in {"summarise", "qa"}
    assert "beta gamma delta" in tokenizer.decode(follow_ups[0].tokens)
    taken = GeneratedAnswers(model, TARGET, tmp_path, 0)
    taken.read(texts)
    taken.close()
    assert [sample.tokens.tolist() for sample in taken.samples] == [texts[1][1]] * 2
    assert taken.left_out == 2


def test_a_run_s_hash_is_the_same_in_every_process():
    run = "a b c d e f g h i j k l m"
    script = f"from engines_build.distill.overlap import grams; print(*grams('{run}'))"
    env = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, "-c", script], env=env, text=True)
    assert [int(printed)] == list(grams(run))


def test_prompts_are_encoded_without_transformers_as_with_it(prepared):
    from transformers import AutoTokenizer

    from engines_build.distill.corpora import CorpusPrompt

    plain = PlainTokenizer(TARGET, read_about(prepared)["around"])
    theirs = AutoTokenizer.from_pretrained(TARGET)
    for raw in (True, False):
        prompt = CorpusPrompt("qa", "What is  it?\nSay <|im_end|> so. " * 120, raw)
        assert encode(plain, prompt) == encode(theirs, prompt)


def test_a_run_without_transformers_writes_a_head_that_has_learnt(first):
    folder, report = first
    network, tokens = load_network(folder)
    assert network.config.layers == (1, 2, 4)
    assert len(tokens) == network.config.rows == 4096
    assert report["after"]["held"] > report["before"]["held"]
    config, weights = load_llama(TARGET, "fp32")
    texts = read_texts(folder / "answers.npz", weights_sha256(TARGET), "--answers")[1][:3]
    asked = [EncodedPrompt(workload, text[:prompt]) for workload, text, prompt, _ in texts]
    answers = [text[prompt:] for _, text, prompt, _ in texts]
    three = BatchModel(config, weights, 1, (1, 2, 4), ENDS)
    samples = three.read(asked, answers, [True] * 3)
    untrained, _ = first_head(None, config, (1, 2, 4), samples, 4096, ENDS)
    table, losses = weights["model.embed_tokens.weight"], []
    for one in (untrained, network):
        trainer = HeadTrainer(Unroller(one, table, table, tokens), samples, 0, folder / "run")
        losses.append(trainer._loss(samples)[0].item())
    assert losses[1] < losses[0] - 0.2
    assert report["before"]["places"] == report["after"]["places"] > 50


def test_training_whose_time_is_over_ends_at_once(tmp_path):
    config, weights = load_llama(TARGET, "fp32")
    three = BatchModel(config, weights, 1, (1, 2, 4), ENDS)
    samples = three.read([EncodedPrompt("qa", [5, 6, 7])], [[8, 9, 10]], [True])
    network, tokens = first_head(None, config, (1, 2, 4), samples, 4096, ENDS)
    table = weights["model.embed_tokens.weight"]
    trainer = HeadTrainer(Unroller(network, table, table, tokens), samples, 0, tmp_path / "run")
    assert trainer.run(Budget(10_000, 1, 0.01, monotonic() - 1))["tokens"] == 0


def test_the_answers_of_a_run_are_read_by_the_next_which_goes_on_from_its_head(
    first, prepared, tmp_path
):
    folder, report = first
    next_prompt, texts = answer_files.read(folder / "answers.npz", weights_sha256(TARGET))
    answered = report["answers"]
    assert len(texts) == answered["generated_answers"] > 4
    assert 0 < next_prompt <= 12
    count = sum(len(tokens) - prompt for tokens, prompt, *_ in texts)
    assert count == answered["generated_tokens"]
    assert all(0 < len(a) - b <= MAX_NEW_TOKENS for a, b, *_ in texts)
    more = ["--start", folder, "--answers", folder / "answers.npz", "--train-tokens", 900]
    again = train(parse(words_of(tmp_path / "second", prepared, *more)))
    assert again["answers"]["read_again_tokens"] == answered["generated_tokens"]
    assert again["before"]["held"] == pytest.approx(report["after"]["held"], abs=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "0"], "--batch: must be a positive int, got 0"),
        (["--train-s", "x"], "--train-s: must be a positive float, got x"),
        (["--prompts", "/nowhere"], "--prompts: no about.json in /nowhere"),
        (["--target", "/nowhere"], "--target: no tokenizer.json in /nowhere"),
        (["--start", "/nowhere"], "--start: no config.json in /nowhere"),
        (["--answers", "/nowhere/a.npz"], "--answers: no file /nowhere/a.npz"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(words, said, prepared, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse([*words_of(tmp_path, prepared), *words])
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_answers_and_a_head_of_another_target_are_refused(prepared, tmp_path, monkeypatch):
    answer_files.write(
        tmp_path / "a.npz",
        {"tokens": [1], "lengths": [1], "prompt_lengths": [1], "workloads": [0], "sampled": [0]},
        0,
        "another",
    )
    head = ROOT / "engines_build/drafts/smollm2-135m-instruct-head"
    for words, said in (
        (["--answers", tmp_path / "a.npz"], "--answers: .* holds the answers of another target"),
        (["--start", head], "--start: .* is the head of another target than"),
    ):
        monkeypatch.setattr(sys, "argv", ["", *words_of(tmp_path / "out", prepared, *words)])
        with pytest.raises(SystemExit, match=said):
            main()
    monkeypatch.setattr(sys, "argv", ["", *prompts_of(tmp_path, "--sources", "python")])
    with pytest.raises(SystemExit, match=r"error: .*'python' needs a fetched folder"):
        main()
