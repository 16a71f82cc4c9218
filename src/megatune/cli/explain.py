"""`megatune explain`: what a setting is, how it works, when to change it and what it costs; a file; a run."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.load import Loaded
    from megatune.plan.explain.ground import Ground
    from megatune.plan.explain.words import Language

_EPILOG = """    megatune explain recompute_granularity
    megatune explain recompute_granularity run.yaml        its cost in this file
    megatune explain cutoff_len --model Qwen3-30B-A3B --gpus 16 --gpu h100-80g
    megatune explain run.yaml learning_rate=1e-5           every setting of a file
    megatune explain out/first                             what went wrong, or could be faster, in a run
    megatune explain --all --language zh                   every setting, in Markdown

Costs are the planner's: another value of the setting against the one it has, for the model and machines named, or for
Qwen3-8B on 8 × h100-80g. Without --language the environment's LANG decides.

exit codes: 0 explained, 64 an unknown setting, or a file that train would refuse (all is printed nevertheless), 66 an
unknown model, device or file"""


def add_parser(subparsers: Any) -> None:
    """Add the verb explain."""
    parser = subparsers.add_parser(
        "explain",
        help="what a setting does, when to change it, what it costs here",
        usage="megatune explain KEY|FILE.yaml|RUN_FOLDER [key=value ...] [--OPTION ...]",
        description="Explains one setting, every setting of a file, or what a run was short of. Nothing is started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="KEY|FILE.yaml|RUN_FOLDER")
    parser.add_argument("--all", action="store_true", help="every setting, in Markdown")
    parser.add_argument("--language", choices=("en", "zh"), help="en or zh (as LANG says)")
    parser.add_argument("--model", metavar="MODEL", help="a folder, config.json or well-known name to tell costs for")
    parser.add_argument("--gpus", metavar="N", type=_count, help="GPUs of the whole run")
    parser.add_argument("--gpu", metavar="KIND", help="a device of the catalogue, such as a100-80g")
    parser.set_defaults(run=run, parser=parser)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the explanation asked for.

    Raises:
        MegatuneError: SETTINGS or INPUT, where what is asked for is not known.
    """
    from megatune.plan.explain.rl import explain_rl_key, knows_rl
    from megatune.plan.explain.settings import knows, settings_page
    from megatune.plan.explain.words import language_of
    from megatune.plan.run.record import PLAN_NAME

    args = args.parser.parse_intermixed_args(args.words)  # options between and behind the words, too
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no Chinese shows question marks
    language = args.language or language_of(os.environ)
    if args.all:
        print(settings_page(language), end="")
        return ExitCode.DONE
    if not args.words:
        fix = "name a setting, a settings file or a run's folder; --all explains every setting"
        raise MegatuneError(Finding("nothing to explain", "megatune explain", fix=fix), ExitCode.SETTINGS)
    subject, *words = args.words
    if knows(subject):
        return _key(subject, words, args, language)
    if knows_rl(subject):
        print(explain_rl_key(subject, language))
        return ExitCode.DONE
    path = Path(subject)
    if path.is_dir() or path.name == PLAN_NAME:
        return _run_folder(path if path.is_dir() else path.parent)
    if subject.endswith((".yaml", ".yml")) or path.is_file():
        return _file(subject, words, args, language)
    if os.sep in subject:  # no setting's name
        finding = Finding(f"there is no folder or file {subject}", fix="name the output_dir of a run, or a file")
        raise MegatuneError(finding, ExitCode.INPUT)
    return _key(subject, words, args, language)


def _key(key: str, words: list[str], args: argparse.Namespace, language: Language) -> int:
    """Explain one setting, in the case of a file where one is named."""
    from megatune.config.load import load
    from megatune.plan.explain.ground import default_grounds
    from megatune.plan.explain.settings import explain_key, knows

    grounds: list[Ground] = []
    if knows(key) and words:  # what is not known needs no planner
        grounds = [_ground(load(words[0], words[1:]), args)]
    elif knows(key):
        grounds = default_grounds(args.model, args.gpus, args.gpu)
    print(explain_key(key, grounds, language))
    return ExitCode.DONE


def _file(name: str, words: list[str], args: argparse.Namespace, language: Language) -> int:
    from megatune.config.dialects.roll import is_rl_file, read_roll
    from megatune.config.load import load
    from megatune.plan.explain.rl import explain_rl_file
    from megatune.plan.explain.settings import explain_file

    if is_rl_file(name):
        read = read_roll(name, words)
        print(explain_rl_file(name, read, language))
        return ExitCode.SETTINGS if read.findings else ExitCode.DONE
    loaded = load(name, words)
    text, findings = explain_file(name, loaded, _ground(loaded, args), language)
    print(text)
    return ExitCode.SETTINGS if findings else ExitCode.DONE


def _ground(loaded: Loaded, args: argparse.Namespace) -> Ground:
    """Return the case of a file, on the machines that are named, on this one, or on usual ones."""
    from megatune.cli.this_machine import this_machine
    from megatune.launch.devices import count_gpus
    from megatune.plan.catalogue import find_machine
    from megatune.plan.explain.ground import DEFAULT_GPU, ground_of_file

    if args.model is not None:
        settings = loaded.settings
        model = settings.model.model_copy(update={"model_name_or_path": args.model})
        loaded = replace(loaded, settings=settings.model_copy(update={"model": model}))
    machine = find_machine(args.gpu) if args.gpu else None
    if not args.gpu and (count := count_gpus(os.environ)):
        machine, _ = this_machine(count, count)  # None where the catalogue does not know its GPUs
    return ground_of_file(loaded, machine or find_machine(DEFAULT_GPU), args.gpus, is_assumed=machine is None)


def _run_folder(folder: Path) -> int:
    from megatune.plan.run.trouble import diagnose

    if not (folder / "run.yaml").is_file():
        fix = "name the output_dir of a run, a settings file, or a setting"
        if (folder.absolute().parent / "run.yaml").is_file():
            fix = f"megatune explain {folder.parent}: that is the run's"
        finding = Finding(f"{folder} is not the folder of a run: it has no run.yaml", fix=fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    print("\n".join(diagnose(folder)))
    return ExitCode.DONE
