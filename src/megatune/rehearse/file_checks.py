"""Stage 1: check the file for the real number of GPUs: settings, plan, template, rows, folders and disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

from megatune.config.load import Loaded
from megatune.config.settings import Settings, with_settings
from megatune.config.values import counted
from megatune.data.bad_rows import BAD_ROWS_FILE, TOO_LONG
from megatune.data.check import Checked, check_data
from megatune.data.report import DataReport
from megatune.data.templates import check_template
from megatune.doctor.check import Verdict
from megatune.doctor.folders import folders
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.machine import Machine
from megatune.plan.pages.words import fullest, seconds
from megatune.plan.run.preflight import Preflight, preflight
from megatune.rehearse.model import RealModel
from megatune.rehearse.outcome import Outcome, failed, from_error, passed, skipped
from megatune.rehearse.settings import describe_layout
from megatune.training.storage.files import read_json_lines

SETTINGS, TEMPLATE, DATA, DISK = "1 settings, plan", "1 template", "1 data", "1 folders, disk"
CHECKED_ROWS = 2000  # of each data set
_MOST_NAMED = 20
_DEMO_TOKENS = 4  # maximum ratio of a demo tokenizer's tokens to a published one's


def rehearse_settings(
    loaded: Loaded, real: RealModel, world_size: int, machine: Machine | None, folder: Path
) -> tuple[Outcome, Preflight | None]:
    """Check the file against the real model, the number of GPUs and, if it is known, their memory.

    Args:
        folder: the model's config.json is written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(real.config), encoding="utf-8")
    try:
        checked = preflight(loaded, world_size, (), machine, model_dir=lambda name: folder)
    except MegatuneError as error:
        return from_error(SETTINGS, error), None
    words = describe_layout(checked.settings.parallel, world_size)
    found = f"valid for {counted(world_size, 'GPU')}: {words}"
    if checked.planned is None:
        return passed(SETTINGS, f"{found}; memory was not estimated (add --gpu KIND)"), checked
    planned = checked.planned
    found += f"; on {planned.case.machine.device.name} {fullest(planned)}, about {seconds(planned.time.total)} per step"
    return passed(SETTINGS, found), checked


def rehearse_template(settings: Settings, real: RealModel) -> Outcome:
    """Check the template against the model's tokenizer, if that is on this machine."""
    name = settings.data.template
    if settings.run.stage == "pt":
        return passed(TEMPLATE, "stage pt uses no template")
    try:
        check_template(name, real.folder, is_swift=bool(settings.data.swift_version))
    except MegatuneError as error:
        return from_error(TEMPLATE, error)
    if real.folder is None:
        return skipped(
            TEMPLATE, f"{real.note}: a demo tokenizer of the family with the template's tokens is used instead"
        )
    return passed(TEMPLATE, f"{name or 'the chat template'} fits the tokenizer in {real.folder}")


@dataclass(frozen=True, slots=True)
class Rows:
    """The results of preparing the rows.

    Attributes:
        report: None if rows could not be prepared.
        whole: whether all rows were read.
    """

    outcome: Outcome
    report: DataReport | None = None
    whole: bool = False


