"""`megatune infer`: chat with a model, or let it answer a prompt, lines of input or data sets."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from megatune.cli import model_flags
from megatune.cli.model_file import read_model_file
from megatune.cli.model_flags import add_boolean
from megatune.cli.own_flags import add_flag
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.data.samples import Replacements
    from megatune.generation.generator import Generator
    from megatune.generation.results import ResultFile


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb and its flags."""
    parser = subparsers.add_parser(
        "infer",
        help="chat, complete, or answer data sets, from a Hugging Face or a training checkpoint",
        description="Answers --prompt or the rows of --val_dataset; without either, chats on a terminal, or answers "
        "each line of its input.",
    )
    model_flags.add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="what to answer")
    model_flags.add_asking(parser)
    add_boolean(parser, "stream", "print answers while they are written (on a terminal, but for data sets)")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    _add_datasets(parser)
    pictures = parser.add_argument_group(
        "pictures of the first message (of vision-language models; sizes are the settings that it was trained with)"
    )
    for kind in ("image", "video"):
        pictures.add_argument(
            f"--{kind}", dest="pictures", action="append", type=partial(_picture, kind), metavar="FILE",
            help=f"show it this {kind}, where the prompt has <{kind}>, else before its text; may be repeated",
        )  # fmt: skip
    model_flags.add_picture_sizes(pictures)
    model_flags.add_sampling(parser)
    model_flags.add_backend(parser)
    parser.set_defaults(run=run, given=())


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data sets")
    add_flag(group, "val_dataset", nargs="+", default=[], metavar="D",
             help="answer these: names, files or ids as in training; NAME#N draws N rows")  # fmt: skip
    add_flag(group, "dataset_dir", default="data", metavar="DIR",
             help="the folder of dataset_info.json, and of files that are not found from here (data)")  # fmt: skip
    add_flag(group, "result_path", metavar="FILE",
             help="a new file for the answers (of data sets: MODEL/infer_result/TIMESTAMP.jsonl)")  # fmt: skip
    add_flag(group, "max_batch_size", type=int, default=1, metavar="N",
             help="rows that Transformers answers side by side (1)")  # fmt: skip
    for name, what in (("model_name", "{{name}}"), ("model_author", "{{author}}")):
        add_flag(group, name, nargs="+", metavar="TEXT",
                 help=f"what {what} in the rows becomes; two texts: in Chinese rows, in others (what MODEL's run.yaml "
                 "has)")  # fmt: skip
    group.add_argument("--metric", choices=("acc", "rouge"), metavar="NAME",
                       help="acc: print the share of answers that are the row's own")  # fmt: skip


def _picture(kind: str, path: str) -> tuple[str, str]:
    return kind, path


def run(args: argparse.Namespace) -> int:
    """Load the model and answer.

    Raises:
        MegatuneError: (SETTINGS) flags; (INPUT) what the model or an adapter lacks, or a picture; (DATA) a picture
            that cannot be read, or a prompt that is empty, too long or has not a tag for each picture; (UNAVAILABLE) a
            backend that is not installed; what a hub refuses the model with.
    """
    read_model_file(args)
    if findings := _findings(args):
        raise MegatuneError(findings, ExitCode.SETTINGS)
    checked = model_flags.check(args, brings_pictures=bool(args.val_dataset))
    sources = []
    if args.val_dataset:
        from megatune.generation.dataset import open_datasets

        sources = open_datasets(args.val_dataset, args.dataset_dir)

    from megatune.generation.inputs import find_model

    folder = find_model(model_flags.model_dir(checked.adapted.base, args))

    from megatune.generation.generator import Generator
    from megatune.generation.results import ResultFile, default_path

    path = Path(args.result_path) if args.result_path else None
    if sources and path is None:
        own = Path(checked.name)  # a hub's cache is no place for answers
        path = default_path(own if own.is_dir() else Path("result") / own.name)
    with ExitStack() as stack:
        results = stack.enter_context(ResultFile(path)) if path else None
        generator = Generator.load(
            folder, checked.options, checked.adapted.adapters,
            load_backend=model_flags.backend_loader(checked.vllm), brings_pictures=bool(sources),
        )  # fmt: skip
        if sources:
            assert results is not None
            _answer_datasets(generator, sources, results, _placeholders(args, Path(checked.name)), args)
        else:
            _answer(generator, args, results)
    return ExitCode.DONE


