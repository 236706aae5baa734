"""A head from generated answers to a folder that is served: training and serving mean the same."""

import json
from pathlib import Path

import pytest
import torch

from backend.engines.checkpoint import map_embeddings
from backend.engines.head.engine import HeadEngine
from backend.engines.head.folder import read_head
from backend.engines.head.network import TorchHead
from backend.engines.head.network import load as load_network
from backend.engines.port import HiddenStates, Turn
from backend.engines.torch.engine import TorchEngine
from backend.engines.weights import load_embeddings
from backend.request import SamplingParams
from backend.sequence import Sequence
from backend.storage.manifest import weights_sha256
from engines_build.distill.answer_files import keep, read_again
from engines_build.distill.generate import Shards, Teacher
from engines_build.distill.head import Unroller, evaluate_head, load_head_samples
from engines_build.distill.make_head import distil_head
from tests.unit.training import arguments, write_target

pytestmark = pytest.mark.slow

TAPS = (1, 2)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def head_arguments(model, folder, **changes):
    values = {
        "tokens": 1500,
        "held-out-tokens": 400,
        "train-tokens": 12_000,
        "batch": 4,
        "answers": 3,
    }
    changes = {"shortlist": 40, "learning-rate": 0.01} | changes
    return arguments(model, folder, **(values | changes))


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    args = head_arguments(target, folder)
    return args, distil_head(args)


@pytest.fixture(scope="module")
def samples(finished):
    return load_head_samples(Shards(finished[0].work / "train-1-2"), len(TAPS))


def engine_of(folder, target):
    config, _, ids = read_head(folder)
    embedding, lm_head = map_embeddings(target)
    head = TorchHead(load_network(folder)[0], lm_head[ids])
    return HeadEngine("head", config, head, ids, embedding, lm_head, max_draft_tokens=4)


