"""`megatune serve`: a model behind OpenAI's interface, for trying it right after training."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.cli import model_flags
from megatune.cli.model_file import read_model_file
from megatune.cli.model_flags import Checked
from megatune.cli.own_flags import add_flag
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from socket import socket

_KEY = "MEGATUNE_API_KEY"
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb and its flags."""
    parser = subparsers.add_parser(
        "serve",
        help="answer over HTTP as OpenAI's interface does",
        description="Serves chat completions and completions until it is stopped. Needs pip install 'megatune[serve]'.",
    )
    model_flags.add_model(parser)
    group = parser.add_argument_group("who may ask")
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help="the address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="its port; 0 takes a free one (8000)")
    add_flag(group, "api_key", metavar="KEY",
             help=f"what clients must know; better in {_KEY}, which other users of the machine do not see")  # fmt: skip
    add_flag(group, "served_model_name", metavar="NAME", help="what clients call the model (its folder's name)")
    add_flag(group, "cors_origins", nargs="+", default=[], metavar="URL",
             help="web pages of these origins may ask (none)")  # fmt: skip
    add_flag(group, "max_waiting", type=int, default=16, metavar="N", help="requests that wait; more get 503 (16)")
    add_flag(group, "request_timeout", type=float, default=600.0, metavar="SECONDS",
             help="for a request, its waiting and its answer (600)")  # fmt: skip
    add_flag(group, "max_body_mib", type=float, default=16.0, metavar="MIB", help="of a request (16)")
    add_flag(group, "log_level", choices=_LOG_LEVELS, default="warning", help="of uvicorn (warning)")
    model_flags.add_asking(parser)
    pictures = parser.add_argument_group("pictures (of vision-language models, as in training)")
    model_flags.add_picture_sizes(pictures)
    model_flags.add_sampling(parser)
    model_flags.add_backend(parser)
    parser.set_defaults(run=run, given=())


def run(args: argparse.Namespace) -> int:
    """Serve a model until SIGINT or SIGTERM.

    Raises:
        MegatuneError: (SETTINGS) flags; (INPUT) what the model or an adapter lacks; (UNAVAILABLE) the address is taken,
            or what is needed is not installed.
    """
    read_model_file(args)
    key = os.environ.get(_KEY) if args.api_key is None else args.api_key
    if findings := _findings(args, key):
        raise MegatuneError(findings, ExitCode.SETTINGS)
    _check_installed()
    checked = model_flags.check(args, brings_pictures=True)

    from megatune.generation.endpoint.server import listening_socket

    with listening_socket(args.host, args.port, has_key=key is not None) as taken:
        _serve(args, checked, key, taken)
    return ExitCode.DONE


def _serve(args: argparse.Namespace, checked: Checked, key: str | None, taken: socket) -> None:
    """Load the model and serve it on an address."""
    from megatune.generation.endpoint.app import App, Limits
    from megatune.generation.endpoint.model import load_model
    from megatune.generation.endpoint.server import Server

    folder = model_flags.model_dir(checked.adapted.base, args)
    prompter, streams = load_model(
        folder, checked.options, checked.adapted.adapters, vllm=checked.vllm, max_waiting=args.max_waiting
    )
    name = args.served_model_name or Path(checked.name).resolve().name
    limits = Limits(body_bytes=int(args.max_body_mib * 2**20), seconds=args.request_timeout)
    app = App(prompter, streams, name, int(time.time()), defaults=checked.options, api_key=key, limits=limits)
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{host}:{taken.getsockname()[1]}/v1"

    def say() -> None:
        print(f"{name} is at {address}; Ctrl-C ends", file=sys.stderr, flush=True)

    Server(app.asgi(args.cors_origins), streams, args.log_level, say).serve_on(taken)


def _findings(args: argparse.Namespace, key: str | None) -> list[Finding]:
    findings = []
    if key is not None and not key.strip():
        where = _KEY if args.api_key is None else "--api_key"
        findings.append(Finding("is empty", where, "everyone would know it", "give a key, or leave it out"))
    if not 0 <= args.port < 2**16:
        findings.append(Finding(f"{args.port} is no port", "--port", fix="--port 8000"))
    for flag, value, least in (
        ("--max_waiting", args.max_waiting, 0),
        ("--request_timeout", args.request_timeout, 0.001),
        ("--max_body_mib", args.max_body_mib, 0.001),
    ):
        if not least <= value < float("inf"):
            findings.append(Finding(f"{value} is out of range", flag, fix=f"{flag} {least} or more"))
    return findings


def _check_installed() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install 'megatune[serve]'"
        finding = Finding(f"{' and '.join(missing)} not installed", "megatune serve", "the endpoint runs on it", fix)
        raise MegatuneError(finding, ExitCode.UNAVAILABLE)
