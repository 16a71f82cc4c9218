"""Answers what `megatune infer` is asked, prints the answers, and says where they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatune.config.settings import DataSettings
from megatune.data.prompts import read_questions
from megatune.data.samples import Replacements, replacements
from megatune.generation.asked import Asked, model_dir
from megatune.generation.chat import answer_prompts, chat, print_reply
from megatune.generation.dataset import Outcome, answer_rows, open_datasets
from megatune.generation.generator import Generator, LoadBackend
from megatune.generation.inputs import find_model
from megatune.generation.results import ResultFile, default_path
from megatune.generation.transformers_backend import TransformersBackend


def answer(asked: Asked, options: Any, prompt: str | None, *, stream: bool | None) -> None:
    """Answer a prompt, lines of input, or a user at the terminal.

    Args:
        options: with model_revision, cache_dir and result_path.
        stream: print answers while they are written; None where somebody is at the terminal.
    """
    folder = model_folder(asked, options)
    with ExitStack() as stack:
        results = stack.enter_context(ResultFile(Path(options.result_path))) if options.result_path else None
        generator = load_generator(asked, folder)
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


def answer_named(asked: Asked, names: Sequence[str], options: Any, *, stream: bool) -> tuple[Outcome, Path]:
    """Answer the rows of data sets, say what became of them, and return it with the file of the answers.

    Args:
        options: with those of `cli.infer.RowOptions`, model_revision and cache_dir.
    """
    sources, folder = open_datasets(names, options.dataset_dir), model_folder(asked, options)
    own = Path(asked.name)  # a hub's cache is no place for answers
    default = default_path(own if own.is_dir() else Path("result") / own.name)
    path = Path(options.result_path) if options.result_path else default
    placeholders = placeholders_of(own, {name: getattr(options, name) for name in ("model_name", "model_author")})
    outcome = Outcome()
    with ResultFile(path) as results:
        generator = load_generator(asked, folder, brings_pictures=True)
        rows = read_questions(sources, placeholders, outcome.leave_out, pictures=generator.pictures is not None)
        size, media_dir = options.max_batch_size, options.dataset_dir
        answer_rows(generator, rows, results, outcome, batch_size=size, media_dir=media_dir, show=stream)
    left_out = f", {outcome.left_out} left out" if outcome.left_out else ""
    print(f"{outcome.answered} answers are in {path}{left_out}", file=sys.stderr)
    return outcome, path


def model_folder(asked: Asked, options: Any) -> Path:
    """Return the folder of the model, fetched where it is on a hub."""
    return find_model(model_dir(asked.adapted.base, options.model_revision, options.cache_dir))


def load_generator(asked: Asked, folder: Path, *, brings_pictures: bool = False, chats: bool = True) -> Generator:
    """Load the model with Transformers, or with vLLM; see `Generator.load`."""
    load: LoadBackend = TransformersBackend.load
    if asked.vllm is not None:
        from megatune.generation.vllm import VllmBackend

        load = partial(VllmBackend.load, arguments=asked.vllm)
    return Generator.load(
        folder, asked.options, asked.adapted.adapters, load_backend=load, brings_pictures=brings_pictures, chats=chats
    )


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
