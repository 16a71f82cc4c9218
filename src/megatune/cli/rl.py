"""`megatune rl FILE.yaml`: reinforcement learning with verifiable rewards, from ROLL's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from megatune.cli.command import Command
from megatune.config.options import Flag, ParsedArguments
from megatune.config.setting import Group
from megatune.errors import Finding

if TYPE_CHECKING:
    from megatune.config.dialects.roll import ReadRL

_EPILOG = """A file has ROLL's keys, and runs here as it is. From a file, with changes to it:

    megatune rl rlvr.yaml max_steps=100 actor_train.training_args.learning_rate=2e-6
    megatune rl --config_path examples/qwen3-8B-rlvr_megatron --config_name rlvr_config
    megatune rl rlvr.yaml --evaluate out/checkpoint-100

A device is a GPU, or on a machine without any a process of the CPU, so that a file for many GPUs can be tried small:

    megatune rl rlvr.yaml "actor_train.device_mapping=list(range(0,2))" "actor_infer.device_mapping=[0]" \\
        actor_infer.strategy_args.strategy_name=builtin

docs/rl.md begins with a whole file, docs/rl-settings.md has every key, docs/migrate-from-roll.md what differs."""


class RLOptions(Group):
    """The options of `megatune rl`."""

    config_path: Annotated[str, Flag("DIR")] = "."
    """the folder of --config_name"""
    config_name: Annotated[str | None, Flag("NAME")] = None
    """the settings file in --config_path, as ROLL's launcher names it"""
    evaluate: Annotated[str | None, Flag("MODEL")] = None
    """train nothing: answer the problems of validation with this model, a folder or an id, and score the answers"""


COMMAND = Command(
    name="rl",
    usage="FILE.yaml [key=value ...]",
    about="Trains a model on rewards for its own responses, as a YAML file with ROLL's keys says.",
    epilog=_EPILOG,
    options=RLOptions,
    most_words=None,
    unknown="write role.key=value, without dashes; docs/rl-settings.md lists every key",
)


def run(verb: str, words: Sequence[str]) -> int:
    """Read the file, check everything that can be known before Ray starts, and run it.

    Raises:
        MegatuneError: whatever is wrong, all of it.
    """
    given = COMMAND.read(words)
    source, overrides = _split(given)
    from megatune.rl.reading import read_file

    read = read_file(source, overrides, runs=True)
    if given.options.evaluate is None:
        return begin(read, "roll")
    from megatune.rl.pipeline.evaluate import evaluate

    return evaluate(read.require_valid(), given.options.evaluate)


def begin(read: ReadRL, system: str) -> int:
    """Run what was read, after the lines that its user is told.

    Args:
        system: whose words were read, before each line.
    """
    settings = read.require_valid()
    from megatune.config.dialects.roll import run_yaml
    from megatune.launch.context import log_path
    from megatune.launch.output import divert_lost_output
    from megatune.rl.pipeline.run import start
    from megatune.training.trackers import check_installed

    check_installed(settings.actor_train.settings)
    divert_lost_output(log_path(Path(settings.run.output_dir).absolute() / "launch", "driver"))
    for line in read.lines:
        print(f"{system:<11}{line}", flush=True)
    return start(settings, run_yaml(read))


def _split(given: ParsedArguments[RLOptions]) -> tuple[str, list[str]]:
    """Return the file and the `key=value` words of a command line, which may name the file as ROLL's launcher does.

    Raises:
        MegatuneError: SETTINGS, where there is no file, or something else.
    """
    overrides = [word for word in given.words if "=" in word or word.startswith("~")]
    sources = [word for word in given.words if word not in overrides]
    if (name := given.options.config_name) is not None:
        sources.append(
            str(Path(given.options.config_path) / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"))
        )
    if len(sources) != 1 and not given.findings:
        what = f"{sources[1]!r} is one word too many" if sources else "no settings file"
        given.findings.append(Finding(what, COMMAND.program, fix="megatune rl FILE.yaml key=value ..."))
    given.stop()
    return sources[0], overrides
