"""Converts rows of files to problems, with their prompts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megatune.config.rl.rollout import DatasetFilter
from megatune.config.rl.settings import UNSCORED
from megatune.data.bad_rows import MOST_NAMED, RowError, UnsupportedRow
from megatune.data.formats.fields import Inline, encodable, field_names
from megatune.data.formats.messages import content_of
from megatune.data.media.processor import pad_media
from megatune.data.readers import RawRow
from megatune.data.vision import Placed, VisionInput
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.media import with_images, with_placeholders
from megatune.rl.problem_files import problem_rows
from megatune.rl.prompts import PromptRow, Writer, encode_prompts, prompt_writer, swift_reader
from megatune.rl.rewards.kinds import columns_of
from megatune.rl.samples import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.rollout import PromptData
    from megatune.config.rl.settings import RewardRole

DIFFICULTY = "difficulty"  # the column of difficulty_loss_weight: 0 easy ... 1 hard
UNKNOWN_TAGS = "math_rule"  # the domain of rows whose tag belongs to no reward, if there is such a domain


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems of a run.

    Attributes:
        by_domain: problems in the order of the files.
        notes: lines for the log about read and excluded rows, and unknown tags.
    """

    by_domain: dict[str, list[Problem]]
    notes: tuple[str, ...] = field(default=())

    def all(self) -> list[Problem]:
        """Return the problems of all domains, for validation."""
        return [problem for problems in self.by_domain.values() for problem in problems]


def read_problems(
    data: PromptData,
    rewards: Mapping[str, RewardRole],
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    template: str | None = None,
    tag_to_template: Mapping[str, str] | None = None,
    dataset_filter: DatasetFilter | None = None,
    *,
    needs_difficulty: bool = False,
    needs_answers: bool = False,
    vision: VisionInput | None = None,
) -> Problems:
    """Read the rows of all files and write their prompts.

    A row's domain is its column `domain`, else that of the reward whose `tag_included` has its tag, else math_rule, or
    the only reward. Only the domains of `data.domain_interleave_probs` are kept, or without it (validation) those of
    `rewards`.

    Args:
        template: global_template; None for `data.template`.
        needs_difficulty: whether every row needs a number in the column difficulty (difficulty_loss_weight).
        needs_answers: whether every row needs its own answer (opd_lmbda below 1).
        vision: None for a text-only policy.

    Raises:
        MegatuneError: (DATA) with all rows that cannot be read or lack a column that their reward needs, and domains
            without problems; (INPUT) a file is missing; (SETTINGS) an unknown template.
    """
    given = template or data.template, tag_to_template or {}, needs_difficulty, needs_answers, vision
    reader = _Reader(data, rewards, tokenizer, *given)
    by_domain: dict[str, list[Problem]] = {domain: [] for domain in data.domain_interleave_probs or rewards}
    bad: list[Finding] = []
    too_long, elsewhere, num_bad = 0, Counter[str](), 0
    rows = problem_rows(data, dataset_filter or DatasetFilter())
    while chunk := list(islice(rows, CHUNK_ROWS)):
        for raw, problem in zip(chunk, reader.problems(chunk, by_domain, elsewhere), strict=True):
            if isinstance(problem, RowError):
                num_bad += 1
                if len(bad) < MOST_NAMED:
                    bad.append(Finding(str(problem), raw.where))
            elif problem is not None and len(problem.prompt_ids) > prompt_length:
                too_long += 1
            elif problem is not None:
                by_domain[problem.domain].append(problem)
    if num_bad > len(bad):
        bad.append(Finding(f"{num_bad - len(bad):,} more rows that cannot be used"))
    if not bad:
        bad = [
            Finding(f"domain {domain} has no problems", why=_why_empty(elsewhere, too_long), fix=_FIX_EMPTY)
            for domain, problems in by_domain.items()
            if not problems and (data.domain_interleave_probs or not any(by_domain.values()))
        ]
    if bad:
        raise MegatuneError(bad, ExitCode.DATA)
    return Problems(by_domain, tuple(_notes(by_domain, too_long, elsewhere, reader.unknown_tags)))


