"""`megatune rehearse FILE.yaml`: tests a run with a small model on this machine's CPU before it starts elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from megatune.cli.command import Command
from megatune.cli.train import refuse_roles
from megatune.config.options import Flag
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.load import Loaded
    from megatune.plan.machine import Machine

_SWIFT = "megatron"
_REINFORCES = "reinforcement learning: it cannot be rehearsed"
_WHY_NOT = "its roles share devices through Ray, and a rehearsal only starts the ranks of one model"
_SMALL = "run a few steps on a small model (docs/rl.md)"
_EPILOG = """Settings are those of train, as key=value or --key value. Examples:

    megatune rehearse run.yaml --gpus 8
    megatune rehearse run.yaml --gpus 32 --gpu h100-80g --json rehearsal.json
    megatune rehearse run.yaml dataset_dir=here --keep out/rehearsal
    megatune rehearse --gpus 8 megatron sft --model Qwen3-0.6B --dataset my.jsonl --tensor_model_parallel_size 2

The last one is a command line of Megatron-SWIFT. The data, template, stage and layout of the file are run in CPU
processes, with a random model of the same family and layer pattern, whose widths are sharded like the real ones.
All differences from the file are listed.
The exit code is 0 if everything passed, else that of the first failure."""


class RehearseOptions(Group):
    """The options of `megatune rehearse`."""

    gpus: Count | None = None
    """GPUs of the real run (num_processes, or the minimum of the layout)"""
    gpu: Annotated[str | None, Flag("KIND")] = None
    """also plan memory and time for this kind of GPU: h100-80g"""
    devices: Annotated[str | None, Flag("FILE")] = None
    """YAML with your own kinds of GPUs, for --gpu"""
    json_: Annotated[str | None, Flag("FILE")] = None
    """write the results as JSON"""
    keep: Annotated[str | None, Flag("DIR")] = None
    """keep all written files, in a new folder"""


COMMAND = Command(
    name="rehearse",
    usage="FILE.yaml [key=value ...] [--key value ...] [--OPTION ...]",
    about="Tests a run with a small model on this machine's CPU before it starts elsewhere.",
    epilog=_EPILOG,
    options=RehearseOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Rehearse all stages and print the table.

    Raises:
        MegatuneError: SETTINGS if flags or the file cannot be read at all; CANNOT_WRITE.
    """
    swift = _swift_words(words)
    given = COMMAND.read(words if swift is None else swift[0])
    asked, options = given.settings, given.options
    refuse_roles(given, f"describes {_REINFORCES}", _WHY_NOT, f"megatune plan {{}}, then {_SMALL}")
    if swift is None and asked.source is None and not asked.flags + asked.overrides:
        given.findings.append(Finding("no settings file", fix="megatune rehearse FILE.yaml"))
    given.stop()
    if swift is None:
        return _rehearse(given.load(), options)
    from megatune.cli.swift import read_command
    from megatune.config.dialects.swift_meaning import SAMPLED

    with read_command(swift[1], swift[2], on_cpu=False, processes=options.gpus) as found:
        if (stage := found.command.stage) in SAMPLED:
            finding = Finding(f"{stage} is {_REINFORCES}", "--rlhf_type", _WHY_NOT, _SMALL)
            raise MegatuneError(finding, ExitCode.SETTINGS)
        return _rehearse(found.loaded, options)


def _swift_words(words: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]] | None:
    """Split arguments into those before `megatron`, Megatron-SWIFT's verb, and its flags; None without `megatron`."""
    if _SWIFT not in words:
        return None
    at = words.index(_SWIFT)
    verb, *rest = words[at + 1 :] or [""]
    return words[:at], verb.replace("_", "-"), rest


def _rehearse(loaded: Loaded, options: RehearseOptions) -> int:
    smallest = loaded.settings.parallel.smallest_world
    gpus = options.gpus or loaded.settings.run.num_processes or _processes(os.environ) or smallest
    from megatune.rehearse.run import rehearse

    return rehearse(loaded, gpus, _machine(options), keep=options.keep, report=options.json_)


def _processes(env: Mapping[str, str]) -> int | None:
    """Return the world size from torchrun's variables; None if they are not set."""
    sizes = [env.get(name, "") for name in ("NPROC_PER_NODE", "NNODES")]
    return int(sizes[0]) * int(sizes[1] or 1) if sizes[0].isdigit() and (sizes[1] or "1").isdigit() else None


def _machine(options: RehearseOptions) -> Machine | None:
    """Return the machine that --gpu names; None without it.

    Raises:
        MegatuneError: it is unknown (exit code 66), or --devices is given without --gpu (64).
    """
    if options.gpu is None:
        if options.devices is not None:
            raise MegatuneError(Finding("--devices without --gpu", fix="--gpu KIND"), ExitCode.SETTINGS)
        return None
    from megatune.plan.catalogue import find_machine

    return find_machine(options.gpu, devices_file=options.devices)
