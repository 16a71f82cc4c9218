"""Instructions whose keeping a program can check: IFEval's, by the names that the public training data gives them.

general_rule is 1 where a response keeps the instruction of its row, less up to 0.5 for what it repeats. ROLL scores a
row by the row before it where its tag is not ifeval, and breaks where one row names no check; here the tag does not
matter, and a row without a check is an error of its own.

A check is a function for each instruction: the text of a response and the row's arguments -> whether it was kept.

Names and arguments are those of the public data (func_name and its fields, N as n). ROLL's own checks differ where they
are at fault: verify_keyword_frequency counts all words, validate_choice takes a part of an option, also no text at all,
validate_highlighted_sections counts "**" as a section, validate_sections counts what stands before the first,
verify_bullet_points takes bold lines and rules for points, sentences end by . and ? only, and spaces around a response
count for validate_end, validate_quotation and validate_json_format.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatune.data.text_scores import END_OF_THINK
from megatune.rl.rewards.answer import REPETITION_PENALTY, Answer, RewardError, Verdict, repeated_share

Check = Callable[..., bool]


def _holds(count: int, number: int, quantifier: str, tolerance: int) -> bool:
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
    return _holds(len(text.split()), n, quantifier, _tenth(n))


def verify_sentence_constraint(text: str, n: int, quantifier: str) -> bool:
    """At least, at most or around N sentences; around: one more or less."""
    plain = re.sub(r"\b(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|vs|[a-z]\.[a-z])\.(?=\s)", "", text)  # initials, titles, e.g.
    sentences = [part for part in re.split(r"(?<=[.?!])\s|(?<=[。？！])", plain) if part.strip()]
    return _holds(len(sentences), n, quantifier, 1)


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
    """Exactly N points of a list of Markdown's."""
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
    """The whole text is JSON, as it is or in one block of code."""
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
    """No letter is small."""
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    """No letter is a capital."""
    return text == text.lower()


def validate_frequency_capital_words(text: str, n: int, quantifier: str) -> bool:
    """At least, at most or around N words in capitals; around: a tenth more or less, at least one word."""
    return _holds(len(re.findall(r"\b[A-Z]+\b", text)), n, quantifier, _tenth(n))


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
        kept = float(is_kept(answer.text.rpartition(END_OF_THINK)[2].lstrip("\n"), answer.row.get("ground_truth")))
        repetition = repeated_share(answer.text)
        return Verdict(kept - REPETITION_PENALTY * repetition, kept, {"repetition": repetition})


def is_kept(text: str, rule: object) -> bool:
    """Tell whether a text keeps a rule, as the column ground_truth gives it.

    Raises:
        RewardError: the rule names no check, or lacks an argument of its.
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
