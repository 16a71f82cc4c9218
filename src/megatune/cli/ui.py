"""`megatune ui`: serves a web page of the runs in a folder, active and finished."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatune.cli.command import Command, require
from megatune.config.options import Flag
from megatune.config.setting import Group
from megatune.errors import ExitCode, Finding, MegatuneError


class UiOptions(Group):
    """The options of `megatune ui`."""

    host: str = "127.0.0.1"
    """the address to listen on; addresses that other machines can reach need the printed token"""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """the port; 0 chooses a free one"""
    token: Annotated[str | None, Flag("TOKEN")] = None
    """token that browsers must send (MEGATUNE_UI_TOKEN; generated if --host is reachable from other machines)"""
    read_only: bool = False
    """show runs without starting, stopping or verifying any"""
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug"], Flag("LEVEL")] = "warning"
    """log level of uvicorn: critical, error, warning, info or debug"""


COMMAND = Command(
    name="ui",
    usage="[FOLDER] [--OPTION ...]",
    about="Shows the runs in FOLDER (the working folder) on a web page: curves, settings, rows, plan, checkpoints, "
    "logs, samples; stops, resumes and starts runs. Needs pip install 'megatune[ui]'.",
    options=UiOptions,
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Serve the page until SIGINT or SIGTERM.

    Raises:
        MegatuneError: (SETTINGS) options; (INPUT) the folder does not exist; (UNAVAILABLE) the address is in use, or a
            package is not installed.
    """
    given = COMMAND.read(words)
    options, root = given.options, Path(given.words[0] if given.words else ".")
    token = os.environ.get("MEGATUNE_UI_TOKEN") if options.token is None else options.token
    if token is not None and not (token.strip() and token.isascii()):
        given.findings.append(Finding("is empty or not ASCII", "--token", fix="remove it"))
    given.stop()
    require(("starlette", "uvicorn"), COMMAND.program, "the web page needs it", "pip install 'megatune[ui]'")
    if not root.is_dir():
        finding = Finding(f"{root} is not a folder", COMMAND.program, fix="give a folder that contains runs")
        raise MegatuneError(finding, ExitCode.INPUT)

    from megatune.generation.endpoint.server import Server, is_local, listening_socket
    from megatune.ui.app import App

    with listening_socket(options.host, options.port, has_key=True) as taken:
        address = taken.getsockname()
        if token is None and not is_local(str(address[0])):
            token = secrets.token_urlsafe(24)
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{address[1]}/" + (f"?token={token}" if token else "")

        def say() -> None:
            print(f"runs in {root.resolve()}: {url}\nCtrl-C stops the page; runs continue", file=sys.stderr, flush=True)

        app = App(root, token, read_only=options.read_only)
        Server(app.asgi(), None, options.log_level, say).serve_on(taken)
    return ExitCode.DONE