def test_what_is_kept_is_what_the_serving_target_gives(target, samples):
    engine = TorchEngine.load(
        "t", target, dtype="fp32", kv_blocks=32, max_context_tokens=800, taps=TAPS
    )
    for number, sample in enumerate(samples[:6]):
        tokens = sample.tokens.tolist()
        blocks = {"t": list(range(28))}
        for place in (0, len(sample.features) // 2, len(sample.features) - 1):
            text = tokens[: sample.prompt_tokens + place]
            sequence = Sequence(number, text, len(text), SamplingParams(), blocks)
            engine.submit([Turn(sequence, len(text))])
            served = engine.poll(0.0)[0].hidden_states.rows[-1]
            engine.cancel([number])
            kept = sample.features[place].float()
            torch.testing.assert_close(torch.from_numpy(served), kept, rtol=0.02, atol=0.02)


def test_what_is_proposed_is_what_the_trained_distributions_say(target, finished, samples):
    engine = engine_of(finished[0].out, target)
    embedding, head = (table.float() for table in load_embeddings(target))
    network, ids = load_network(finished[0].out)
    unroller = Unroller(network, embedding, head, ids)
    compared = 0
    for sample in samples[:12]:
        tokens = sample.tokens.tolist()
        with torch.no_grad():
            unrolled = [
                (torch.cat([ids, starts.context])[logits.argmax(1)], kept)
                for logits, kept, starts in unroller.unroll([sample], 3)
            ]
        for start in range(0, len(sample.features) - 1, 7):
            text = tokens[: sample.prompt_tokens + start + 1]
            sequence = Sequence(9, text, sample.prompt_tokens, SamplingParams())
            engine.cancel([9])
            features = sample.features[start : start + 1].float().numpy()
            states = HiddenStates(len(text) - 2, TAPS, features)
            engine.absorb([(sequence, states)])
            engine.submit([Turn(sequence, len(text), run=3, nodes=256)])
            spine = engine.poll(0.0)[0].proposal.spine().tokens
            for ahead, token in enumerate(spine):
                best, kept = unrolled[ahead]
                place = (kept == start).nonzero()
                if not len(place):
                    break
                assert token == int(best[place[0, 0]]), (start, ahead)
                compared += 1
                following = tokens[len(text) + ahead : len(text) + ahead + 1]
                if [token] != following:
                    break
    assert compared > 30


def test_it_learns_what_the_target_says(tmp_path):
    changes = {"tokens": 4000, "train-tokens": 160_000, "batch": 8, "slots": 16, "shortlist": 4096}
    changes |= {"taps": "1,2,4", "learning-rate": 0.003, "sources": "sql,stdlib", "answers": 1}
    args = head_arguments(ROOT / "engines_build/drafts/tiny-target", tmp_path, **changes)
    report = distil_head(args)
    scores = report["scores"]["sql"]
    assert scores["accepted_1"] == pytest.approx(scores["held"])
    assert scores["held"] > 0.1  # by chance one in 4,096
    assert scores["tokens_per_step_2"] <= scores["tokens_per_step_4"]
    assert scores["held"] <= scores["top_2"] <= scores["top_4"] <= scores["coverage"] <= 1


def test_the_card_says_what_was_done_and_the_folder_whose_it_is(finished):
    args, report = finished
    card = (args.out / "README.md").read_text()
    assert f"{report['generated_tokens']:,} tokens" in card
    assert "{" not in card
    config = json.loads((args.out / "config.json").read_text())
    assert config["layers"] == [1, 2]
    assert config["architectures"] == ["SpindleHead"]
    assert len(config["target_sha256"]) == 64


def test_one_that_is_begun_with_another_s_weights_goes_on_from_them(target, finished, tmp_path):
    args = head_arguments(target, tmp_path, **{"train-tokens": 1500})
    args.work, args.start = finished[0].work, finished[0].out
    report = distil_head(args)
    curve = json.loads(next(args.work.glob("*-start*.jsonl")).read_text().splitlines()[0])
    assert curve["loss"] < 1.2 * finished[1]["training"]["loss"]
    assert "Begun with the weights" in (args.out / "README.md").read_text()
    assert report["parameters"] == finished[1]["parameters"]


def test_of_the_weights_that_one_began_with_the_named_share_stays(target, finished, tmp_path):
    start, written = load_network(finished[0].out)[0].state_dict(), []
    for share in (0, 0.75):
        args = head_arguments(target, tmp_path / str(share), **{"train-tokens": 1200})
        args.work, args.start, args.start_share = finished[0].work, finished[0].out, share
        distil_head(args)  # the second time from the first's checkpoint
        written.append(load_network(args.out)[0].state_dict())
    for name, before in start.items():
        wanted = 0.75 * before + 0.25 * written[0][name]
        torch.testing.assert_close(written[1][name], wanted, rtol=0.01, atol=0.001)
    assert any(not torch.equal(written[0][name], before) for name, before in start.items())


@pytest.mark.parametrize(("taps", "said"), [("3", r"1\.\.2, got \[3\]"), ("0,1", r"\[0, 1\]")])
def test_layers_that_the_target_has_not_are_named(target, tmp_path, taps, said):
    with pytest.raises(ValueError, match=said):
        distil_head(head_arguments(target, tmp_path, taps=taps))


def test_a_token_beyond_the_text_so_far_cannot_be_proposed(target, finished, samples):
    network, ids = load_network(finished[0].out)
    embedding, head = (table.float() for table in load_embeddings(target))
    unroller = Unroller(network, embedding, head, ids)
    hidden = 0
    for sample in samples[:8]:
        with torch.no_grad():
            (logits, kept, starts), *_ = unroller.unroll([sample], 1)
        for row, start in enumerate(kept.tolist()):
            text = set(sample.tokens[: sample.prompt_tokens + start + 1].tolist())
            for column, token in enumerate(starts.context.tolist()):
                there = bool(logits[row, len(ids) + column] > -1e3)
                assert there == (token in text)
                hidden += not there
    assert hidden


def test_scores_count_greedy_answers_only(target, finished, samples):
    network, ids = load_network(finished[0].out)
    tables = [table.float() for table in load_embeddings(target)]
    scores = evaluate_head(Unroller(network, *tables, ids), samples)
    greedy = sum(len(s.features) - 1 for s in samples if s.greedy)
    assert sum(score["tokens"] for score in scores.values()) == greedy
    assert greedy < sum(len(s.features) - 1 for s in samples)


def test_kept_answers_have_the_distributions_and_states_that_generating_had(
    finished, target, tmp_path
):
    args, _ = finished
    generated = Shards(args.work / "train-1-2")
    keep(generated, weights_sha256(target), tmp_path / "kept.npz")
    again = Shards(tmp_path / "again")
    teacher = Teacher(target, "fp32", slots=2, taps=TAPS)
    read_again([tmp_path / "kept.npz"], weights_sha256(target), teacher, again)
    assert (again.generated, again.next_prompt) == (generated.generated, generated.next_prompt)
    for old, new in zip(
        load_head_samples(generated, len(TAPS)), load_head_samples(again, len(TAPS)), strict=True
    ):
        assert new.tokens.tolist() == old.tokens.tolist()
        same = (new.prompt_tokens, new.workload, new.greedy)
        assert same == (old.prompt_tokens, old.workload, old.greedy)
        torch.testing.assert_close(new.features, old.features, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            new.top_logprobs[:, :4], old.top_logprobs[:, :4], rtol=0.01, atol=0.01
        )
    before = [path.read_bytes() for path in again.paths()]
    read_again([tmp_path / "kept.npz"], weights_sha256(target), teacher, again)
    assert [path.read_bytes() for path in again.paths()] == before
    twice = Shards(tmp_path / "twice")
    read_again([tmp_path / "kept.npz"] * 2, weights_sha256(target), teacher, twice)
    assert twice.generated == 2 * generated.generated


def test_kept_answers_of_another_target_and_damaged_ones_are_refused(finished, target, tmp_path):
    file, work = tmp_path / "kept.npz", Shards(tmp_path / "again")
    keep(Shards(finished[0].work / "train-1-2"), "another", file)
    with pytest.raises(ValueError, match=r"--answers-file: .*npz holds the answers of another"):
        read_again([file], weights_sha256(target), None, work)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"--answers-file: .*kept.npz cannot be read"):
        read_again([file], weights_sha256(target), None, work)
    assert not work.paths()