CHUNK_ROWS = 1024  # tokenized together
_NO_TOKENS = np.empty(0, dtype=np.int64)
_FIX_EMPTY = "name the tags of its rows in rewards.DOMAIN.tag_included, or raise prompt_length"


@dataclass(slots=True)
class _Reader:
    """Converts rows to problems; for the attributes, see `read_problems`."""

    data: PromptData
    rewards: Mapping[str, RewardRole]
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    tag_to_template: Mapping[str, str]
    needs_difficulty: bool
    needs_answers: bool
    vision: VisionInput | None
    unknown_tags: Counter[str] = field(default_factory=Counter)
    _writers: dict[str | None, Writer] = field(default_factory=dict)
    _read_row: Callable[[Mapping[str, Any]], PromptRow] = field(init=False)
    _domain_of: dict[str, str] = field(init=False)
    _default_domain: str | None = field(init=False)

    def __post_init__(self) -> None:
        self._read_row = self._messages
        if self.data.conversation_rules:
            self._read_row = swift_reader(self.data, self.tokenizer, self.vision, answers=self.needs_answers)
        for tag in self.tag_to_template:  # raises for an unknown template before rows are read
            self._writer(tag)
        self._domain_of = {tag: domain for domain, role in self.rewards.items() for tag in role.tag_included}
        only = next(iter(self.rewards)) if len(self.rewards) == 1 else None
        self._default_domain = UNKNOWN_TAGS if UNKNOWN_TAGS in self.rewards else only

    def _domain(self, fields: Mapping[str, Any]) -> str | None:
        """Return the domain of a row; None if no reward would score it."""
        if self._default_domain == UNSCORED:
            return UNSCORED
        if fields.get("domain") is not None:
            return str(fields["domain"])
        tag = str(fields.get(self.data.tag) or "")
        if tag not in self._domain_of:
            self.unknown_tags[tag] += 1
        return self._domain_of.get(tag, self._default_domain)

    def problems(
        self, chunk: Sequence[RawRow], domains: Collection[str], elsewhere: Counter[str]
    ) -> list[Problem | RowError | None]:
        """Convert rows to problems. The result is None for rows of other domains, which are counted in `elsewhere`, and
        an error for rows that cannot be read, have no prompt, or lack a column that their reward needs."""
        found: list[Problem | RowError | None] = []
        images: dict[int, tuple[Placed, ...]] = {}
        for raw in chunk:
            domain = self._domain(raw.fields)
            if raw.error is None and domain not in domains:
                elsewhere[domain or "no domain"] += 1
                found.append(None)
                continue
            try:
                problem, images[len(found)] = self._problem(raw, domain or "")
                found.append(problem)
            except (RowError, UnsupportedRow) as error:
                found.append(error if isinstance(error, RowError) else RowError("unsupported", error.what))
        texts = [cast(Problem, found[index]).prompt for index in images]
        encoded = encode_prompts(texts, self.tokenizer, is_complete=self.data.conversation_rules is not None)
        for (index, placed), ids in zip(images.items(), encoded, strict=True):
            try:
                found[index] = with_images(cast(Problem, found[index]), ids, placed, self.vision)
            except RowError as error:
                found[index] = error
            if not ids:
                found[index] = RowError("empty", "the prompt is empty")
        return found

    def _problem(self, raw: RawRow, domain: str) -> tuple[Problem, tuple[Placed, ...]]:
        """Return the problem of a row, without tokens, and its images."""
        if raw.error is not None:
            raise raw.error
        row, tag = raw.fields, encodable(str(raw.fields.get(self.data.tag) or ""), self.data.tag)
        for column in columns_of(self.rewards[domain]):
            if row.get(column) in (None, "", [], {}):
                raise RowError("missing-field", f"the reward of {domain} needs the column {column}")
        if self.needs_difficulty and not _is_number(row.get(DIFFICULTY)):
            what = f"difficulty_loss_weight needs a number from 0 to 1 in the column {DIFFICULTY}"
            raise RowError("missing-field", what, f"there is {row.get(DIFFICULTY)!r}")
        messages, text, placed, answer = self._read_row(row)
        answer_ids = None
        if self.needs_answers:
            if not answer:
                what = "opd_lmbda below 1 trains on answers of the rows"
                raise RowError("no-answer", what, "there is none after the prompt")
            answer_ids = np.array(self.tokenizer(answer, add_special_tokens=False)["input_ids"], np.int64)
        if placed and self.vision is not None:
            text = pad_media(text, self.vision.vision.text)
        named = row.get(self.data.id)
        number = raw.where if named is None else encodable(str(named), self.data.id)
        prompt = encodable(text, "prompt")
        return Problem(number, tag, domain, messages, _NO_TOKENS, row, prompt, answer_ids=answer_ids), placed

    def _messages(self, row: Mapping[str, Any]) -> PromptRow:
        """Return the messages of a row and its prompt, without ms-swift's rules."""
        tag = str(row.get(self.data.tag) or "")
        column = self.data.messages or ("" if self.data.prompt else "messages")
        if column and row.get(column):
            return self._from_messages(row[column], row, tag)
        text = row.get(self.data.prompt or "prompt")
        if isinstance(text, list):  # of messages, as in verl's files
            return self._from_messages(text, row, tag)
        if not isinstance(text, str):
            columns = " or ".join(filter(None, (column, self.data.prompt or "prompt")))
            raise RowError("missing-field", f"there is no prompt in {columns}", f"the row has {field_names(row)}")
        messages = [{"role": "user", "content": text}]
        (written,), placed = with_placeholders(messages, {}, row, self.data.images, self.vision)
        return PromptRow(messages, written["content"], placed)

    def _from_messages(self, value: object, row: Mapping[str, Any], tag: str) -> PromptRow:
        messages, inline = read_messages(value)
        written, placed = with_placeholders(messages, inline, row, self.data.images, self.vision)
        return PromptRow(messages, self._writer(tag)(written), placed)

    def _writer(self, tag: str) -> Writer:
        name = self.tag_to_template.get(tag, self.template)
        if name not in self._writers:
            self._writers[name] = prompt_writer(name, self.tokenizer)
        return self._writers[name]


