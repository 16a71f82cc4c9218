"""Compare generated answers with reference answers: exact match, accuracy of multiple-choice letters, ROUGE and BLEU.

ROUGE and BLEU are computed by the libraries rouge-score and sacrebleu (pip install 'megatune[evaluate]'). Both compare
words; Chinese and Japanese, which have no spaces between words, are compared by character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError

END_OF_THINK = "</think>"
LIBRARIES = {"rouge_score": "rouge-score", "sacrebleu": "sacrebleu"}  # module to package
ROUGES = ("rouge1", "rouge2", "rougeL")

_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CHARACTERS}]|[^\W_{_CHARACTERS}]+")
_BOXED = "\\boxed{"
_ALONE = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z'])")
_STATED = re.compile(r"answer\s*(?:is|:)", re.IGNORECASE)
_AT_START = re.compile(r"[\s*_(\[${:\\]*([A-Z])(?![A-Za-z'])")
_CHOICE = re.compile(r"\(?([A-Z])(?:[).:].*)?", re.DOTALL)  # a reference answer: B, (B), "B. Paris"


class Scored(NamedTuple):
    """A generated answer and its reference answer."""

    answer: str
    label: str


def missing_libraries() -> list[str]:
    """Return the packages that are missing for ROUGE and BLEU."""
    return [name for module, name in LIBRARIES.items() if find_spec(module) is None]


def require_libraries(where: str) -> None:
    """Raise if the libraries of ROUGE and BLEU are not installed.

    Args:
        where: the option that needs them.

    Raises:
        MegatuneError: UNAVAILABLE.
    """
    if missing := missing_libraries():
        what, fix = f"{' and '.join(missing)} not installed", "pip install 'megatune[evaluate]'"
        raise MegatuneError(Finding(what, where, fix=fix), ExitCode.UNAVAILABLE)


def text_scores(answers: Sequence[Scored]) -> dict[str, float]:
    """Score answers, without their reasoning blocks and surrounding white space.

    Returns:
        exact_match, the share of answers that equal their references; choice_accuracy, the share of correct letters, if
        every reference is a choice; if the libraries are installed, rouge1, rouge2 and rougeL, mean F1 from 0 to 1, and
        bleu of the whole corpus, 0 to 100. Without answers {}.
    """
    if not answers:
        return {}
    pairs = [Scored(_read(each.answer), _read(each.label)) for each in answers]
    found = {"exact_match": sum(answer == label for answer, label in pairs) / len(pairs)}
    choices = [_CHOICE.fullmatch(label) for _, label in pairs]
    if all(choices):
        correct = (
            chosen_letter(pair.answer)[0] == choice[1] for pair, choice in zip(pairs, choices, strict=True) if choice
        )
        found["choice_accuracy"] = sum(correct) / len(pairs)
    if not missing_libraries():
        found |= _rouge(pairs) | _bleu(pairs)
    return found


def is_equal(answer: str, label: str) -> bool:
    """Return whether an answer is an exact match."""
    return _read(answer) == _read(label)


def _read(text: str) -> str:
    """Return an answer without its reasoning block."""
    return text.rpartition(END_OF_THINK)[2].strip()


class _RougeTokenizer:
    """A tokenizer for rouge-score, whose default drops every letter beyond a to z."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def _rouge(pairs: Sequence[Scored]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGES, tokenizer=_RougeTokenizer())
    scored = [scorer.score(label, answer) for answer, label in pairs]
    return {name: sum(each[name].fmeasure for each in scored) / len(scored) for name in ROUGES}


def _bleu(pairs: Sequence[Scored]) -> dict[str, float]:
    from sacrebleu.metrics.bleu import BLEU

    has_characters = any(re.search(f"[{_CHARACTERS}]", label) for _, label in pairs)
    metric = BLEU(tokenize="zh" if has_characters else "13a")
    return {"bleu": metric.corpus_score([answer for answer, _ in pairs], [[label for _, label in pairs]]).score}


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{} with balanced braces; None if there is none.

    Escaped braces, \{ and \}, are text.
    """
    end = len(text)
    while (start := text.rfind(_BOXED, 0, end)) >= 0:
        depth, place = 1, start + len(_BOXED)
        while place < len(text) and depth:
            if text[place] == "\\":
                place += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        if not depth:
            return text[start + len(_BOXED) : place - 1]
        end = start
    return None


def chosen_letter(text: str) -> tuple[str | None, bool]:
    r"""Return the chosen letter of a multiple-choice answer, and whether it is in a \boxed{}.

    Without a box it is the letter after the last "answer is" or "answer:", or the one at the start of the last line.
    """
    read = text.rpartition(END_OF_THINK)[2]
    boxed = last_boxed(read)
    if boxed is not None:
        plain = re.sub(r"\\\w+\s*", " ", boxed)  # \text{B}
        found = _ALONE.search(plain)
        return (found.group(1) if found else None), True
    stated = list(_STATED.finditer(read))
    lines = read.strip().splitlines()
    place = read[stated[-1].end() :] if stated else (lines[-1] if lines else "")
    found = _ALONE.search(place) if stated else _AT_START.match(place)
    return (found.group(1) if found else None), False
