import json

import pytest
import torch
from transformers import AutoTokenizer

from engines_build.distill import unlikelihood as distill_unlikelihood
from engines_build.distill.arguments import parse
from engines_build.distill.corpora import Corpus
from engines_build.distill.family import pieces, train_tokenizer, untrained
from engines_build.distill.train import Budget, Shape, Trainer
from engines_build.distill.unlikelihood import (
    _WEIGHT,
    PROMPT_TOKENS,
    Unlikelihood,
    continued,
    repeated,
    share_repeated,
    short_prompts,
    unlikelihood,
)

pytestmark = pytest.mark.slow

ENDS = {0, 2}


@pytest.fixture(scope="module")
def corpus():
    return Corpus(["sql", "stdlib"], None, False, 0)


@pytest.fixture(scope="module")
def tokenizer(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([d.text for d in corpus.documents("sql", "stdlib")], folder)
    return AutoTokenizer.from_pretrained(folder)


def looping():
    """An untrained model whose greedy texts loop at once."""
    torch.manual_seed(0)
    return untrained(Shape(32, 1, 16, 4096))


@torch.no_grad()
def cost(model, texts):
    return unlikelihood(model, texts, "cpu").item()


def test_the_share_repeated_counts_runs_that_occurred_before_in_their_own_text():
    assert share_repeated([[1, 2, 3, 4, 5]]) == 0
    assert share_repeated([[7] * 8]) == 4 / 5
    assert share_repeated([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert share_repeated([[1, 2]]) == 0


def test_every_token_of_a_later_run_is_repeated_and_none_of_the_first():
    assert repeated([1, 2, 3, 4, 9, 1, 2, 3, 4]) == [False] * 5 + [True] * 4
    assert repeated([1, 2, 3, 9, 1, 2, 3]) == [False] * 7


def test_unlikelihood_is_what_the_repeated_tokens_cost_on_average_over_all():
    model = looping()
    prompt, new = [5, 6], [1, 2, 3, 4, 9, 1, 2, 3, 4]
    law = model(torch.tensor([prompt + new])).logits[0].softmax(dim=1)
    expected = -sum(torch.log1p(-law[i - 1, (prompt + new)[i]]).item() for i in range(7, 11)) / 9
    assert cost(model, [(prompt, new)]) == pytest.approx(expected, rel=0.02)
    assert cost(model, [(prompt, [1, 2, 3]), (prompt, new)]) == pytest.approx(
        expected * 9 / 12, rel=0.02
    )
    assert cost(model, [(prompt, [1, 2, 3])]) == 0


def test_a_loop_that_is_certain_still_has_a_gradient():
    model = looping()
    with torch.no_grad():
        model.model.norm.weight.mul_(1e4)
    loss = unlikelihood(model, [([5], continued(model, [[5]], ENDS, "cpu")[0][1])], "cpu")
    loss.backward()
    assert loss.item() > 100
    assert model.model.embed_tokens.weight.grad.abs().sum().item() > 0


def test_continuations_are_greedy_whatever_their_neighbours_and_end_with_the_end_token():
    model = looping()
    prompts = [[5, 6, 7], [9], [11, 12]]
    texts = continued(model, prompts, ENDS, "cpu")
    assert texts == [continued(model, [prompt], ENDS, "cpu")[0] for prompt in prompts]
    prompt, new = texts[0]
    law = model(torch.tensor([prompt + new])).logits[0]
    assert law[len(prompt) - 1 : -1].argmax(dim=1).tolist() == new
    assert continued(model, [prompt], {new[2]}, "cpu") == [(prompt, new[: new.index(new[2]) + 1])]


def test_prompts_are_short_of_the_workloads_asked_for_and_never_the_same_in_two_steps(
    corpus, tokenizer
):
    first, again, other = (
        short_prompts(corpus, tokenizer, ["summarise", "code"], at) for at in (0, 0, 1000)
    )
    assert first == again
    assert not set(map(tuple, first)) & set(map(tuple, other))
    assert max(map(len, first)) <= PROMPT_TOKENS
    assert not any("CREATE TABLE" in tokenizer.decode(prompt) for prompt in first)


def test_a_step_makes_both_the_loss_of_a_text_and_the_unlikelihood_of_its_own_loops_less(
    corpus, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(distill_unlikelihood, "CONTINUATIONS", 4)
    args = parse(
        [
            "--family",
            "tiny",
            "--out",
            str(tmp_path / "out"),
            "--sources",
            "sql,stdlib",
            "--judged",
            "sql",
        ]
    )
    samples = list(pieces([d.text for d in corpus.documents("sql")][:20], tokenizer))[:2]
    model = looping()
    with torch.no_grad():
        model.model.norm.weight.mul_(10)
    training = Unlikelihood(model, samples, args, tmp_path / "run", tokenizer)
    texts = continued(model, short_prompts(corpus, tokenizer, training.workloads), ENDS, "cpu")
    both, plain, loops = (
        training._loss(0, samples)[0],
        Trainer._loss(training, 0, samples)[0],
        unlikelihood(model, texts, "cpu"),
    )
    assert (both - plain).item() == pytest.approx(_WEIGHT * loops.item(), rel=0.01)
    line = training.run(Budget(4 * 2 * 256, 2, 1e-2, embedding_rate=1.0))
    assert cost(model, texts) < loops.item() / 2
    assert Trainer._loss(training, 0, samples)[0].item() < plain.item()
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1]) == line
    assert line["repetition"] > 0.5


def test_sources_of_sql_alone_have_nothing_to_unlearn_loops_on(tmp_path):
    args = parse(
        ["--family", "tiny", "--out", str(tmp_path / "out"), "--sources", "sql", "--judged", "sql"]
    )
    with pytest.raises(
        ValueError,
        match=r"--unlikelihood-tokens: the sources sql make prompts of sql alone; give 0",
    ):
        Unlikelihood(looping(), [], args, tmp_path / "run", None)