def read_messages(value: object) -> tuple[list[dict[str, str]], Inline]:
    """Parse the messages of a row: a list of objects with role and content, or its JSON. Return them, and the images in
    parts of a content, by message index.

    Raises:
        RowError: the value is something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError("invalid-json", "messages are not valid JSON", str(error)) from error
    if not isinstance(value, list) or not value:
        raise RowError("not-messages", "messages are not a list")
    messages, inline = [], Inline()
    for number, each in enumerate(value):
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise RowError("not-messages", "a message lacks a role or a text as content", str(each)[:80])
        values: list[object] = []
        content = content_of(each, "content", "messages", number + 1, values)
        messages.append({"role": each["role"], "content": content})
        if values:
            inline[number] = values
    return messages, inline


def _is_number(value: object) -> bool:
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _why_empty(elsewhere: Counter[str], too_long: int) -> str:
    others = [f"{count:,} rows belong to {domain}" for domain, count in elsewhere.items()]
    return ", ".join([*others, *([f"{too_long:,} prompts are too long"] if too_long else [])]) or "there are no rows"


def _notes(
    by_domain: Mapping[str, list[Problem]], too_long: int, elsewhere: Counter[str], unknown: Counter[str]
) -> Iterator[str]:
    counts = ", ".join(f"{domain} {len(problems):,}" for domain, problems in by_domain.items() if problems)
    yield f"problems: {counts}"
    if too_long:
        yield f"{too_long:,} rows were left out: their prompts are longer than prompt_length"
    for domain, count in elsewhere.items():
        yield f"{count:,} rows were left out: they belong to {domain}, which is not trained or scored here"
    if unknown:
        tags = ", ".join(f"{tag or 'none'} ({count:,})" for tag, count in unknown.most_common(5))
        yield f"tags that no reward names in tag_included: {tags}"
