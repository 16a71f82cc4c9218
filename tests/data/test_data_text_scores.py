"""Scores of answers: by hand, and against the libraries' own words."""

from __future__ import annotations

import pytest

from megatune.data import text_scores
from megatune.data.text_scores import Scored


def test_exact_match_reads_what_a_user_reads() -> None:
    pairs = [Scored(" yes\n", "yes"), Scored("<think>no?</think>\n\nyes", "yes"), Scored("Yes", "yes")]
    assert text_scores.text_scores(pairs)["exact_match"] == pytest.approx(2 / 3)
    assert [text_scores.is_equal(*pair) for pair in pairs] == [True, True, False]
    assert text_scores.text_scores([]) == {}


def test_letters_are_compared_where_all_labels_are_choices() -> None:
    pairs = [Scored("The answer is (B).", "B"), Scored("C", "C. Paris"), Scored("B, I think", "(D)"), Scored("", "A")]
    assert text_scores.text_scores(pairs)["choice_accuracy"] == 0.5
    assert "choice_accuracy" not in text_scores.text_scores([*pairs, Scored("Because", "Because")])


def test_without_libraries_the_rest_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_scores, "LIBRARIES", {"no_such_module": "no-such-library"})
    assert text_scores.text_scores([Scored("a", "b c")]) == {"exact_match": 0.0}


def test_rouge_and_bleu() -> None:
    scorers = pytest.importorskip("rouge_score.rouge_scorer")
    sacrebleu = pytest.importorskip("sacrebleu")
    answers = ["The cat sat on the mat.", "It rained all day, and we stayed in."]
    labels = ["The cat is on the mat.", "It rained all day long, so we stayed at home."]
    found = text_scores.text_scores([*map(Scored, answers, labels)])
    own = scorers.RougeScorer(["rouge1", "rougeL"])
    for name in ("rouge1", "rougeL"):
        expected = [own.score(label, answer)[name].fmeasure for answer, label in zip(answers, labels, strict=True)]
        assert found[name] == pytest.approx(sum(expected) / 2)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(answers, [labels]).score)
    # By hand: six of seven characters of the answer, of six wanted ones; rouge-score's own words would have none.
    chinese = text_scores.text_scores([Scored("今天天气真好啊", "今天天气真好")])
    assert chinese["rouge1"] == pytest.approx(2 * 6 / (7 + 6))
    assert chinese["bleu"] > 70
