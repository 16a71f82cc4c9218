"""general_rule: instructions that a program can verify, those of IFEval by their names in the public training data.

The score is 1 if a response follows the instruction of its row, less up to 0.5 for repetition. In ROLL, a row whose tag
is not ifeval gets the score of the previous row, and one row without a check ends the run; here the tag does not
matter, and a row without a check is an error of that row only.

Each check is a function of the response's text and the row's arguments, and returns whether the instruction is
followed.

Names and arguments are those of the public data (func_name and its fields, N as n). ROLL's checks have errors:
verify_keyword_frequency counts all words, validate_choice accepts a part of an option, even an empty text,
validate_highlighted_sections counts "**" as a section, validate_sections counts the text before the first section,
verify_bullet_points counts bold lines and horizontal rules, sentences end only with . and ?, and whitespace around a
response matters to validate_end, validate_quotation and validate_json_format.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatune.data.text_scores import END_OF_THINK
from megatune.rl.rewards.answer import REPETITION_PENALTY, Answer, RewardError, Verdict, repetition_ratio

Check = Callable[..., bool]


def _compare(count: int, number: int, quantifier: str, tolerance: int) -> bool:
    if quantifier == "around":
        return abs(count - number) <= tolerance
    if quantifier not in ("at least", "at most"):
        raise RewardError(f"quantifier {quantifier!r}: at least, at most or around")
    return count >= number if quantifier == "at least" else count <= number


def _tenth(number: int) -> int:
    return max(round(number / 10), 1)


def _list(value: Sequence[str] | str) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def verify_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    """All keywords occur, in any case."""
    return all(word.lower() in text.lower() for word in _list(keyword_list))


def verify_keyword_frequency(text: str, word: str, n: int) -> bool:
    """A word occurs exactly N times, as a whole word, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower())) == n


def validate_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs."""
    return not any(word.lower() in text.lower() for word in _list(forbidden_words))


def verify_letter_frequency(text: str, letter: str, n: int) -> bool:
    """A letter occurs exactly N times, in this case."""
    if len(letter) != 1:
        raise RewardError(f"letter {letter!r} is not one letter")
    return text.count(letter) == n


def validate_response_language(text: str, language: str) -> bool:
    """The text is in a language: its code in ISO 639-1, as langdetect finds it."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect  # type: ignore[import-not-found]
    except ImportError as error:
        raise RewardError("validate_response_language needs the package langdetect") from error
    DetectorFactory.seed = 0  # it draws at random otherwise
    try:
        return bool(detect(text) == language)
    except LangDetectException:  # no letters
        return False


def verify_paragraph_count(text: str, n: int) -> bool:
    """N paragraphs, none empty, with "* * *" between them."""
    parts = re.split(r"\*[ \t]\*[ \t]\*", text)
    return len(parts) == n and all(part.strip() for part in parts)


def validate_word_constraint(text: str, n: int, quantifier: str) -> bool:
    """At least, at most or around N words; around: a tenth more or less, at least one word."""
    return _compare(len(text.split()), n, quantifier, _tenth(n))


def verify_sentence_constraint(text: str, n: int, quantifier: str) -> bool:
    """At least, at most or around N sentences; around: one more or less."""
    plain = re.sub(r"\b(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|vs|[a-z]\.[a-z])\.(?=\s)", "", text)  # initials, titles, e.g.
    sentences = [part for part in re.split(r"(?<=[.?!])\s|(?<=[。？！])", plain) if part.strip()]
    return _compare(len(sentences), n, quantifier, 1)


def validate_paragraphs(text: str, n: int, first_word: str, i: int) -> bool:
    """N paragraphs with an empty line between them, of which the i-th, from 1, starts with a word."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text.strip())]
    return len(parts) == n and 1 <= i <= n and parts[i - 1].startswith(first_word)


def verify_postscript(text: str, postscript_marker: str) -> bool:
    """A postscript with this marker, and something after it."""
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker and rest.strip())


def validate_placeholders(text: str, n: int) -> bool:
    """At least N placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= n


