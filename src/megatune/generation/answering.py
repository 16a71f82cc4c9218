"""Answers what `megatune infer` is asked, prints the answers, and says where they are."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megatune.config.settings import DataSettings
from megatune.data.samples import Replacements, replacements
from megatune.data.sources import DatasetSource
from megatune.generation.chat import answer_prompts, chat, print_reply
from megatune.generation.dataset import Outcome, answer_rows, read_questions
from megatune.generation.generator import Generator
from megatune.generation.results import ResultFile


def answer(generator: Generator, prompt: str | None, results: ResultFile | None, *, stream: bool | None) -> None:
    """Answer a prompt, lines of input, or a user at the terminal.

    Args:
        stream: print answers while they are written; None where somebody is at the terminal.
    """
    at_terminal = sys.stdin.isatty() if prompt is None else sys.stdout.isatty()
    stream = at_terminal if stream is None else stream
    if prompt is not None:
        print_reply(generator, prompt, stream=stream, results=results)
    elif at_terminal:
        chat(generator, stream=stream, results=results)
    else:
        answer_prompts(generator, sys.stdin, stream=stream, results=results)
    if results is not None:
        print(f"answers are in {results.path}", file=sys.stderr)


def placeholders_of(model: Path, values: dict[str, Any]) -> Replacements:
    """Return what placeholders become: as `values` of model_name and model_author say, else as in the run that trained
    the model."""
    for folder in (model, model.parent):
        if (path := folder / "run.yaml").is_file() and None in values.values():
            with suppress(yaml.YAMLError, UnicodeDecodeError):  # somebody else's
                written = yaml.safe_load(path.read_text(encoding="utf-8"))
                known = written if isinstance(written, dict) else {}
                values = {name: value or known.get(name) for name, value in values.items()}
    return replacements(DataSettings(**values))


def answer_datasets(
    generator: Generator,
    sources: list[DatasetSource],
    results: ResultFile,
    placeholders: Replacements,
    *,
    batch_size: int,
    media_dir: str,
    stream: bool,
    shows_accuracy: bool,
) -> None:
    """Answer the rows of data sets, and say what became of them."""
    outcome = Outcome()
    rows = read_questions(sources, outcome, placeholders, pictures=generator.pictures is not None)
    answer_rows(generator, rows, results, outcome, batch_size=batch_size, media_dir=media_dir, show=stream)
    left_out = f", {outcome.left_out} left out" if outcome.left_out else ""
    print(f"{outcome.answered} answers are in {results.path}{left_out}", file=sys.stderr)
    if shows_accuracy:
        share = "no row has an answer of its own" if outcome.accuracy is None else f"{outcome.accuracy:.4f}"
        print(f"acc: {share}")
