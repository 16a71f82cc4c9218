"""`megatune rl FILE.yaml`: reinforcement learning with verifiable rewards, from ROLL's files."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.dialects.roll import ReadRL
    from megatune.config.rl.settings import InferRole, RLSettings
    from megatune.config.settings import Settings

_EPILOG = """A file has ROLL's keys, and runs here as it is. From a file, with changes to it:

    megatune rl rlvr.yaml max_steps=100 actor_train.training_args.learning_rate=2e-6
    megatune rl --config_path examples/qwen3-8B-rlvr_megatron --config_name rlvr_config

A device is a GPU, or on a machine without any a process of the CPU, so that a file for many GPUs can be tried small:

    megatune rl rlvr.yaml "actor_train.device_mapping=list(range(0,2))" "actor_infer.device_mapping=[0]" \\
        actor_infer.strategy_args.strategy_name=builtin

docs/rl.md begins with a whole file, docs/rl-settings.md has every key, docs/migrate-from-roll.md what differs."""


def add_parser(subparsers: Any) -> None:
    """Add the verb rl."""
    parser = subparsers.add_parser(
        "rl",
        help="reinforcement learning with verifiable rewards, on Ray",
        description="Trains a model on rewards of its own responses, as a YAML file in ROLL's words says.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE.yaml key=value")
    parser.set_defaults(run=run, help=parser.format_help)


def run(args: argparse.Namespace) -> int:
    """Read the file, check everything that can be known before Ray starts, and run it.

    Raises:
        MegatuneError: whatever is wrong, all of it.
    """
    if any(word in ("-h", "--help") for word in args.words):
        print(args.help())
        return ExitCode.DONE
    source, overrides = _split(args.words)
    read = read_file(source, overrides, runs=True)
    settings = read.require_valid()
    from megatune.config.dialects.roll import run_yaml
    from megatune.launch.context import log_path
    from megatune.launch.output import outlive_reader
    from megatune.rl.pipeline.run import start
    from megatune.training.trackers import check_installed

    check_installed(settings.actor_train.settings)
    outlive_reader(log_path(Path(settings.run.output_dir).absolute() / "launch", "driver"))
    for line in read.lines:
        print(f"roll       {line}", flush=True)
    return start(settings, run_yaml(read))


def read_file(source: str, overrides: Sequence[str], *, runs: bool = False) -> ReadRL:
    """Read a file twice: its own words say which hub its models come from, and the models what is wrong with it.

    Args:
        runs: whether this machine will run it, and so has to have its engines.

    Raises:
        MegatuneError: INPUT, where the file, or a model of a file that is right otherwise, cannot be read.
    """
    from megatune.config.dialects.roll import read_roll

    read = read_roll(source, overrides)
    missing: list[Finding] = []
    if read.settings is not None:
        os.environ.update({**read.variables, **os.environ, **read.settings.run.system_envs})
        missing = missing_engines(read.settings, read.origins) if runs else []
    models = _Models(asks=not read.findings and not missing)
    read = read_roll(source, overrides, models)
    if missing:
        return replace(read, findings=(*read.findings, *missing))
    if not read.findings and models.errors:
        raise models.errors[0]
    return read


def missing_engines(settings: RLSettings, origins: Mapping[str, str]) -> list[Finding]:
    """Find roles whose engine is not in the environment that they would run in."""
    roles = [settings.actor_infer, settings.reward_model, *(reward.judge for reward in settings.rewards.values())]
    return [finding for role in roles if role is not None if (finding := _missing_engine(role, origins)) is not None]


def _missing_engine(role: InferRole, origins: Mapping[str, str]) -> Finding | None:
    if role.engine == "builtin":
        return None
    strategy = f"{role.name}.strategy_args"
    builtin = f"{strategy}.strategy_name=builtin samples with this program's own engine"
    if role.py_executable is not None:
        key = f"{strategy}.strategy_config.py_executable"
        if os.access(role.py_executable, os.X_OK) and Path(role.py_executable).is_file():
            return None
        what = f"{key}: {role.py_executable} is no program"
        return Finding(what, origins.get(key, ""), fix=f"name the python of an environment that has {role.engine}")
    if importlib.util.find_spec(role.engine) is not None:
        return None
    what = f"{role.name} has strategy_name {role.engine}, and {role.engine} is not installed in this environment"
    fix = f"{builtin}; or {strategy}.strategy_config.py_executable=PYTHON names that of an environment that has it"
    return Finding(what, origins.get(f"{strategy}.strategy_name", ""), "it samples responses there", fix)


class _Models:
    """Reads what the models of a file are, each once.

    Args:
        asks: whether hubs may be asked; a file that is refused anyway is held against folders alone.
    """

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks
        self.errors: list[MegatuneError] = []
        self._known: dict[tuple[str | None, str], tuple[Architecture | None, Mapping[str, Any]]] = {}

    def __call__(self, settings: Settings) -> tuple[Architecture | None, Mapping[str, Any]]:
        key = (settings.model.model_name_or_path, settings.run.stage)
        if key not in self._known:
            self._known[key] = self._read(settings)
        return self._known[key]

    def _read(self, settings: Settings) -> tuple[Architecture | None, Mapping[str, Any]]:
        from megatune.families import load_architecture, read_config
        from megatune.training.source import RunModel

        name = settings.model.model_name_or_path
        try:
            folder = RunModel(settings, asks=self._asks).config_dir(name) if name else None
            if folder is None:
                return None, {}
            return load_architecture(folder, settings.run.stage), read_config(folder)
        except MegatuneError as error:
            self.errors.append(error)
            return None, {}


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the file and the `key=value` words of a command line, which may name the file as ROLL's launcher does.

    Raises:
        MegatuneError: SETTINGS, where there is no file, or something else.
    """
    sources, overrides, named, findings = [], [], {}, []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and flag.replace("-", "_") in ("config_path", "config_name"):
            named[flag.replace("-", "_")] = text if equals else next(rest, "")
        elif word.startswith("--"):
            fix = "write role.key=value, without dashes; docs/rl-settings.md lists every key"
            findings.append(Finding(f"{word!r} is not known here", "megatune rl", fix=fix))
        elif equals or word.startswith("~"):
            overrides.append(word)
        else:
            sources.append(word)
    if "config_name" in named:
        name = named["config_name"]
        sources.append(
            str(Path(named.get("config_path", ".")) / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"))
        )
    if len(sources) != 1:
        what = f"{sources[1]!r} is one word too many" if sources else "no settings file"
        findings.append(Finding(what, "megatune rl", fix="megatune rl FILE.yaml key=value ..."))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return sources[0], overrides
