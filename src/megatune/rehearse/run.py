"""Runs the stages of a rehearsal, and prints their table."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatune.config.load import Loaded
from megatune.config.rules import check
from megatune.config.settings import Settings
from megatune.doctor.check import Verdict
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.launch.devices import free_memory
from megatune.pages import Page, show_pages
from megatune.plan.machine import Machine
from megatune.progress import say
from megatune.rehearse import stages
from megatune.rehearse.file_checks import (
    DATA,
    DISK,
    SETTINGS,
    TEMPLATE,
    Rows,
    rehearse_data,
    rehearse_disk,
    rehearse_settings,
    rehearse_template,
)
from megatune.rehearse.model import RealModel, SmallModel, find_real_model, shrink, write_model
from megatune.rehearse.outcome import Change, Outcome, as_json, exit_code, failed, from_error, pages, skipped
from megatune.rehearse.ranks import Interrupted
from megatune.rehearse.settings import MOST_PROCESSES, describe_layout, rehearsal_world_size, shrink_settings

PROCESS_BYTES = 450 * 2**20  # of one rank, without its part of the model
_BYTES_PER_PARAMETER = 24  # weights, gradients and optimizer, and copies while saving and comparing
_MAX_MEMORY = 0.8  # of free memory
_NO_ROWS = Rows(skipped(DATA, "nothing was read"))


@dataclass
class Rehearsal:
    """A rehearsal.

    Args:
        loaded: the settings of the file.
        world_size: GPUs of the real run.
        machine: their kind; None if unknown.
        folder: folder for all files.
        show: called with each line of progress.

    Attributes:
        outcomes: outcomes of the stages.
        changes: differences from the file.
    """

    loaded: Loaded
    world_size: int
    machine: Machine | None
    folder: Path
    show: Callable[[str], None]
    outcomes: list[Outcome] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    _real: RealModel | None = None
    _settings: Settings | None = None  # of the file, valid
    _small: SmallModel | None = None
    _rows: Rows = _NO_ROWS

    @property
    def _model_dir(self) -> Path:
        return self.folder / "model"

    def run(self, later: Mapping[str, stages.Stage] = stages.STAGES) -> None:
        """Run stage 1 and the later stages; stages that depend on a failed one are skipped.

        Args:
            later: the stages after the first one, by name.
        """
        with _environment(self.folder):
            self._run_stage(SETTINGS, self._rehearse_settings)
            self._run_stage(TEMPLATE, self._rehearse_template)
            self._run_stage(DATA, self._rehearse_data)
            self._run_stage(DISK, self._rehearse_disk)
            try:
                context = self._context()
            except MegatuneError as error:
                self._add(from_error(stages.TRAIN, error))
                return
            for name, stage in later.items():
                if isinstance(context, str):
                    self._add(skipped(name, context))
                else:
                    self._run_stage(name, partial(stage, context))

    def _rehearse_settings(self) -> Outcome:
        try:
            self._real = find_real_model(self.loaded.settings)
        except MegatuneError as error:
            others = self.loaded.check(None, self.world_size)
            return failed(SETTINGS, [*others, *error.findings], ExitCode.SETTINGS if others else error.exit_code)
        folder = self.folder / "real"
        outcome, checked = rehearse_settings(self.loaded, self._real, self.world_size, self.machine, folder)
        self._settings = None if checked is None else checked.settings
        return outcome

    def _rehearse_template(self) -> Outcome:
        """Check the template against the real tokenizer or a demo one, and write the small model with it."""
        settings, real = self._settings or self.loaded.settings, self._real
        if real is None or "data.template" in self.loaded.invalid:
            return skipped(TEMPLATE, f"stage {SETTINGS} has to pass first")
        outcome = rehearse_template(settings, real)
        if self._settings is None or outcome.verdict is Verdict.FAIL:
            return outcome
        small = shrink(real, settings.parallel)
        own = real.folder is not None and self._fits_memory(small, settings)
        if not own:
            why = real.note or f"{small.architecture.vocab_size:,} tokens do not fit this machine's memory"
            self.changes.append(Change("tokenizer", "the model's", "a demo tokenizer", why))
        write_model(small, self._model_dir, settings.data.template, settings.run.seed, real_tokenizer=own)
        self._small = small
        return outcome

    def _rehearse_data(self) -> Outcome:
        if self._settings is None or self._real is None or self._small is None:
            return skipped(DATA, self._reason())
        folder = self._real.folder
        self._rows = rehearse_data(
            self.loaded, self._settings, folder or self._model_dir, real_tokenizer=folder is not None
        )
        return self._rows.outcome

    def _rehearse_disk(self) -> Outcome:
        settings = self._settings or self.loaded.settings
        if self._real is None or not settings.run.output_dir or "run.output_dir" in self.loaded.invalid:
            return skipped(DISK, self._reason())
        return rehearse_disk(settings, self._real, self.world_size, self._rows)

    def _context(self) -> stages.Context | str:
        """Return the inputs of the later stages, or the reason to skip them.

        Raises:
            MegatuneError: INTERNAL if the rules refuse the settings of the rehearsal.
        """
        settings, small = self._settings, self._small
        if settings is None or small is None or self._rows.report is None:
            return self._reason()
        self.changes += small.changes()
        world = rehearsal_world_size(settings.parallel, self.world_size)
        if world > MOST_PROCESSES:
            return f"one replica needs {world} processes, and a rehearsal starts {MOST_PROCESSES} at most"
        if (needed := world * PROCESS_BYTES) > (free := int(_MAX_MEMORY * free_memory())):
            return f"{world} processes need about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        words = describe_layout(settings.parallel, world)
        if world < self.world_size:
            why = "two data-parallel replicas are enough"
            if world == settings.parallel.model_parallel_size:
                why = f"{MOST_PROCESSES} processes at most: data parallelism is not rehearsed"
            before = describe_layout(settings.parallel, self.world_size)
            self.changes.append(Change("layout", before, words, why))
        architecture = load_architecture(self._model_dir, *settings.task)
        own = str(self._model_dir), str(self.folder / stages.WHOLE)
        small_settings, changes = shrink_settings(settings, architecture, small.layout, *own)
        self.changes += changes
        if problems := check(small_settings, architecture, world):
            raise MegatuneError(problems, ExitCode.INTERNAL)
        self.show(f"rehearsed as {words} in {world} CPU processes" if world > 1 else "rehearsed in one process")
        return stages.Context(small_settings, world, architecture, self._model_dir, self.folder)

    def _reason(self) -> str:
        """Return the reason to skip a stage: the first one that failed."""
        wrong = next((one for one in self.outcomes if one.verdict is Verdict.FAIL), None)
        return f"stage {wrong.stage} has to pass first" if wrong else "nothing was read"

    def _fits_memory(self, small: SmallModel, settings: Settings) -> bool:
        """Return whether embeddings and output layers of all replicas fit in memory with the real vocabulary."""
        parallel, architecture = settings.parallel, small.architecture
        copies = max(1, rehearsal_world_size(parallel, self.world_size) // parallel.model_parallel_size)
        needed = 2 * copies * architecture.vocab_size * architecture.hidden_size * _BYTES_PER_PARAMETER
        return needed < _MAX_MEMORY * free_memory() / 2

    def _run_stage(self, name: str, stage: Callable[[], Outcome]) -> None:
        began = time.monotonic()
        try:
            outcome = stage()
        except MegatuneError as error:
            outcome = from_error(name, error)
        self._add(replace(outcome, seconds=time.monotonic() - began))

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.show(f"{outcome.stage}: {outcome.verdict} ({outcome.seconds:.1f} s)")


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Set environment variables: one thread per rank, no GPUs, as there may be fewer than ranks, and a temporary cache
    of prepared rows."""
    own = {"MEGATUNE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    own["CUDA_VISIBLE_DEVICES"] = ""
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def rehearse(loaded: Loaded, gpus: int, machine: Machine | None, *, keep: str | None, report: str | None) -> int:
    """Rehearse the settings, and print the results.

    Args:
        gpus: number of GPUs of the real run.
        keep: a new or empty folder for all files; None uses a temporary one.
        report: a file for the results as JSON.

    Returns:
        The exit code of the first failure; DONE if there is none.
    """
    folder = _folder(keep)
    try:
        rehearsal = Rehearsal(loaded.for_world(gpus), gpus, machine, folder, say)
        try:
            rehearsal.run()
        except Interrupted as ended:
            print("interrupted", file=sys.stderr)
            return int(ended.args[0])
        changed = Page("changed for the rehearsal", (f"  {change.line()}" for change in rehearsal.changes))
        print()
        show_pages([changed, *pages(rehearsal.outcomes)])
        if keep is not None:
            print(f"all files are in {folder}")
        if report is not None:
            _write(Path(report), as_json(rehearsal.outcomes, rehearsal.changes))
        return int(exit_code(rehearsal.outcomes))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(keep: str | None) -> Path:
    """Create the folder for all files: a private temporary one, unless the user names one."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="megatune-rehearse-"))
    folder = Path(keep).absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise _cannot_write(folder, "the folder is not empty")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error.strerror or str(error)) from None
    return folder


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from None


def _cannot_write(path: Path, why: str) -> MegatuneError:
    return MegatuneError(Finding(f"cannot write {path}", "", why, "name another path"), ExitCode.CANNOT_WRITE)
