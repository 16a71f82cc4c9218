"""Reads a file of reinforcement learning, and checks its settings, models and engines as far as this machine can."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatune.architecture import Architecture
from megatune.config.dialects.roll import ReadRL, read_roll
from megatune.config.dialects.roll_roles import ModelOf
from megatune.config.dialects.roll_tree import Reading
from megatune.config.rl.settings import InferRole, RLSettings
from megatune.config.settings import Settings
from megatune.config.values import import_object
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.rl.rewards.pool import load_rewards
from megatune.training.source import RunModel

_BUILTIN = "{role}.strategy_args.strategy_name=builtin"


def read_file(source: str, overrides: Sequence[str], *, runs: bool = False) -> ReadRL:
    """Read a file; see `read_checked`."""
    return read_checked(lambda model_of: read_roll(source, overrides, model_of), runs=runs)


def read_checked(reader: Callable[[ModelOf | None], ReadRL], *, runs: bool = False, builtin: str = _BUILTIN) -> ReadRL:
    """Read a file twice: first without its models, to learn from which hub they come, then checked with them.

    Args:
        reader: reads the file, given a function that loads architectures, or None.
        runs: whether this machine will run it, and so needs its engines.
        builtin: how to select the built-in engine for a role, {role}.

    Raises:
        MegatuneError: INPUT, if the file, or a model of an otherwise correct file, cannot be read.
    """
    read = reader(None)
    missing: list[Finding] = []
    if read.settings is not None:
        os.environ.update({**read.variables, **os.environ, **read.settings.run.system_envs})
        missing = missing_engines(read.settings, read.places, builtin) if runs else []
    models = _Models(online=not read.findings and not missing)
    read = reader(models)
    if missing:
        return replace(read, findings=(*read.findings, *missing))
    if not read.findings and models.errors:
        raise _placed_errors(models.errors, read.reading)
    if runs and read.settings is not None and not read.findings:
        _load_functions(read.settings, read.places)
    return read


def _load_functions(settings: RLSettings, places: Mapping[str, str]) -> None:
    """Load the rewards and functions that users name by Python path, to find errors before anything starts.

    Raises:
        MegatuneError: SETTINGS, UNAVAILABLE, with everything that cannot be loaded, and where it was written.
    """
    algorithm, findings, code = settings.algorithm, list[Finding](), ExitCode.SETTINGS
    paths = {key: getattr(algorithm, key) for key in ("advantage_function", "loss_function")}
    loads: list[Callable[[], object]] = [partial(load_rewards, settings.rewards)]
    loads += [partial(import_object, path, key, key) for key, path in paths.items() if path]
    for load in loads:
        try:
            load()
        except MegatuneError as error:
            findings, code = [*findings, *error.findings], error.exit_code
    if findings:
        raise MegatuneError([replace(each, where=_placed(each.where, places)) for each in findings], code)


def _placed_errors(errors: Mapping[str, MegatuneError], reading: Reading) -> MegatuneError:
    """Return one error with the findings of all models that cannot be read, each at the key that names its model."""
    findings: dict[Finding, None] = {}
    for name, error in errors.items():
        named = (each for each in reading.entries.values() if each.value.data == name)
        # With another dialect the place is a flag, and the keys are not the user's.
        places = (each.where if reading.dialect is not None else f"{each.where}: {each.key}" for each in named)
        place = next(places, "")
        for each in error.findings:
            what = each.what.removeprefix("model_name_or_path: ") if place else each.what
            findings[each if each.where else replace(each, what=what, where=place)] = None
    return MegatuneError([*findings], min(error.exit_code for error in errors.values()))


def _placed(key: str, places: Mapping[str, str]) -> str:
    """Prefix a key with the file and line of the first written key in it."""
    place = next((place for dotted, place in places.items() if f"{dotted}.".startswith(f"{key}.")), "")
    return f"{place}: {key}" if place and key else key


def missing_engines(settings: RLSettings, places: Mapping[str, str], builtin: str = _BUILTIN) -> list[Finding]:
    """Return findings for roles whose engine is missing in their environment."""
    found = (_missing_engine(role, places, builtin) for role in settings.samplers)
    return [finding for finding in found if finding is not None]


def _missing_engine(role: InferRole, places: Mapping[str, str], builtin: str) -> Finding | None:
    if role.engine == "builtin":
        return None
    strategy = f"{role.name}.strategy_args"
    builtin = f"{builtin.format(role=role.name)} selects megatune's built-in engine"
    if role.py_executable is not None:
        key = f"{strategy}.strategy_config.py_executable"
        if os.access(role.py_executable, os.X_OK) and Path(role.py_executable).is_file():
            return None
        what = f"{key}: {role.py_executable} is not an executable"
        return Finding(what, places.get(key, ""), fix=f"name the python of an environment that has {role.engine}")
    if importlib.util.find_spec(role.engine) is not None:
        return None
    what = f"{role.name} has strategy_name {role.engine}, and {role.engine} is not installed in this environment"
    fix = f"{builtin}; or {strategy}.strategy_config.py_executable=PYTHON names that of an environment that has it"
    return Finding(what, places.get(f"{strategy}.strategy_name", ""), "it would run in this environment", fix)


class _Models:
    """Loads the architectures of a file's models, each once.

    Args:
        online: whether hubs may be queried; a file with other errors is checked with local folders only.
    """

    def __init__(self, *, online: bool) -> None:
        self._online = online
        self.errors: dict[str, MegatuneError] = {}  # by the name of the model
        self._known: dict[tuple[str | None, str], Architecture | None] = {}

    def __call__(self, settings: Settings, stage: str) -> Architecture | None:
        key = (settings.model.model_name_or_path, stage)
        if key not in self._known:
            self._known[key] = self._read(settings, stage)
        return self._known[key]

    def _read(self, settings: Settings, stage: str) -> Architecture | None:
        name = settings.model.model_name_or_path
        try:
            folder = RunModel(settings, asks=self._online).config_dir(name) if name else None
            return None if folder is None else load_architecture(folder, stage)
        except MegatuneError as error:
            self.errors[str(name)] = error
            return None
