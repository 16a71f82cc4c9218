"""`megatune megatron ...` and `megatune swift ...`: run command lines of Megatron-SWIFT and ms-swift."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatune.cli import export, infer, rl, serve
from megatune.cli.command import Command, unknown_verb
from megatune.cli.pages import Help
from megatune.config.options import NoOptions, ParsedArguments
from megatune.config.setting import Group
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import environment
from megatune.references import Reference, either

if TYPE_CHECKING:
    from megatune.config.dialects.swift import SwiftRun
    from megatune.config.settings import Settings

_TRAINING = ("sft", "pt", "rlhf")
_VERBS = {"megatron": (*_TRAINING, "export"), "swift": ("export", "infer", "deploy", "merge-lora")}
_EPILOG = {
    "megatron": """verbs: sft, pt, rlhf and export, with flags of Megatron-SWIFT 3 and 4, or a file of flags:

    NPROC_PER_NODE=2 megatune megatron sft --model Qwen3-0.6B --dataset my.jsonl --train_iters 100 --save out
    megatune megatron rlhf run.yaml --lr 5e-7

Flags that have another name here, or no effect, are printed before training; run.yaml in the output folder has all
settings, for `megatune train`. NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT define the processes;
without them there is one. docs/migrate-from-megatron-swift.md lists the differences.""",
    "swift": """verbs: export, merge-lora, infer and deploy, with ms-swift's flags:

    megatune swift infer --model out --stream true --temperature 0 --max_new_tokens 2048
    megatune swift export --model Qwen3-0.6B --adapters out --merge_lora true --output_dir merged

ms-swift's `swift sft` trains with Transformers; use `megatune megatron sft` here.""",
}


_ABOUT = {
    "megatron": "Train and export with Megatron-SWIFT's command lines.",
    "swift": "Export, infer and deploy with ms-swift's command lines.",
}
# ms-swift's defaults, as options of `megatune infer`.
_DEFAULTS = {
    "temperature": ("model", "the value in generation_config.json"),
    "max_new_tokens": ("1000000000", "up to the model's context"),
}
# Options that messages name, by ms-swift's names.
_FLAGS = {
    "adapter_name_or_path": "adapters",
    "export_dir": "output_dir",
    "model_name_or_path": "model",
    "overwrite_output_dir": "exist_ok",
}


class HubOptions(Group):
    """hubs."""

    use_hf: bool | None = None
    """true: ids are those of Hugging Face; false: of ModelScope"""
    hub_token: str | None = None
    """access token of the hub"""
    ENV: dict[str, Any] | None = None
    """environment variables, in a file of flags"""


class ExportOptions(export.ExportOptions, HubOptions):
    """The options of `swift export`."""


class InferOptions(infer.InferOptions, HubOptions):
    """The options of `swift infer`."""


class DeployOptions(serve.ServeOptions, HubOptions):
    """The options of `swift deploy`."""


def run(verb: str, words: Sequence[str]) -> int:
    """Run one verb of a program of ms-swift.

    Raises:
        MegatuneError: everything that is wrong, before any process starts.
    """
    first, *rest = words or ["--help"]
    first = first.replace("_", "-")
    if first in ("-h", "--help") or (first in _TRAINING and {"-h", "--help"} & {*rest}):
        usage = f"{' | '.join(_VERBS[verb])} [--key value ...]"
        about, epilog = _ABOUT[verb], _EPILOG[verb]
        raise Help(Command(name=verb, usage=usage, about=about, epilog=epilog, options=NoOptions).help())
    if first not in _VERBS[verb]:
        raise _no_verb(verb, first)
    return _train(first, rest) if first in _TRAINING else _delegate(verb, first, rest)


def _no_verb(program: str, verb: str) -> MegatuneError:
    place = f"megatune {program}"
    if program == "swift" and verb in _TRAINING:
        why = f"`swift {verb}` trains with Transformers, and megatune with Megatron-Core, as `megatron {verb}` does"
        finding = Finding(f"{verb} is not supported", place, why, f"`megatune megatron {verb}`")
        return MegatuneError(finding, ExitCode.SETTINGS)
    return unknown_verb(verb, _VERBS[program], place)


def _train(verb: str, words: Sequence[str]) -> int:
    """Read a command line, first to find the model, then again with its config.json; then start."""
    from megatune.config.dialects.swift import swift_lines
    from megatune.config.dialects.swift_meaning import SAMPLED
    from megatune.launch.devices import count_gpus
    from megatune.training.start import start

    with read_command(verb, words, on_cpu=count_gpus() == 0) as found:
        if found.command.stage in SAMPLED:
            return _reinforce(found)
        return start(found.loaded, lambda loaded: swift_lines(found, loaded))


