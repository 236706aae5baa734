import pytest

from engines_build.distill import evaluation_sets as corpora_evaluation
from engines_build.distill.corpora import LICENCES, Corpus
from engines_build.distill.evaluation_sets import EvaluationError, mt_bench, sql_questions
from engines_build.distill.overlap import grams_of, overlap_counts, overlaps, without_overlap
from engines_build.distill.templates import COLUMNS, JUDGED_COLUMNS, JUDGED_TABLES, TABLES

pytestmark = pytest.mark.slow

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not():
    judged = grams_of([f"before, {THIRTEEN}: after"])
    assert overlaps(f"Quite another text. {THIRTEEN.upper()}!", judged)
    assert not overlaps(f"Quite another text. {THIRTEEN.removesuffix(' thirteen')}!", judged)


def test_counts_are_of_texts_and_by_set():
    judged = {"a": grams_of([THIRTEEN]), "b": grams_of(["nothing alike"])}
    assert overlap_counts([THIRTEEN, "clean", f"x {THIRTEEN} y"], judged) == {"a": 2}


def test_parts_that_overlap_go_and_so_does_one_that_ends_a_run():
    judged = grams_of([THIRTEEN])
    assert without_overlap(f"keep\n\n{THIRTEEN}\n\nthis", judged, "\n\n") == "keep\n\nthis"
    head, tail = THIRTEEN.split(" eight ")
    assert without_overlap(f"{head}\n\neight {tail}\n\nend", judged, "\n\n") == f"{head}\n\nend"


def test_the_sides_share_no_run_of_thirteen_words():
    train, held_out = (Corpus(["sql", "stdlib"], None, side, seed=0) for side in (False, True))
    judged = grams_of(d.text for d in held_out.documents("sql", "stdlib"))
    assert judged
    assert overlap_counts(train.texts, {"held out": judged}) == {}


def test_the_sql_that_judges_uses_no_table_or_column_of_training():
    assert not set(JUDGED_TABLES) & set(TABLES)
    assert not set(JUDGED_COLUMNS) & {name for name, _ in COLUMNS}
    questions = sql_questions()
    assert questions == sql_questions()
    judged = {"sql": grams_of(f"{question}\n{answer}" for question, answer in questions)}
    assert overlap_counts(Corpus(["sql"], None, False, 0).texts, judged) == {}


def test_a_corpus_with_another_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        corpora_evaluation, "_download", lambda corpus: b'{"turns": ["not MT-Bench"]}\n'
    )
    with pytest.raises(EvaluationError, match="SHA-256"):
        mt_bench()
    assert list(tmp_path.iterdir()) == []


def test_wikitext_becomes_words():
    text = corpora_evaluation._plain(
        "{{Infobox|{{nested}}}}\n'''Albedo''' is a [[measure (physics)|measure]] of the "
        "{{lang|la|x}}reflection<ref>a</ref> of light out "
        "of the total [[Solar radiation|radiation]] that a body receives.\n\n* no\n"
    )
    assert (
        text == "Albedo is a measure of the reflection of light out of the total radiation that a "
        "body receives."
    )


def test_every_source_names_its_licence():
    assert all("(" in licence for licence in LICENCES.values())
