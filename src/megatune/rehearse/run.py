"""Plays the acts of a rehearsal one after the other, and prints the table of them."""

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
from megatune.plan.machine import Machine
from megatune.progress import say
from megatune.rehearse import acts
from megatune.rehearse.before import (
    DATA,
    DISK,
    SETTINGS,
    TEMPLATE,
    Rows,
    look_at_data,
    look_at_disk,
    look_at_settings,
    look_at_template,
)
from megatune.rehearse.model import RealModel, SmallModel, find_real_model, shrink, write_model
from megatune.rehearse.outcome import Change, Outcome, as_json, exit_code, failed, left, refused, table
from megatune.rehearse.ranks import Interrupted
from megatune.rehearse.settings import MOST_PROCESSES, describe_layout, rehearsed_world, smaller

PROCESS_BYTES = 450 * 2**20  # of one rank, without its part of the model
_BYTES_A_PARAMETER = 24  # weights, gradients, optimizer, and what a save and a comparison hold of them
_SHARE = 0.8  # of free memory
_NO_ROWS = Rows(left(DATA, "nothing was read"))


@dataclass
class Rehearsal:
    """One rehearsal.

    Args:
        loaded: the file.
        world_size: GPUs of the real run.
        machine: the kind of them, None where it is not known.
        folder: that everything is written into.
        show: is told each line as it comes.

    Attributes:
        outcomes: a row an act.
        changes: what is other than in the file.
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

    def run(self, played: Mapping[str, acts.Act] = acts.ACTS) -> None:
        """Play stage 1, and the others; what cannot be played after a failure is named with it.

        Args:
            played: the acts after the first one, by name.
        """
        with _surroundings(self.folder):
            self._play(SETTINGS, self._look_at_settings)
            self._play(TEMPLATE, self._look_at_template)
            self._play(DATA, self._look_at_data)
            self._play(DISK, self._look_at_disk)
            try:
                scene = self._scene()
            except MegatuneError as error:
                self._add(refused(acts.TRAIN, error))
                return
            for name, act in played.items():
                if isinstance(scene, str):
                    self._add(left(name, scene))
                else:
                    self._play(name, partial(act, scene))

    def _look_at_settings(self) -> Outcome:
        try:
            self._real = find_real_model(self.loaded.settings)
        except MegatuneError as error:
            others = self.loaded.check(None, self.world_size)
            return failed(SETTINGS, [*others, *error.findings], ExitCode.SETTINGS if others else error.exit_code)
        folder = self.folder / "real"
        outcome, checked = look_at_settings(self.loaded, self._real, self.world_size, self.machine, folder)
        self._settings = None if checked is None else checked.settings
        return outcome

    def _look_at_template(self) -> Outcome:
        """Hold the template against the real tokenizer or a demo one, and make the small model, which has it."""
        settings, real = self._settings or self.loaded.settings, self._real
        if real is None or "data.template" in self.loaded.invalid:
            return left(TEMPLATE, f"stage {SETTINGS} has to pass first")
        outcome = look_at_template(settings, real)
        if self._settings is None or outcome.verdict is Verdict.FAIL:
            return outcome
        small = shrink(real, settings.parallel)
        own = real.folder is not None and self._fits_memory(small, settings)
        if not own:
            why = real.note or f"{small.architecture.vocab_size:,} tokens do not fit this machine's memory"
            self.changes.append(Change("tokenizer", "the model's own", "a demo tokenizer", why))
        write_model(small, self._model_dir, settings.data.template, settings.run.seed, real_tokenizer=own)
        self._small = small
        return outcome

    def _look_at_data(self) -> Outcome:
        if self._settings is None or self._real is None or self._small is None:
            return left(DATA, self._reason())
        folder = self._real.folder
        self._rows = look_at_data(
            self.loaded, self._settings, folder or self._model_dir, real_tokenizer=folder is not None
        )
        return self._rows.outcome

    def _look_at_disk(self) -> Outcome:
        settings = self._settings or self.loaded.settings
        if self._real is None or not settings.run.output_dir or "run.output_dir" in self.loaded.invalid:
            return left(DISK, self._reason())
        return look_at_disk(settings, self._real, self.world_size, self._rows)

    def _scene(self) -> acts.Scene | str:
        """Return what the other acts play with, or why they cannot be played.

        Raises:
            MegatuneError: INTERNAL, where the rules refuse the settings of the rehearsal.
        """
        settings, small = self._settings, self._small
        if settings is None or small is None or self._rows.report is None:
            return self._reason()
        self.changes += small.changes()
        world = rehearsed_world(settings.parallel, self.world_size)
        if world > MOST_PROCESSES:
            return f"one copy takes {world} processes, and a rehearsal starts {MOST_PROCESSES} at most"
        if (needed := world * PROCESS_BYTES) > (free := int(_SHARE * free_memory())):
            return f"{world} processes need about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        words = describe_layout(settings.parallel, world)
        if world < self.world_size:
            why = "two data-parallel copies show what more do"
            if world == settings.parallel.model_parallel_size:
                why = f"{MOST_PROCESSES} processes at most: data-parallel copies are not rehearsed"
            before = describe_layout(settings.parallel, self.world_size)
            self.changes.append(Change("layout", before, words, why))
        architecture = load_architecture(self._model_dir, *settings.task)
        own = str(self._model_dir), str(self.folder / acts.WHOLE)
        small_settings, said = smaller(settings, architecture, small.layout, *own)
        self.changes += said
        if problems := check(small_settings, architecture, world):
            raise MegatuneError(problems, ExitCode.INTERNAL)
        self.show(f"rehearsed as {words} on {world} CPU processes" if world > 1 else "rehearsed in one process")
        return acts.Scene(small_settings, world, architecture, self._model_dir, self.folder)

    def _reason(self) -> str:
        """Name the first act that failed."""
        wrong = next((one for one in self.outcomes if one.verdict is Verdict.FAIL), None)
        return f"stage {wrong.act} has to pass first" if wrong else "nothing was read"

    def _fits_memory(self, small: SmallModel, settings: Settings) -> bool:
        """Tell whether the real vocabulary can be held: in the embedding and in the output layer of each copy."""
        parallel, architecture = settings.parallel, small.architecture
        copies = max(1, rehearsed_world(parallel, self.world_size) // parallel.model_parallel_size)
        needed = 2 * copies * architecture.vocab_size * architecture.hidden_size * _BYTES_A_PARAMETER
        return needed < _SHARE * free_memory() / 2

    def _play(self, name: str, act: Callable[[], Outcome]) -> None:
        began = time.monotonic()
        try:
            outcome = act()
        except MegatuneError as error:
            outcome = refused(name, error)
        self._add(replace(outcome, seconds=time.monotonic() - began))

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.show(f"{outcome.act}: {outcome.verdict} ({outcome.seconds:.1f} s)")


@contextlib.contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    """Give ranks one thread each and no GPUs, of which there may be fewer than ranks, and prepared rows a folder that
    goes with the rehearsal."""
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
    """Rehearse settings that are read, and print what came of it.

    Args:
        gpus: of the real run.
        keep: a folder that is not there yet.
        report: a file for JSON.

    Returns:
        The exit code of the first failure, DONE where there is none.
    """
    folder = _folder(keep)
    try:
        rehearsal = Rehearsal(loaded.for_world(gpus), gpus, machine, folder, say)
        try:
            rehearsal.run()
        except Interrupted as ended:
            print("interrupted", file=sys.stderr)
            return int(ended.args[0])
        if rehearsal.changes:
            print("\nchanged for the rehearsal")
            print("\n".join(f"  {change.line()}" for change in rehearsal.changes))
        print("\n" + "\n".join(table(rehearsal.outcomes)), flush=True)
        if keep is not None:
            print(f"everything is in {folder}")
        if report is not None:
            _write(Path(report), as_json(rehearsal.outcomes, rehearsal.changes))
        return int(exit_code(rehearsal.outcomes))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(keep: str | None) -> Path:
    """Make the folder that everything is written into: private, unless the user names one."""
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
    return MegatuneError(Finding(f"cannot write {path}", "", why, "name another one"), ExitCode.CANNOT_WRITE)