def rehearse_data(loaded: Loaded, settings: Settings, folder: Path, *, real_tokenizer: bool) -> Rows:
    """Prepare the rows of the data sets, and report invalid ones.

    Args:
        folder: has the tokenizer and, for a vision-language model, the processors.
        real_tokenizer: whether the tokenizer is the model's, so that lengths are real.
    """
    from megatune.data.encode import load_tokenizer
    from megatune.data.prepare import prepare
    from megatune.data.vision import load_vision_input

    checked = Checked()
    check_data(settings, checked, tokenizer=None, invalid={"data.template"})
    if checked.errors:
        findings = dict.fromkeys(finding for error in checked.errors for finding in error.findings)
        return Rows(failed(DATA, findings, min(error.exit_code for error in checked.errors)))
    try:
        tokenizer = load_tokenizer(folder)
        read = _to_read(settings, real_tokenizer)
        prepared = prepare(read, tokenizer, vision=load_vision_input(folder, tokenizer, read.data))
    except MegatuneError as error:
        return Rows(from_error(DATA, error))
    report = prepared.report
    most = read.data.max_samples or 0
    whole = most == settings.data.max_samples or all(one.read < most for one in report.datasets)
    which = "all" if whole else f"the first {CHECKED_ROWS:,} of each data set"
    found = f"{counted(sum(one.read for one in report.datasets), 'row')} read ({which}): {report.train.line()}"
    if not real_tokenizer:
        found += "; tokens are those of a demo tokenizer"
    bad, number = _bad_rows(prepared.directory / BAD_ROWS_FILE)
    if not bad:
        return Rows(passed(DATA, found), report, whole)
    if "data.on_bad_row" in loaded.written and settings.data.on_bad_row != "error":
        found += f"; {counted(number, 'row')} dropped by on_bad_row: {settings.data.on_bad_row}"
        return Rows(passed(DATA, found), report, whole)
    fix = "correct them, or write on_bad_row: skip to drop them"
    total = Finding(f"{counted(number, 'row')} cannot be trained on", "dataset", "", fix)
    return Rows(failed(DATA, [total, *bad], ExitCode.DATA), report, whole)


def _to_read(settings: Settings, real_tokenizer: bool) -> Settings:
    """Return settings that read the first rows and record all bad ones."""
    data = settings.data
    changes = {
        "data.max_samples": min(data.max_samples or CHECKED_ROWS, CHECKED_ROWS),
        "data.on_bad_row": "quarantine",
        "data.max_bad_rows": data.max_bad_rows if data.on_bad_row != "error" else None,
        "data.preprocessing_num_workers": None,
        "data.tokenized_path": None,
        "data.streaming": False,
    }
    if not real_tokenizer:
        changes |= {"data.cutoff_len": _DEMO_TOKENS * data.cutoff_len, "data.truncation_strategy": "budget"}
    return with_settings(settings, changes)


def _bad_rows(path: Path) -> tuple[list[Finding], int]:
    """Return findings for the first bad rows, and the number of all."""
    bad = [row for row in read_json_lines(path) if row["code"] != TOO_LONG]
    return [Finding(row["reason"], row["where"], row["detail"]) for row in bad[:_MOST_NAMED]], len(bad)


def rehearse_disk(settings: Settings, real: RealModel, world_size: int, rows: Rows) -> Outcome:
    """Check the folders that the real run writes, and the disk space for its checkpoints."""
    from megatune.training.checks import DiskSpace, check_checkpoint, check_output, check_weights

    checked = Checked()
    checked.run(partial(check_output, settings))
    checked.run(partial(check_checkpoint, settings))
    named = None if settings.model.mcore_model else settings.model.model_name_or_path
    for folder in (Path(name) for name in (named, settings.preference.ref_model) if name):
        if (folder / "config.json").is_file():
            checked.run(partial(check_weights, folder))
    findings = [finding for error in checked.errors for finding in error.findings]
    code = min((error.exit_code for error in checked.errors), default=ExitCode.CANNOT_WRITE)
    assert settings.run.output_dir is not None
    room = DiskSpace.of(settings, real.architecture, _num_steps(settings, world_size, rows))
    found = room.words
    if not any(error.exit_code == ExitCode.CANNOT_WRITE for error in checked.errors):
        checks = list(folders(Path(settings.run.output_dir), room))
        wrong = (each for each in checks if each.verdict is Verdict.FAIL)
        findings += [Finding(f"{each.name}: {each.found}", "output_dir", each.why, each.fix) for each in wrong]
        found = "; ".join(f"{each.name}: {each.found}" for each in checks if each.verdict is not Verdict.FAIL)
    return failed(DISK, findings, code) if findings else passed(DISK, found)


def _num_steps(settings: Settings, world_size: int, rows: Rows) -> int | None:
    """Return the number of steps of the real run; None if it has max_steps or the number of rows is unknown."""
    batch, optimizer = settings.batch, settings.optimizer
    if optimizer.max_steps > 0 or rows.report is None or not rows.whole or settings.data.streaming:
        return None
    replicas = world_size // settings.parallel.model_parallel_size
    batch_size = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * replicas
    return ceil(optimizer.num_train_epochs * ceil(rows.report.train.rows / batch_size))
