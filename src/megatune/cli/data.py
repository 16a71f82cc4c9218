"""`megatune data preview` and `megatune data stats`: the data as the model will see it, without the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.cli.own_flags import split_words
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.entry import Arguments
    from megatune.config.settings import Settings
    from megatune.data.vision import VisionInput

_DESCRIPTION = "Show the rows that the data of a settings file becomes. Needs the model's tokenizer only."

_PREVIEW_EPILOG = """Settings are those of train, as key=value or --key value. Some calls:

    megatune data preview run.yaml
    megatune data preview run.yaml --row 17 --ids
    megatune data preview run.yaml --rows 1 packing=true cutoff_len=512
    megatune data preview --model_name_or_path Qwen3-0.6B --dataset my.jsonl --rows 5
    megatune data preview run.yaml --eval --no-color | less
    megatune data preview run.yaml --rows 20 --html

A row of a file is shown with its file and line. Only as many rows are read as are shown; packed rows are packed from
the first 1000 samples."""

_STATS_EPILOG = """Settings are those of train, as key=value or --key value. Some calls:

    megatune data stats run.yaml
    megatune data stats run.yaml cutoff_len=4096 packing=true --plot
    megatune data stats run.yaml --json > stats.json

All rows are prepared, and kept in the cache: a training run with the same settings starts with them at once."""

_DEFAULT_ROWS = 3
_DEFAULT_PLOT = "data_stats.png"
_DEFAULT_PAGE = "data_preview.html"
_SMALLEST_WIDTH = 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb, its two verbs and their flags."""
    text = "look at the data: preview rows, count tokens"
    parser = subparsers.add_parser("data", help=text, description=_DESCRIPTION)
    parser.set_defaults(run=lambda arguments: _help(parser))
    verbs = parser.add_subparsers(title="verbs", metavar="preview | stats")
    for name, text, epilog, options, run in (
        ("preview", "show rows as the model sees them", _PREVIEW_EPILOG, _add_preview_options, preview),
        ("stats", "count rows and tokens: lengths, dropped rows, packing, steps", _STATS_EPILOG, _add_stats_options,
         stats),
    ):  # fmt: skip
        verb = verbs.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        verb.add_argument("words", nargs="*", metavar="FILE.yaml key=value --key value")
        options(verb)
        verb.set_defaults(run=run)


def _add_preview_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, metavar="N",
                        help=f"rows to show, of each data set unless packed ({_DEFAULT_ROWS})")  # fmt: skip
    parser.add_argument("--row", type=int, metavar="I", help="show this row, counted from 1; with --rows, begin there")
    parser.add_argument("--eval", action="store_true", help="rows that the run evaluates on, instead")
    parser.add_argument("--ids", action="store_true", help="a line for every token: position, id, label, text")
    parser.add_argument("--no-color", "--no_color", action="store_true",
                        help="mark what is trained as ⟦ ⟧, as without a terminal or with NO_COLOR set")  # fmt: skip
    parser.add_argument("--html", nargs="?", const=_DEFAULT_PAGE, metavar="FILE.html",
                        help=f"write a page, too, with small copies of pictures ({_DEFAULT_PAGE})")  # fmt: skip
    parser.add_argument("--width", type=int, metavar="W", help="break lines at this many columns (the terminal does)")


def _add_stats_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--plot", nargs="?", const=_DEFAULT_PLOT, metavar="FILE.png",
                        help=f"draw it, too ({_DEFAULT_PLOT} where no file is named)")  # fmt: skip


def preview(args: argparse.Namespace) -> int:
    """Print rows.

    Raises:
        MegatuneError: SETTINGS, DATA or INPUT, with everything that is wrong.
    """
    from megatune.config.dialects.llamafactory import LLAMAFACTORY

    # The first word is the verb.
    options, words, wrong = split_words(args.words[1:], _add_preview_options, LLAMAFACTORY)
    wrong += [
        Finding(f"--{name} {value} is too few", fix=f"--{name} {least} or more")
        for name, value, least in (
            ("rows", options.rows, 1), ("row", options.row, 1), ("width", options.width, _SMALLEST_WIDTH)
        )
        if value is not None and value < least
    ]  # fmt: skip
    settings = _settings(words, wrong)
    first = options.row or 1
    count = options.rows or (1 if options.row else _DEFAULT_ROWS)
    tokenizer, vision = _model_input(settings)

    from rich.console import Console

    from megatune.data.preview import read_preview, show_preview, write_page

    found = read_preview(settings, tokenizer, vision, wanted=range(first, first + count), evaluation=options.eval)
    console = Console(width=options.width, no_color=options.no_color or None)
    show_preview(found, tokenizer, console, ids=options.ids, wraps=options.width is not None)
    if options.html is not None:
        write_page(found, tokenizer, Path(options.html))
        print(f"\npage: {options.html}")
    return ExitCode.DONE


def stats(args: argparse.Namespace) -> int:
    """Prepare all rows, print their statistics, and draw them where asked to.

    Raises:
        MegatuneError: SETTINGS, DATA, INPUT or CANNOT_WRITE, with everything that is wrong.
    """
    from megatune.config.dialects.llamafactory import LLAMAFACTORY

    # The first word is the verb.
    options, words, wrong = split_words(args.words[1:], _add_stats_options, LLAMAFACTORY)
    if options.plot is not None and not options.plot.lower().endswith(".png"):
        wrong.append(Finding(f"--plot {options.plot}: pictures are PNG files", fix="--plot FILE.png"))
    settings = _settings(words, wrong)

    from megatune.data.prepare import prepare
    from megatune.data.statistics.counts import describe, refuse_streaming
    from megatune.data.statistics.page import draw, lines

    refuse_streaming(settings)
    tokenizer, vision = _model_input(settings)
    statistics = describe(settings, tokenizer, prepare(settings, tokenizer, vision=vision))
    print(statistics.to_json() if options.json else "\n".join(lines(statistics)))
    if options.plot is not None:
        draw(statistics, Path(options.plot))
        if not options.json:
            print(f"picture      {options.plot}")
    return ExitCode.DONE


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return ExitCode.SETTINGS


def _settings(words: Arguments, wrong: list[Finding]) -> Settings:
    """Load the settings, as far as they determine the rows; `wrong` is what is wrong with the flags, reported along."""
    from megatune.config.load import load
    from megatune.config.rules import DATA_RULES

    try:
        settings = load(words.source, words.overrides, words.flags).require_valid(rules=DATA_RULES)
    except MegatuneError as error:
        raise MegatuneError([*error.findings, *wrong], error.exit_code) from None
    if wrong:
        raise MegatuneError(wrong, ExitCode.SETTINGS)
    return settings


def _model_input(settings: Settings) -> tuple[PreTrainedTokenizerBase, VisionInput | None]:
    from megatune.hub.models import open_model

    model = settings.model
    assert model.model_name_or_path is not None, "required by the rules of the data"
    folder = open_model(model.model_name_or_path, model.model_revision, model.cache_dir).tokenizer_dir()

    from megatune.data.encode import load_tokenizer
    from megatune.data.vision import load_vision_input

    tokenizer = load_tokenizer(folder)
    return tokenizer, load_vision_input(folder, tokenizer, settings.data)
