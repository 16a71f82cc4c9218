"""Reads problems: rows of files, with their prompts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megatune.config.dialects.swift_rl import PromptSet
from megatune.config.rl.rollout import DatasetFilter
from megatune.config.rl.settings import UNSCORED
from megatune.config.settings import Settings
from megatune.data.bad_rows import MOST_NAMED, RowError, UnsupportedRow
from megatune.data.formats.fields import Inline, encodable, field_names
from megatune.data.formats.messages import content_of
from megatune.data.media.processor import pad_media
from megatune.data.readers import RawRow, read_rows
from megatune.data.sources import datasets_of
from megatune.data.vision import Placed, VisionInput
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.media import with_images, with_placeholders
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
    rows = _rows(data, dataset_filter or DatasetFilter())
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


def find_prompts(settings: Settings, evaluation: bool) -> list[PromptSet]:
    """Find the files of data sets by their names as in training; those on a hub are downloaded.

    Raises:
        MegatuneError: as `resolve_datasets`.
    """
    sources = datasets_of(settings, evaluation=evaluation)
    return [PromptSet(each.name, [*map(str, each.files)], each.num_samples) for each in sources]


def count_rows(files: Sequence[str]) -> int:
    """Count the rows of files.

    Raises:
        MegatuneError: a file is missing (exit code 66).
    """
    return sum(1 for name in files for _ in islice(read_rows(_counted(name)[0]), _counted(name)[1]))


def _counted(name: str) -> tuple[Path, int | None]:
    """Split `FILE#N` into the file and the number of its first rows to read; None for all rows."""
    path, _, count = name.rpartition("#")
    is_counted = path and count.isdecimal() and not Path(name).exists()
    return (Path(path), int(count)) if is_counted else (Path(name), None)


def _rows(data: PromptData, keep: DatasetFilter) -> Iterator[RawRow]:
    """Yield the rows of all files that dataset_filter keeps."""
    fix = "check the path; it is relative to the folder in which the command runs"
    if missing := [name for name in data.file_name if not _counted(name)[0].exists()]:
        findings = [Finding(f"no file {name!r}", "data_args.file_name", "", fix) for name in missing]
        raise MegatuneError(findings, ExitCode.INPUT)
    left = keep.num_samples or None
    for file, count in map(_counted, data.file_name):
        for row in islice(read_rows(file), count):
            raw = replace(row, fields=_rename_verl_columns(row.fields, data))
            if keep.source and raw.error is None and raw.fields.get("source") not in keep.source:
                continue
            if left is not None:
                if not left:
                    return
                left -= 1
            yield raw


def _rename_verl_columns(row: dict[str, Any], data: PromptData) -> dict[str, Any]:
    """Add tag and ground_truth from data_source and reward_model.ground_truth of verl's files and ROLL's image data."""
    truth = row.get("reward_model")
    found = {data.tag: row.get("data_source")}
    found["ground_truth"] = truth.get("ground_truth") if isinstance(truth, Mapping) else None
    more = {name: value for name, value in found.items() if row.get(name) is None and value is not None}
    return {**row, **more} if more else row


class _Reader:
    """Converts rows to problems."""

    def __init__(
        self,
        data: PromptData,
        rewards: Mapping[str, RewardRole],
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        tag_to_template: Mapping[str, str],
        needs_difficulty: bool,
        needs_answers: bool,
        vision: VisionInput | None,
    ) -> None:
        self._needs_difficulty, self._needs_answers, self._vision = needs_difficulty, needs_answers, vision
        self._data, self._rewards, self._tokenizer = data, rewards, tokenizer
        self._template, self._tag_to_template = template, tag_to_template
        self._writers: dict[str | None, Writer] = {}
        by_rules = swift_reader(data, tokenizer, vision, answers=needs_answers) if data.conversation_rules else None
        self._read_row = by_rules or self._messages
        for tag in tag_to_template:  # raises for an unknown template before rows are read
            self._writer(tag)
        self._domain_of = {tag: domain for domain, role in rewards.items() for tag in role.tag_included}
        only = next(iter(rewards)) if len(rewards) == 1 else None
        self._default_domain = UNKNOWN_TAGS if UNKNOWN_TAGS in rewards else only
        self.unknown_tags: Counter[str] = Counter()

    def _domain(self, fields: Mapping[str, Any]) -> str | None:
        """Return the domain of a row; None if no reward would score it."""
        if self._default_domain == UNSCORED:
            return UNSCORED
        if fields.get("domain") is not None:
            return str(fields["domain"])
        tag = str(fields.get(self._data.tag) or "")
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
        encoded = encode_prompts(texts, self._tokenizer, is_complete=self._data.conversation_rules is not None)
        for (index, placed), ids in zip(images.items(), encoded, strict=True):
            try:
                found[index] = with_images(cast(Problem, found[index]), ids, placed, self._vision)
            except RowError as error:
                found[index] = error
            if not ids:
                found[index] = RowError("empty", "the prompt is empty")
        return found

    def _problem(self, raw: RawRow, domain: str) -> tuple[Problem, tuple[Placed, ...]]:
        """Return the problem of a row, without tokens, and its images."""
        if raw.error is not None:
            raise raw.error
        row, tag = raw.fields, encodable(str(raw.fields.get(self._data.tag) or ""), self._data.tag)
        for column in columns_of(self._rewards[domain]):
            if row.get(column) in (None, "", [], {}):
                raise RowError("missing-field", f"the reward of {domain} needs the column {column}")
        if self._needs_difficulty and not _is_number(row.get(DIFFICULTY)):
            what = f"difficulty_loss_weight needs a number from 0 to 1 in the column {DIFFICULTY}"
            raise RowError("missing-field", what, f"there is {row.get(DIFFICULTY)!r}")
        messages, text, placed, answer = self._read_row(row)
        answer_ids = None
        if self._needs_answers:
            if not answer:
                what = "opd_lmbda below 1 trains on answers of the rows"
                raise RowError("no-answer", what, "there is none after the prompt")
            answer_ids = np.array(self._tokenizer(answer, add_special_tokens=False)["input_ids"], np.int64)
        if placed and self._vision is not None:
            text = pad_media(text, self._vision.vision.text)
        named = row.get(self._data.id)
        number = raw.where if named is None else encodable(str(named), self._data.id)
        prompt = encodable(text, "prompt")
        return Problem(number, tag, domain, messages, _NO_TOKENS, row, prompt, answer_ids=answer_ids), placed

    def _messages(self, row: Mapping[str, Any]) -> PromptRow:
        """Return the messages of a row and its prompt, without ms-swift's rules."""
        tag = str(row.get(self._data.tag) or "")
        column = self._data.messages or ("" if self._data.prompt else "messages")
        if column and row.get(column):
            return self._from_messages(row[column], row, tag)
        text = row.get(self._data.prompt or "prompt")
        if isinstance(text, list):  # of messages, as in verl's files
            return self._from_messages(text, row, tag)
        if not isinstance(text, str):
            columns = " or ".join(filter(None, (column, self._data.prompt or "prompt")))
            raise RowError("missing-field", f"there is no prompt in {columns}", f"the row has {field_names(row)}")
        messages = [{"role": "user", "content": text}]
        (written,), placed = with_placeholders(messages, {}, row, self._data.images, self._vision)
        return PromptRow(messages, written["content"], placed)

    def _from_messages(self, value: object, row: Mapping[str, Any], tag: str) -> PromptRow:
        messages, inline = read_messages(value)
        written, placed = with_placeholders(messages, inline, row, self._data.images, self._vision)
        return PromptRow(messages, self._writer(tag)(written), placed)

    def _writer(self, tag: str) -> Writer:
        name = self._tag_to_template.get(tag, self._template)
        if name not in self._writers:
            self._writers[name] = prompt_writer(name, self._tokenizer)
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