def _reinforce(found: SwiftRun) -> int:
    """Run `rlhf --rlhf_type grpo` or `gkd` like `megatune rl` runs a file."""
    from megatune.config.dialects.roll import read_keys
    from megatune.config.dialects.swift import swift_lines
    from megatune.config.dialects.swift_rl import rollout_keys
    from megatune.rl.problem_files import count_rows, find_prompts
    from megatune.rl.reading import read_checked

    keys = rollout_keys(found, find_prompts, count_rows)
    builtin = "--use_vllm false" if found.command.stage == "grpo" else "a file of `megatune rl` with `builtin`"
    read = read_checked(lambda model_of: read_keys(keys, "the command line", model_of), runs=True, builtin=builtin)
    read.require_valid()
    print("\n".join(swift_lines(found, found.loaded.for_world(None))), flush=True)
    return rl.begin(read, "swift")


@contextlib.contextmanager
def read_command(verb: str, words: Sequence[str], *, on_cpu: bool, processes: int | None = None) -> Iterator[SwiftRun]:
    """Read a training command line with the model's config.json, and yield it with its environment variables set.

    Args:
        on_cpu: whether the target machine has no GPU.
        processes: number of processes, if no variable sets it.

    Raises:
        MegatuneError: there is no such verb, or the command line is one of ms-swift's Ray.
    """
    from megatune.config.dialects.swift import ray_findings, read_swift

    if verb not in _TRAINING:
        raise _no_verb("megatron", verb)
    env = {**({"NPROC_PER_NODE": f"{processes}"} if processes else {}), **os.environ}
    first = read_swift(verb, words, env=env)
    if of_ray := ray_findings(first):
        raise MegatuneError(of_ray, ExitCode.SETTINGS)
    with environment(first.command.variables):
        config = _config(first.loaded.settings)
        yield read_swift(verb, words, env=env | os.environ, config=config, on_cpu=on_cpu)


# ms-swift's verbs: our verb, its options, and the function that runs it.
_DELEGATES: dict[str, tuple[Command[Any], type[Group], Callable[[ParsedArguments[Any]], int]]] = {
    "export": (export.COMMAND, ExportOptions, export.write),
    "merge-lora": (export.COMMAND, ExportOptions, export.write),
    "infer": (infer.COMMAND, InferOptions, infer.answer),
    "deploy": (serve.COMMAND, DeployOptions, serve.serve),
}


def _delegate(program: str, verb: str, words: Sequence[str]) -> int:
    """Run our verb with the same flags, and with the environment variables that its command line sets."""
    command = command_of(program, verb)
    defaults = {} if command.abbreviates else _DEFAULTS
    words = [*words, "--merge_lora", "true"] if verb == "merge-lora" else words
    given = command.read(words, {name: value for name, (value, _) in defaults.items()})
    for name, (value, why) in defaults.items():
        if given.origin(name) == "default":
            print(f"swift      --{name} {value}  ms-swift's default: {why}", file=sys.stderr, flush=True)
    try:
        with environment(variables_of(given, os.environ)):
            return _DELEGATES[verb][2](given)
    except MegatuneError as error:
        raise MegatuneError([each.spelled(_as_flag) for each in error.findings], error.exit_code) from error


def _as_flag(found: Reference) -> str:
    """Spell an option as ms-swift's flag."""
    name = _FLAGS.get(found.name, found.name)
    return f"--{name} {either(found.values)}" if found.values else name


def command_of(program: str, verb: str) -> Command[Any]:
    """Return one of our verbs under ms-swift's name."""
    ours, options, _ = _DELEGATES[verb]
    return replace(ours, name=f"{program} {verb}", options=options, abbreviates=ours is export.COMMAND)


def variables_of(given: ParsedArguments[Any], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a command line sets; ids are ModelScope's by default."""
    from megatune.config.dialects.swift_command import read_variables

    options: HubOptions = given.options
    found: dict[str, str] = {}
    for entry in given.entries:
        if entry.key == "ENV":
            found |= read_variables(entry, given.findings)
    use_hf = {**found, **env}.get("USE_HF", "0").lower() in ("1", "true") if options.use_hf is None else options.use_hf
    found.setdefault("USE_MODELSCOPE_HUB", "0" if use_hf else "1")
    if options.hub_token is not None:
        found |= {"HF_TOKEN": options.hub_token, "MODELSCOPE_API_TOKEN": options.hub_token}
    return found


def _config(settings: Settings) -> dict[str, object]:
    """Return the model's config.json; {} if it cannot be read, which is reported when the run is checked."""
    from megatune.config.settings import with_settings
    from megatune.families import read_config
    from megatune.training.source import RunModel

    name = settings.model.model_name_or_path
    try:
        own = with_settings(settings, {"model.rope_scaling": None})  # its factor is derived from config.json
        folder = RunModel(own, asks=True).config_dir(name) if name else None
        return read_config(folder) if folder is not None else {}
    except MegatuneError:
        return {}
