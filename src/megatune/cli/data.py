"""`megatune data preview` and `megatune data stats`: show the data as the model will see it, without the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatune.cli.command import Command, unknown_verb
from megatune.cli.pages import Help
from megatune.config.options import Flag
from megatune.config.rules import DATA_RULES
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding

_PREVIEW_EPILOG = """Settings are those of train, as key=value or --key value. Examples:

    megatune data preview run.yaml
    megatune data preview run.yaml --row 17 --ids
    megatune data preview run.yaml --rows 1 packing=true cutoff_len=512
    megatune data preview --model_name_or_path Qwen3-0.6B --dataset my.jsonl --rows 5
    megatune data preview run.yaml --eval --no-color | less
    megatune data preview run.yaml --rows 20 --html
    megatune data preview run.yaml --rows 100 --json > rows.jsonl

Each row is shown with its file and line. Only the shown rows are read; packed rows are packed from the first 1000
samples. --json prints one JSON object per row, with place, ids, labels (-100: not trained) and text; for a pair these
are in chosen and rejected, for a packed row in its sequences."""

_STATS_EPILOG = """Settings are those of train, as key=value or --key value. Examples:

    megatune data stats run.yaml
    megatune data stats run.yaml cutoff_len=4096 packing=true --plot
    megatune data stats run.yaml --json > stats.json

All rows are prepared and cached, so that a training run with the same settings can start at once."""

_DEFAULT_ROWS = 3
_USAGE = "FILE.yaml [key=value ...] [--key value ...] [--OPTION ...]"


class PreviewOptions(Group):
    """The options of `megatune data preview`."""

    rows: Count | None = None
    """number of rows to show, per data set unless packed (3)"""
    row: Annotated[Count | None, Flag("I")] = None
    """show this row, counted from 1; with --rows, start there"""
    eval: bool = False
    """show the evaluation rows instead"""
    ids: bool = False
    """print a line for every token: position, id, label, text"""
    json_: bool = False
    """print one JSON object per row instead of text"""
    no_color: bool = False
    """mark trained text with ⟦ ⟧ instead of colors, as without a terminal or with NO_COLOR set"""
    html: Annotated[str | None, Flag("FILE.html", bare="data_preview.html")] = None
    """also write an HTML page, with thumbnails of images (data_preview.html)"""
    width: Annotated[int | None, Flag("W"), Field(ge=20)] = None
    """wrap lines at this many columns (the terminal's width)"""


class StatsOptions(Group):
    """The options of `megatune data stats`."""

    json_: bool = False
    """print one JSON document instead of tables"""
    plot: Annotated[str | None, Flag("FILE.png", bare="data_stats.png")] = None
    """also plot them (data_stats.png if no file is given)"""


_PREVIEW = Command(
    name="data preview", usage=_USAGE, about="Shows rows as the model sees them. Only needs the model's tokenizer.",
    epilog=_PREVIEW_EPILOG, options=PreviewOptions, takes_settings=True,
)  # fmt: skip
_STATS = Command(
    name="data stats", usage=_USAGE, about="Counts rows and tokens: lengths, dropped rows, packing, steps. Only needs "
    "the model's tokenizer.", epilog=_STATS_EPILOG, options=StatsOptions, takes_settings=True,
)  # fmt: skip
_HELP = """usage: megatune data preview | stats FILE.yaml [key=value ...]

preview  show rows as the model sees them
stats    count rows and tokens: lengths, dropped rows, packing, steps
"""


def run(verb: str, words: Sequence[str]) -> int:
    """Run one of the two verbs.

    Raises:
        MegatuneError: SETTINGS, DATA, INPUT or CANNOT_WRITE, with everything that is wrong.
    """
    verbs = {"preview": _preview, "stats": _stats}
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        raise Help(_HELP)
    if not first:
        print(_HELP, end="", file=sys.stderr)
        return ExitCode.SETTINGS
    if first not in verbs:
        raise unknown_verb(first, list(verbs), "megatune data")
    return verbs[first](words[1:])


def _preview(words: Sequence[str]) -> int:
    """Print rows."""
    given = _PREVIEW.read(words)
    options = given.options
    if options.json_:
        unused = {"--ids": options.ids, "--no-color": options.no_color, "--width": options.width}
        why, fix = "--json prints all ids, without colors", "remove it"
        given.findings.extend(Finding("has no effect", flag, why, fix) for flag, used in unused.items() if used)
    settings = given.load().require_valid(rules=DATA_RULES)
    first = options.row or 1
    count = options.rows or (1 if options.row else _DEFAULT_ROWS)

    from megatune.data.preview import load_model_input, read_preview
    from megatune.data.preview.show import json_lines, show_preview, write_page

    tokenizer, vision = load_model_input(settings)
    found = read_preview(settings, tokenizer, vision, wanted=range(first, first + count), evaluation=options.eval)
    if options.json_:
        print("\n".join(json_lines(found, tokenizer)))
        if found.bad:
            rest = "cannot be trained on; without --json they are listed"
            print(f"{len(found.bad):,} of the {found.read:,} rows read {rest}", file=sys.stderr)
    else:
        from rich.console import Console

        console = Console(width=options.width, no_color=options.no_color or None)
        show_preview(found, tokenizer, console, ids=options.ids, wraps=options.width is not None)
    if options.html is not None:
        write_page(found, tokenizer, Path(options.html))
        print(f"\npage: {options.html}", file=sys.stderr if options.json_ else sys.stdout)
    return ExitCode.DONE


def _stats(words: Sequence[str]) -> int:
    """Prepare all rows, print their statistics, and plot them with --plot."""
    given = _STATS.read(words)
    options = given.options
    if options.plot is not None and not options.plot.lower().endswith(".png"):
        given.findings.append(Finding(f"--plot {options.plot}: plots are PNG files", fix="--plot FILE.png"))
    settings = given.load().require_valid(rules=DATA_RULES)

    from megatune.data.prepare import prepare
    from megatune.data.preview import load_model_input
    from megatune.data.statistics import describe, draw, lines, refuse_streaming

    refuse_streaming(settings)
    tokenizer, vision = load_model_input(settings)
    statistics = describe(settings, tokenizer, prepare(settings, tokenizer, vision=vision))
    print(statistics.to_json() if options.json_ else "\n".join(lines(statistics)))
    if options.plot is not None:
        draw(statistics, Path(options.plot))
        if not options.json_:
            print(f"plot         {options.plot}")
    return ExitCode.DONE
