"""`megatune serve`: serves a model with the OpenAI API, to test it right after training."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatune.cli.command import Command, require
from megatune.config.options import Flag, ParsedArguments
from megatune.config.setting import Group, Positive
from megatune.errors import ExitCode, Finding
from megatune.generation.options import WriterOptions
from megatune.processes import quick_imports

if TYPE_CHECKING:
    from socket import socket

    from megatune.generation.inference_config import InferenceConfig

_KEY = "MEGATUNE_API_KEY"


class EndpointOptions(Group):
    """endpoint."""

    host: Annotated[str, Flag("NAME")] = "127.0.0.1"
    """the address to listen on"""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    """the port; 0 chooses a free one"""
    api_key: Annotated[str | None, Flag("KEY")] = None
    """key that clients must send; better set in MEGATUNE_API_KEY, which other users of the machine cannot see"""
    served_model_name: Annotated[str | None, Flag("NAME")] = None
    """name of the model for clients (its folder's name)"""
    cors_origins: Annotated[list[str], Flag("URL ...")] = Field(default=[])
    """origins of web pages that may send requests"""
    max_waiting: Annotated[int, Field(ge=0)] = 16
    """maximum number of waiting requests; further ones get 503"""
    request_timeout: Annotated[Positive, Flag("SECONDS")] = 600.0
    """limit for a request, including waiting and answering"""
    max_body_mib: Annotated[Positive, Flag("MIB")] = 16.0
    """maximum size of a request"""
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug", "trace"], Flag("LEVEL")] = "warning"
    """log level of uvicorn: critical, error, warning, info, debug or trace"""


class ServeOptions(WriterOptions, EndpointOptions):
    """The options of `megatune serve`."""


COMMAND = Command(
    name="serve",
    usage="MODEL | FILE.yaml [--OPTION ...]",
    about="Serves chat completions and completions over HTTP with the OpenAI API until it is stopped. Needs pip "
    "install 'megatune[serve]'. FILE.yaml has options, like LLaMA-Factory's files for `api`.",
    options=ServeOptions,
    system="write",
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Serve a model until SIGINT or SIGTERM."""
    return serve(COMMAND.read(words))


def serve(given: ParsedArguments[ServeOptions]) -> int:
    """Serve a model until SIGINT or SIGTERM.

    Raises:
        MegatuneError: (SETTINGS) options; (INPUT) missing files of the model or an adapter; (UNAVAILABLE) the address
            is in use, or a package is not installed.
    """
    options = given.options
    key = os.environ.get(_KEY) if options.api_key is None else options.api_key
    given.stop(_findings(options, key))
    require(("starlette", "uvicorn"), COMMAND.program, "the endpoint needs it", "pip install 'megatune[serve]'")
    from megatune.generation.endpoint.server import listening_socket
    from megatune.generation.inference_config import resolve_config

    config = resolve_config(given, accepts_media=True)

    with listening_socket(options.host, options.port, has_key=key is not None) as taken:
        _serve(options, config, key, taken)
    return ExitCode.DONE


def _serve(options: ServeOptions, config: InferenceConfig, key: str | None, taken: socket) -> None:
    """Load the model and serve it on an address."""
    with quick_imports():
        from megatune.generation.answering import model_folder
        from megatune.generation.generator import Generator
    from megatune.generation.endpoint.app import App, Limits
    from megatune.generation.endpoint.server import Server
    from megatune.generation.endpoint.streams import Streams

    folder, adapters = model_folder(config, options), config.adapted.adapters
    generator = Generator.load(folder, config.options, adapters, vllm=config.vllm, accepts_media=True, chats=False)
    streams = Streams(generator.backend, options.max_waiting)
    name = options.served_model_name or Path(config.name).resolve().name
    limits = Limits(body_bytes=int(options.max_body_mib * 2**20), seconds=options.request_timeout)
    app = App(generator, streams, name, int(time.time()), defaults=config.options, api_key=key, limits=limits)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{taken.getsockname()[1]}/v1"

    def say() -> None:
        print(f"{name} is served at {address}; Ctrl-C stops it", file=sys.stderr, flush=True)

    Server(app.asgi(options.cors_origins), streams, options.log_level, say).serve_on(taken)


def _findings(options: ServeOptions, key: str | None) -> Iterator[Finding]:
    if key is not None and not key.strip():
        where = _KEY if options.api_key is None else "--api_key"
        yield Finding("is empty", where, "", "set a key, or remove it")