def verify_bullet_points(text: str, n: int) -> bool:
    """Exactly N bullet points of Markdown."""
    return len(re.findall(r"^[ \t]*[*-][ \t]+\S", text, re.MULTILINE)) == n


def validate_title(text: str) -> bool:
    """A title in double angular brackets."""
    return bool(re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", text))


def validate_choice(text: str, options: Sequence[str]) -> bool:
    """The text is one of the options."""
    return text.strip() in [option.strip() for option in _list(options)]


def validate_highlighted_sections(text: str, n: int) -> bool:
    """At least N parts highlighted as in Markdown, *so* or **so**."""
    found = re.findall(r"\*\*[^\n*]+\*\*|(?<!\*)\*[^\n*]+\*(?!\*)", text)
    return sum(bool(part.strip("* \t")) for part in found) >= n


def validate_sections(text: str, n: int, section_splitter: str) -> bool:
    """N sections, each of which begins with the splitter."""
    return text.count(section_splitter) == n


def validate_json_format(text: str) -> bool:
    """The whole text is JSON, plain or in one code block."""
    block = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(block.group(1) if block else text)
    except ValueError:
        return False
    return True


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """The text begins with the request, unchanged."""
    return text.lstrip().startswith(original_prompt.strip())


def validate_two_responses(text: str) -> bool:
    """Two different responses with six asterisks between them."""
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1] and all(parts)


def validate_uppercase(text: str) -> bool:
    """All letters are uppercase."""
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    """All letters are lowercase."""
    return text == text.lower()


def validate_frequency_capital_words(text: str, n: int, quantifier: str) -> bool:
    """At least, at most or around N words in capitals; around: a tenth more or less, at least one word."""
    return _compare(len(re.findall(r"\b[A-Z]+\b", text)), n, quantifier, _tenth(n))


def validate_end(text: str, end_phrase: str) -> bool:
    """The text ends with a phrase."""
    return text.rstrip().endswith(end_phrase.strip())


def validate_quotation(text: str) -> bool:
    """The text is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def validate_no_commas(text: str) -> bool:
    """No commas."""
    return "," not in text


CHECKS: dict[str, Check] = {
    name: value for name, value in dict(globals()).items() if name.startswith(("verify_", "validate_"))
}


class GeneralRule:
    """The column ground_truth is an object, or JSON of one: func_name, and the check's arguments."""

    def __call__(self, answer: Answer) -> Verdict:
        followed = float(
            follows_instruction(answer.text.rpartition(END_OF_THINK)[2].lstrip("\n"), answer.row.get("ground_truth"))
        )
        repetition = repetition_ratio(answer.text)
        return Verdict(followed - REPETITION_PENALTY * repetition, followed, {"repetition": repetition})


def follows_instruction(text: str, rule: object) -> bool:
    """Return whether a text follows the instruction in the column ground_truth.

    Raises:
        RewardError: the instruction names no check, or lacks an argument of the check.
    """
    try:
        rule = json.loads(rule) if isinstance(rule, str) else rule
    except ValueError as error:
        raise RewardError(f"ground_truth is not valid JSON: {error}") from error
    if not isinstance(rule, Mapping) or rule.get("func_name") not in CHECKS:
        name = rule.get("func_name") if isinstance(rule, Mapping) else rule
        raise RewardError(f"ground_truth names no check: {str(name)[:60]!r}; one of {', '.join(CHECKS)}")
    check = CHECKS[rule["func_name"]]
    given: dict[str, Any] = {}
    for name in list(inspect.signature(check).parameters)[1:]:
        key = "N" if name == "n" else name
        if rule.get(key) is None:
            raise RewardError(f"{rule['func_name']} lacks {key}")
        given[name] = rule[key]
    return check(text, **given)
