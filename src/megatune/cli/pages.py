"""The pages of --help, written from the options of a verb and their docstrings."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatune.config.options import Option
    from megatune.config.setting import Group, SettingInfo

_WIDTH = 100
_METAVARS = {int: "N", float: "X"}


class Help(Exception):  # noqa: N818 - ends a verb, and is no error
    """Ends a verb with a page of --help."""


def write_page(
    program: str, usage: str, about: str, epilog: str, options: type[Group], own: Mapping[str, Option]
) -> str:
    """Write a page: a section for each group that the options inherit from, headed by its docstring."""
    from megatune.config.setting import Group, docstrings  # with pydantic, unlike `megatune --help`

    parser = new_parser(program, f"{program} {usage}", about, epilog)
    declaring = options.__mro__[: options.__mro__.index(Group)]
    texts = {name: (model, text) for model in declaring for name, text in docstrings(model).items()}
    sections: dict[str, Any] = {}
    for name, (info, flag) in own.items():
        model, text = texts[info.name]
        heading = "options" if model is options else (inspect.getdoc(model) or "").rstrip(".")
        if heading not in sections:
            sections[heading] = parser.add_argument_group(heading)
        metavar = flag.metavar or _metavar(info)
        shape: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        shape |= {"nargs": "?"} if flag.bare else {}
        default = f" (default: {info.default})" if info.default and info.default is not True else ""
        sections[heading].add_argument(f"--{name}", help=f"{text}{default}".replace("%", "%%"), **shape)
    return parser.format_help()


def new_parser(program: str, usage: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """Return argparse's parser, which lays out the pages and reads nothing."""
    return argparse.ArgumentParser(
        prog=program, usage=usage, description="\n".join(textwrap.wrap(about, _WIDTH)), epilog=epilog, add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=_WIDTH),
    )  # fmt: skip


def _metavar(info: SettingInfo) -> str:
    if info.choices:
        return "|".join(map(str, info.choices))
    if info.kinds == {bool}:
        return "" if info.default is False else "BOOL"
    return next((metavar for kind, metavar in _METAVARS.items() if kind in info.kinds), "TEXT")
