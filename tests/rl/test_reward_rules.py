"""Rewards that are rules. Where ROLL's differ, the value here is the right one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatune.data.text_scores import chosen_letter, last_boxed
from megatune.rl.rewards import rules
from megatune.rl.rewards.answer import Answer, RewardError, repetition_ratio, strip_reasoning
from megatune.rl.rewards.instructions import GeneralRule, follows_instruction
from megatune.rl.rewards.rules import CrossThinkQA, Format, GeneralValidation, Length, MathRule, MultipleChoice
from megatune.rl.rewards.task import score_answer


def answer(text: str, truth: object = None, prompt: str = "", num_tokens: int = 0) -> Answer:
    return Answer(text, prompt=prompt, row={"ground_truth": truth}, ids=(0,) * num_tokens)


@pytest.mark.parametrize(
    ("text", "prompt", "read"),
    [
        ("<think>a</think>\n\nb", "", "b"),
        ("a</think>b", "<think>\n", "b"),
        ("a\n\nb", "", "a\n\nb"),  # ROLL: b
        ("one paragraph", "", "one paragraph"),  # ROLL: nothing
        ("not finished\n\n5", "<think>", None),  # ROLL: 5
        ("<think>not finished\n\n5", "", None),  # ROLL: 5
        ("a</think>b</think>c", "", None),
        ("a<think>b</think>c", "", None),
        ("<think>a</think>b", "<think>\n", None),
    ],
)
def test_the_answer_is_what_follows_the_thought(text: str, prompt: str, read: str | None) -> None:
    assert strip_reasoning(text, prompt) == read


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r'\boxed{5"} or so', '5"'),  # ROLL: none, the quotation is not closed
        (r"\boxed{[0, \})}", r"[0, \})"),
        ("5", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"So \boxed{\frac12}.", "0.5", 1),
        (r"First \boxed{3}." + "\n\nThat is it.", "3", 1),  # ROLL: 0, no box in the last paragraph
        (r"<think>\boxed{3}", "3", 0),
        (r"\boxed{(1,2)}", "(2,1)", 0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        (r"\boxed{x = 3}", "3", 1),
        (r"\boxed{1{,}000}", 1000, 1),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),  # ROLL: 0
        (r"\boxed{\text{Evelyn}}", "Emma", 0),
        ("The answer is 42.", "42", 1),
        ("The answer is 41.", "42", 0),
        (r"\boxed{7} or \boxed{8}", "7", 0),
        ("", "7", 0),
    ],
)
def test_math_rule_compares_values(text: str, truth: object, score: float) -> None:
    verdict = MathRule()(answer(text, truth))
    assert (verdict.score, verdict.correct) == (score, score)


@pytest.mark.parametrize("power", ["10^{10^{10}}", "2^{2^{2^{2^{2^2}}}}", "2^{-10^{10}}", r"\frac{(10^9)!}{3}"])
def test_a_number_too_large_to_compute_is_a_wrong_answer(power: str) -> None:
    """And no timeout; the same one is right."""
    for text, truth, score in ((power, "7", 0), ("7", power, 0), (power.replace("^", " ^ "), power, 1)):
        assert score_answer(MathRule(), answer(rf"\boxed{{{text}}}", truth))["score"] == score


@pytest.mark.parametrize(("power", "value"), [("1^{10^{10}}", "1"), ("(-1)^{10^{10}+1}", "-1"), ("0^{10^{10}}", "0")])
def test_a_large_power_of_a_small_number_has_its_value(power: str, value: str) -> None:
    for text, truth in ((power, value), (value, power)):
        assert score_answer(MathRule(), answer(rf"\boxed{{{text}}}", truth))["score"] == 1


@pytest.mark.parametrize("text", ["(1+x)^{100000}", r"\binom{1000000000}{500000000}"])
def test_math_that_takes_too_long_is_a_timeout(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """To compare, or already to read: binomials are computed then. Neither would end within hours."""
    # An alarm within the imports of the first comparison would leave modules behind that are half there.
    assert MathRule()(answer(r"\boxed{x = 3}", "3")).score == 1
    monkeypatch.setattr(rules, "SECONDS", 1)
    said = score_answer(MathRule(), answer(rf"\boxed{{{text}}}", "3"))
    assert said["timeout"]
    assert "imeout" in said["error"]


def test_math_rule_measures_form_and_needs_a_truth() -> None:
    details = MathRule(format_pattern=r"^<a>.*</a>$")(answer("<a>1 2 3 1 2 3</a>", "3")).details
    assert details["format"] == 1
    assert details["repetition"] == 0  # "<a>1 2 3" and "1 2 3</a>" differ
    assert repetition_ratio("a b c a b c") == 0.25  # abc twice in four groups of three
    with pytest.raises(RewardError, match="ground_truth"):
        MathRule()(answer(r"\boxed{1}", ""))


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (r"\boxed{B}", ("B", True)),
        (r"\boxed{\text{C}}", ("C", True)),
        (r"\boxed{Option D}", ("D", True)),  # ROLL: O
        (r"A\boxed{b}", (None, True)),
        ("I think the answer is (B) since A is wrong", ("B", False)),
        ("Because of it.", (None, False)),  # ROLL: B
        ("Thinking.\nC. The third.", ("C", False)),
        (r"A is tempting</think>\boxed{D}", ("D", True)),
    ],
)
def test_a_choice_is_a_letter_that_stands_alone(text: str, chosen: tuple[str | None, bool]) -> None:
    assert chosen_letter(text) == chosen


def test_choices_are_scored_by_letter_and_box() -> None:
    texts = (r"\boxed{B}", "The answer is B", r"\boxed{C}", "The answer is C")
    scores = {
        MultipleChoice(): (1, 0, 0, 0),
        GeneralValidation(): (1, 1, 0, 0),
        CrossThinkQA("loose"): (1, 1, -1, -1),
        CrossThinkQA("soft"): (1, 0.5, -0.5, -1),
        CrossThinkQA("strict"): (1, -1, -1, -1),
    }
    for reward, expected in scores.items():
        assert tuple(reward(answer(text, "B")).score for text in texts) == expected  # type: ignore[operator]
    short = CrossThinkQA("soft", response_length_penalty_coef=1)
    lengths = (10, 100, 250, 400, 900)  # ROLL: the padded width for all
    assert [short(answer(texts[0], "B", num_tokens=each)).score for each in lengths] == [0.5, 0.5, 0.75, 1, 1]
    repeated = CrossThinkQA()(answer(r"a b c a b c \boxed{B}", "B"))
    assert repeated.score == pytest.approx(1 - 0.5 * 0.2)
    assert repeated.correct == 1


KEPT: dict[str, tuple[dict[str, Any], str, str]] = {
    "verify_keywords": ({"keyword_list": ["tea", "Cup"]}, "A cup of TEA", "A cup"),
    "verify_keyword_frequency": ({"word": "tea", "N": 2}, "Tea, no tea at all", "teapot tea"),
    "validate_forbidden_words": ({"forbidden_words": ["tea"]}, "coffee", "Tea"),
    "verify_letter_frequency": ({"letter": "a", "N": 2}, "banal", "banana"),
    "verify_paragraph_count": ({"N": 2}, "one\n* * *\ntwo", "one * * * "),
    "validate_word_constraint": ({"N": 20, "quantifier": "around"}, "w " * 18, "w " * 17),
    "verify_sentence_constraint": ({"N": 3, "quantifier": "at least"}, "Go! Dr. No came. Why?", "Dr. No came. "),
    "validate_paragraphs": ({"N": 2, "first_word": "So", "i": 2}, "Well.\n\nSo it is.", "So.\n\nWell."),
    "verify_postscript": ({"postscript_marker": "P.S."}, "Bye. P.S. more", "Bye. P.S. "),
    "validate_placeholders": ({"N": 2}, "[name] at [place]", "[name] []"),
    "verify_bullet_points": ({"N": 2}, "**Bold**\n* one\n- two\n---", "* one\n**two**"),
    "validate_title": ({}, "<<Joy>>\ntext", "<< >>"),
    "validate_choice": ({"options": ["yes", "no"]}, " yes\n", "ye"),
    "validate_highlighted_sections": ({"N": 2}, "*one* and **two**", "**one** only"),
    "validate_sections": ({"N": 2, "section_splitter": "Section"}, "Hi. Section 1 a Section 2 b", "Section 1"),
    "validate_json_format": ({}, '```json\n{"a": 1}\n```', '{"a": 1} so'),
    "validate_repeat_prompt": ({"original_prompt": "Say hi."}, "Say hi.\nHi.", "Hi."),
    "validate_two_responses": ({}, "one ****** two", "one ****** one"),
    "validate_uppercase": ({}, "LOUD!", "LOUd"),
    "validate_lowercase": ({}, "soft.", "Soft."),
    "validate_frequency_capital_words": ({"N": 2, "quantifier": "at most"}, "SO it IS", "SO IT IS"),
    "validate_end": ({"end_phrase": "The end."}, "x The end.\n", "The end. x"),
    "validate_quotation": ({}, ' "quoted" ', '"'),
    "validate_no_commas": ({}, "a b", "a, b"),
}


def test_instructions_are_checked() -> None:
    for name, (arguments, kept, broken) in KEPT.items():
        rule = json.dumps({"func_name": name, "other": None, **arguments})
        assert (follows_instruction(kept, rule), follows_instruction(broken, rule)) == (True, False), name
    verdict = GeneralRule()(answer("x, y</think>a b c a b c", {"func_name": "validate_no_commas"}))
    assert (verdict.correct, verdict.score) == (1, pytest.approx(1 - 0.5 * verdict.details["repetition"]))
    for rule in ({"func_name": "exec"}, "not JSON", {"func_name": "verify_keywords", "keyword_list": None}):
        with pytest.raises(RewardError):
            follows_instruction("", rule)


def test_shapes_are_rewards_of_their_own() -> None:
    assert Format()(answer("<think>a\nb</think>\n<answer>c</answer>")).score == 1
    assert Format()(answer("<answer>c</answer>")).score == 0
    lengths = [Length(100, 20)(answer("", num_tokens=each)).score for each in (10, 80, 85, 100, 500)]
    assert lengths == [0, 0, -0.25, -1, -1]
