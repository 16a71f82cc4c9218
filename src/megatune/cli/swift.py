"""`megatune megatron ...` and `megatune swift ...`: command lines of Megatron-SWIFT and ms-swift."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.dialects.swift import SwiftRun
    from megatune.config.settings import Settings

_TRAINING = ("sft", "pt", "rlhf")
_VERBS = {"megatron": (*_TRAINING, "export"), "swift": ("export", "infer", "deploy", "merge-lora")}
# ms-swift's verbs -> ours, and the words before the user's.
_HANDED = {
    "export": ("export", ()),
    "merge-lora": ("export", ("--merge_lora", "true")),
    "infer": ("infer", ()),
    "deploy": ("serve", ()),
}
_EPILOG = {
    "megatron": """verbs: sft, pt, rlhf and export, with Megatron-SWIFT's flags of versions 3 and 4, or a file of them:

    NPROC_PER_NODE=2 megatune megatron sft --model Qwen3-0.6B --dataset my.jsonl --train_iters 100 --save out
    megatune megatron rlhf run.yaml --lr 5e-7

Each flag that has another name here, or changes nothing, is said before training; run.yaml in the output folder has
all settings, for `megatune train`. NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which processes
there are; without them there is one. docs/migrate-from-megatron-swift.md has what differs.""",
    "swift": """verbs: export, merge-lora, infer and deploy, with ms-swift's flags:

    megatune swift infer --model out --stream true --temperature 0 --max_new_tokens 2048
    megatune swift export --model Qwen3-0.6B --adapters out --merge_lora true --output_dir merged

Training with `swift sft` there is training with Transformers; here it is `megatune megatron sft`.""",
}


def add_parser(subparsers: Any) -> None:
    """Declare the verbs megatron and swift."""
    for name, text in (
        ("megatron", "train and export with Megatron-SWIFT's command lines"),
        ("swift", "export, infer and deploy with ms-swift's command lines"),
    ):
        parser = subparsers.add_parser(
            name,
            help=text,
            description=text,
            epilog=_EPILOG[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar=f"{' | '.join(_VERBS[name])} --key value")
        parser.set_defaults(run=run, program=name, help=parser.format_help)


def run(args: argparse.Namespace) -> int:
    """Run one verb of a program of ms-swift.

    Raises:
        MegatuneError: whatever is wrong, all of it, before any process starts.
    """
    verb, *words = args.words or ["--help"]
    verb = verb.replace("_", "-")
    wants_help = verb in ("-h", "--help") or any(word in ("-h", "--help") for word in words)
    if wants_help and verb not in _HANDED:
        print(args.help())
        return ExitCode.DONE
    if verb not in _VERBS[args.program]:
        raise _no_verb(args.program, verb)
    if wants_help:
        return _hand_over(verb, ["--help"])
    return _train(verb, words) if verb in _TRAINING else _hand_over(verb, words)


def _no_verb(program: str, verb: str) -> MegatuneError:
    place, verbs = f"megatune {program}", _VERBS[program]
    if program == "swift" and verb in _TRAINING:
        why = f"`swift {verb}` trains with Transformers; Megatron-Core trains here, with the flags of `megatron {verb}`"
        finding = Finding(f"{verb} is not done", place, why, f"`megatune megatron {verb}`")
    else:
        near = difflib.get_close_matches(verb, verbs, n=1, cutoff=0.5)
        fix = f"did you mean `{place} {near[0]}`?" if near else f"one of: {', '.join(verbs)}"
        finding = Finding(f"unknown verb {verb!r}", place, fix=fix)
    return MegatuneError(finding, ExitCode.SETTINGS)


def _train(verb: str, words: Sequence[str]) -> int:
    """Read a command line, once to find the model, and again with what its config.json decides; then start."""
    from megatune.cli.train import start
    from megatune.config.dialects.swift_lines import swift_lines
    from megatune.launch.devices import count_gpus

    with read_command(verb, words, on_cpu=count_gpus() == 0) as found:
        return start(found.loaded, lambda loaded: swift_lines(found, loaded))


@contextlib.contextmanager
def read_command(verb: str, words: Sequence[str], *, on_cpu: bool, processes: int | None = None) -> Iterator[SwiftRun]:
    """Read a command line that trains, with what the model's config.json decides, and yield it in its environment.

    Args:
        on_cpu: whether the machine that it is for has no GPU.
        processes: of the run, where no variable says it.

    Raises:
        MegatuneError: there is no such verb.
    """
    from megatune.config.dialects.swift import read_swift

    if verb not in _TRAINING:
        raise _no_verb("megatron", verb)
    env = {**({"NPROC_PER_NODE": f"{processes}"} if processes else {}), **os.environ}
    asked = read_swift(verb, words, env=env)
    with _environment(asked.command.variables):
        config = _config(asked.loaded.settings)
        yield read_swift(verb, words, env=env | os.environ, config=config, on_cpu=on_cpu)


def _hand_over(verb: str, words: Sequence[str]) -> int:
    """Call the verb of this program that does it, with the same flags."""
    from megatune.cli.main import main
    from megatune.config.dialects.swift_other_verbs import export_words, hub_variables, infer_words

    ours, first = _HANDED[verb]
    if list(words) == ["--help"]:
        return main([ours, *words])
    found = export_words([*words, *first]) if ours == "export" else infer_words(words)
    if found.findings:
        raise MegatuneError(found.findings, ExitCode.SETTINGS)
    if found.lines:
        print("\n".join(found.lines), file=sys.stderr if verb == "infer" else sys.stdout, flush=True)
    with _environment(hub_variables(found, os.environ)):
        return main([ours, *found.words])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for this process and those that it starts, and take them back."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def _config(settings: Settings) -> dict[str, object]:
    """Return the model's config.json; {} where it cannot be read, which is said when the run is checked."""
    from megatune.families import read_config
    from megatune.training.source import RunModel

    name = settings.model.model_name_or_path
    try:
        folder = RunModel(settings, asks=True).config_dir(name) if name else None
        return read_config(folder) if folder is not None else {}
    except MegatuneError:
        return {}