def _answer(generator: Generator, args: argparse.Namespace, results: ResultFile | None) -> None:
    """Answer a prompt, lines of input, or whoever is at the terminal."""
    from megatune.generation.chat import answer_prompts, chat, print_reply

    at_terminal = sys.stdin.isatty() if args.prompt is None else sys.stdout.isatty()
    stream = at_terminal and args.infer_backend != "vllm" if args.stream is None else args.stream
    if args.prompt is not None:
        print_reply(generator, args.prompt, stream=stream, results=results)
    elif at_terminal:
        chat(generator, stream=stream, results=results)
    else:
        answer_prompts(generator, sys.stdin, stream=stream, results=results)
    if results is not None:
        print(f"answers are in {results.path}", file=sys.stderr)


def _placeholders(args: argparse.Namespace, model: Path) -> Replacements:
    """Return what placeholders become: as flags say, else as in the run that trained the model."""
    from megatune.config.settings import DataSettings
    from megatune.data.samples import replacements

    values = {name: getattr(args, name) for name in ("model_name", "model_author")}
    for folder in (model, model.parent):
        if (path := folder / "run.yaml").is_file() and None in values.values():
            with suppress(yaml.YAMLError, UnicodeDecodeError):  # somebody else's
                written = yaml.safe_load(path.read_text(encoding="utf-8"))
                known = written if isinstance(written, dict) else {}
                values = {name: value or known.get(name) for name, value in values.items()}
    return replacements(DataSettings(**values))


def _answer_datasets(
    generator: Generator,
    sources: list,
    results: ResultFile,
    placeholders: Replacements,
    args: argparse.Namespace,
) -> None:
    """Answer the rows of data sets, and say what became of them."""
    from megatune.generation.dataset import Outcome, answer_rows, read_questions

    outcome = Outcome()
    rows = read_questions(sources, outcome, placeholders, pictures=generator.pictures is not None)
    answer_rows(
        generator, rows, results, outcome,
        batch_size=args.max_batch_size, media_dir=args.dataset_dir, show=bool(args.stream),
    )  # fmt: skip
    left_out = f", {outcome.left_out} left out" if outcome.left_out else ""
    print(f"{outcome.answered} answers are in {results.path}{left_out}", file=sys.stderr)
    if args.metric:
        share = "no row has an answer of its own" if outcome.accuracy is None else f"{outcome.accuracy:.4f}"
        print(f"acc: {share}")


def _findings(args: argparse.Namespace) -> list[Finding]:
    """Return which flags of data sets contradict others."""
    findings = []
    if args.max_batch_size < 1:
        findings.append(Finding(f"{args.max_batch_size} is too small", "--max_batch_size", fix="1 or more"))
    if args.metric == "rouge":
        why = "the file of answers has response and labels, which any ROUGE library compares"
        findings.append(Finding("is not built", "--metric rouge", why, "--metric acc, or leave it out"))
    if args.val_dataset:
        for flag, given in (("--prompt", args.prompt), ("--image, --video", args.pictures), ("--raw", args.raw)):
            if given:
                why = "--val_dataset has the questions, which the chat template writes"
                findings.append(Finding("has no effect", flag, why, f"drop {flag} or --val_dataset"))
        if args.stream and args.max_batch_size > 1:
            why = "rows are answered one by one where each is printed as it is written"
            findings.append(Finding("has no effect", "--max_batch_size", why, "drop it or --stream"))
    else:
        for flag, given in (("--max_batch_size", args.max_batch_size > 1), ("--metric", args.metric == "acc")):
            if given:
                findings.append(Finding("has no effect", flag, "there are no rows to answer", "add --val_dataset NAME"))
    if args.stream and args.infer_backend == "vllm":
        why = "vLLM gives whole answers here; `megatune serve` streams with it"
        findings.append(Finding("is not built", "--stream", why, "leave it out"))
    return findings
