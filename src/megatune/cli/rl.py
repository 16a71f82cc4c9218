"""`megatune rl FILE.yaml`: runs reinforcement learning with verifiable rewards, from ROLL's files."""

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

_EPILOG = """Files have ROLL's keys; ROLL's files run unchanged. From a file, with overrides:

    megatune rl rlvr.yaml max_steps=100 actor_train.training_args.learning_rate=2e-6
    megatune rl --config_path examples/qwen3-8B-rlvr_megatron --config_name rlvr_config
    megatune rl rlvr.yaml --evaluate out/checkpoint-100

A device is a GPU, or a CPU process on a machine without GPUs, so a file for many GPUs can be tested at a small scale:

    megatune rl rlvr.yaml "actor_train.device_mapping=list(range(0,2))" "actor_infer.device_mapping=[0]" \\
        actor_infer.strategy_args.strategy_name=builtin

docs/rl.md starts with a complete file, docs/rl-settings.md has all keys, docs/migrate-from-roll.md all differences."""


class RLOptions(Group):
    """The options of `megatune rl`."""

    config_path: Annotated[str, Flag("DIR")] = "."
    """the folder of --config_name"""
    config_name: Annotated[str | None, Flag("NAME")] = None
    """the settings file in --config_path, as for ROLL's launcher"""
    evaluate: Annotated[str | None, Flag("MODEL")] = None
    """do not train: sample and score responses to the validation problems with this model, a folder or an id"""


COMMAND = Command(
    name="rl",
    usage="FILE.yaml [key=value ...]",
    about="Trains a model with rewards for its own responses, from a YAML file with ROLL's keys.",
    epilog=_EPILOG,
    options=RLOptions,
    most_words=None,
    unknown="write role.key=value, without dashes; docs/rl-settings.md lists every key",
)


def run(verb: str, words: Sequence[str]) -> int:
    """Read the file, check everything that can be checked before Ray starts, and run it.

    Raises:
        MegatuneError: everything that is wrong.
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
    """Print the notes, and run the file.

    Args:
        system: the system whose file was read, which prefixes each note.
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
    """Return the file, which may be given as for ROLL's launcher, and the `key=value` overrides.

    Raises:
        MegatuneError: SETTINGS if there is not exactly one file.
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
