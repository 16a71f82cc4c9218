"""The acts of a rehearsal, one after the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatune.config.load import Loaded
from megatune.config.rules import RULES, check
from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.devices import free_memory
from megatune.plan import trainable
from megatune.plan.machine import Machine
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
from megatune.rehearse.layouts import MOST_PROCESSES, layout_words, rehearsed_world
from megatune.rehearse.model import RealModel, SmallModel, find_real_model, shrink, write_model
from megatune.rehearse.outcome import Change, Outcome, Verdict, left, refused
from megatune.rehearse.smaller import smaller

PROCESS_BYTES = 450 * 2**20  # of one rank, without its part of the model
_BYTES_A_PARAMETER = 24  # weights, gradients, optimizer, and what a save and a comparison hold of them
_SHARE = 0.8  # of free memory


@dataclass
class Rehearsal:
    """One rehearsal.

    Args:
        loaded: the file.
        world_size: GPUs of the real run.
        machine: the kind of them, None where it is not known.
        folder: that everything is written into.
        show: is told each line as it comes.
    """

    loaded: Loaded
    world_size: int
    machine: Machine | None
    folder: Path
    show: Callable[[str], None]
    outcomes: list[Outcome] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def run(self) -> None:
        """Play all acts; what cannot be played after a failure is named with it."""
        with _surroundings(self.folder):
            played = self._first_act()
            for name, act in acts.ACTS.items():
                if isinstance(played, str):
                    self._add(left(name, played))
                else:
                    self._timed(name, lambda act=act, scene=played: act(scene))  # type: ignore[misc]

    def _first_act(self) -> acts.Scene | str:
        """Look at the file; return what the other acts play with, or why they cannot be played."""
        real: RealModel | None = None

        def settings_and_plan() -> Outcome:
            nonlocal real, checked
            real = find_real_model(self.loaded.settings)
            outcome, checked = look_at_settings(self.loaded, real, self.world_size, self.machine, self.folder / "real")
            return outcome

        checked = None
        if self._timed(SETTINGS, settings_and_plan).verdict is Verdict.FAIL or real is None or checked is None:
            for name in (TEMPLATE, DATA, DISK):
                self._without_settings(name, real)
            return "its settings have to be valid first"
        settings = checked.settings
        template = self._timed(TEMPLATE, lambda: look_at_template(settings, real))
        if template.verdict is Verdict.FAIL:
            self._add(left(DATA, "rows are written by the template, which has to fit first"))
            self._timed(DISK, lambda: look_at_disk(settings, real, self.world_size, Rows(template)))
            return "the template has to fit the tokenizer first"
        return self._scene(settings, real)

    def _without_settings(self, name: str, real: RealModel | None) -> None:
        """Look at what can be looked at although settings were refused."""
        settings = self.loaded.settings
        if name == TEMPLATE and real is not None and "data.template" not in self.loaded.invalid:
            self._timed(name, lambda: look_at_template(settings, real))
        elif name == DISK and real is not None and settings.run.output_dir:
            rows = Rows(self.outcomes[0])
            self._timed(name, lambda: look_at_disk(settings, real, self.world_size, rows))
        else:
            self._add(left(name, "the settings have to be valid first"))

    def _scene(self, settings: Settings, real: RealModel) -> acts.Scene | str:
        """Make the small model, read the data with its tokenizer or the real one, and look at the disk."""
        rows: Rows | None = None
        scene: acts.Scene | str = ""

        def data() -> Outcome:
            nonlocal rows, scene
            small = shrink(real, settings.parallel)
            own = real.folder is not None and self._fits_memory(small, settings)
            if real.folder is not None and not own:
                why = f"its vocabulary of {real.architecture.vocab_size:,} does not fit this machine's memory"
                self.changes.append(Change("tokenizer", "the model's own", "a demo tokenizer", why))
            if real.folder is None:
                self.changes.append(Change("tokenizer", "the model's own", "a demo tokenizer", real.note))
            model_dir = write_model(
                small, self.folder / "model", settings.data.template, settings.run.seed, real_tokenizer=own
            )
            rows = look_at_data(self.loaded, settings, real.folder or model_dir, real_tokenizer=real.folder is not None)
            scene = self._small_scene(settings, small, model_dir) if rows.report is not None else "there are no rows"
            return rows.outcome

        self._timed(DATA, data)
        self._timed(DISK, lambda: look_at_disk(settings, real, self.world_size, rows or Rows(self.outcomes[-1])))
        return scene or "act 1 failed"

    def _small_scene(self, settings: Settings, small: SmallModel, model_dir: Path) -> acts.Scene | str:
        """Return what the other acts play with, or why this machine cannot play them."""
        from megatune.families import load_architecture

        self.changes += small.changes()
        world = rehearsed_world(settings.parallel, self.world_size)
        words = layout_words(settings.parallel, world)
        architecture = load_architecture(model_dir, settings.run.stage)
        if world < self.world_size:
            before = layout_words(settings.parallel, self.world_size)
            copies = "two data-parallel copies show what more do"
            self.changes.append(Change("layout", before, words, copies))
        if world > MOST_PROCESSES:
            return f"one copy takes {world} processes, and a rehearsal starts {MOST_PROCESSES} at most"
        if (needed := world * PROCESS_BYTES) > (free := int(_SHARE * free_memory())):
            return (
                f"{world} processes need about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free for them"
            )
        small_settings, said = smaller(settings, architecture, small.layout, str(model_dir), str(self.folder / "whole"))
        self.changes += said
        if problems := check(small_settings, architecture, world, rules=(*RULES, *trainable.RULES)):
            raise MegatuneError(problems, ExitCode.INTERNAL)
        self.show(f"\nrehearsed as {words} on {world} CPU processes, with {model_dir}")
        return acts.Scene(small_settings, world, architecture, model_dir, self.folder)

    def _fits_memory(self, small: SmallModel, settings: Settings) -> bool:
        """Tell whether the real vocabulary can be held: its rows are in the embedding, in the output layer, and in both
        once more in each copy."""
        wide = small.architecture.hidden_size
        copies = 2 * rehearsed_world(settings.parallel, self.world_size) // settings.parallel.model_parallel_size
        needed = 2 * copies * small.architecture.vocab_size * wide * _BYTES_A_PARAMETER
        return needed < _SHARE * free_memory() / 2

    def _timed(self, name: str, act: Callable[[], Outcome]) -> Outcome:
        began = time.monotonic()
        try:
            outcome = act()
        except MegatuneError as error:
            outcome = refused(name, error)
        return self._add(outcome.took(time.monotonic() - began))

    def _add(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        self.show(f"{outcome.act}: {outcome.verdict} ({outcome.seconds:.1f} s)")
        return outcome


@contextlib.contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    """Give ranks one thread each, and prepared rows a folder that goes with the rehearsal."""
    own = {"MEGATUNE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
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
