"""`megatune serve`: a model behind OpenAI's interface, for trying it right after training."""

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
    """its port; 0 takes a free one"""
    api_key: Annotated[str | None, Flag("KEY")] = None
    """what clients must know; better in MEGATUNE_API_KEY, which other users of the machine do not see"""
    served_model_name: Annotated[str | None, Flag("NAME")] = None
    """what clients call the model (its folder's name)"""
    cors_origins: Annotated[list[str], Flag("URL ...")] = Field(default=[])
    """web pages of these origins may ask"""
    max_waiting: Annotated[int, Field(ge=0)] = 16
    """requests that wait; more get 503"""
    request_timeout: Annotated[Positive, Flag("SECONDS")] = 600.0
    """for a request, its waiting and its answer"""
    max_body_mib: Annotated[Positive, Flag("MIB")] = 16.0
    """size of a request at most"""
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug", "trace"], Flag("LEVEL")] = "warning"
    """of uvicorn: critical, error, warning, info, debug or trace"""


class ServeOptions(WriterOptions, EndpointOptions):
    """The options of `megatune serve`."""


COMMAND = Command(
    name="serve",
    usage="MODEL | FILE.yaml [--OPTION ...]",
    about="Serves chat completions and completions over HTTP with OpenAI's API until it is stopped. Needs pip install "
    "'megatune[serve]'. FILE.yaml has options, as LLaMA-Factory's files of `api` do.",
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
        MegatuneError: (SETTINGS) options; (INPUT) what the model or an adapter lacks; (UNAVAILABLE) the address is
            taken, or what is needed is not installed.
    """
    options = given.options
    key = os.environ.get(_KEY) if options.api_key is None else options.api_key
    given.stop(_findings(options, key))
    require(("starlette", "uvicorn"), COMMAND.program, "the endpoint runs on it", "pip install 'megatune[serve]'")
    from megatune.generation.endpoint.server import listening_socket
    from megatune.generation.inference_config import resolve_config

    config = resolve_config(given, accepts_media=True)

    with listening_socket(options.host, options.port, has_key=key is not None) as taken:
        _serve(options, config, key, taken)
    return ExitCode.DONE


def _serve(options: ServeOptions, config: InferenceConfig, key: str | None, taken: socket) -> None:
    """Load the model and serve it on an address."""
    with quick_imports():
        from megatune.generation.answering import load_generator, model_folder
    from megatune.generation.endpoint.app import App, Limits
    from megatune.generation.endpoint.server import Server
    from megatune.generation.endpoint.streams import Streams

    generator = load_generator(config, model_folder(config, options), accepts_media=True, chats=False)
    streams = Streams(generator.backend, options.max_waiting)
    name = options.served_model_name or Path(config.name).resolve().name
    limits = Limits(body_bytes=int(options.max_body_mib * 2**20), seconds=options.request_timeout)
    app = App(generator, streams, name, int(time.time()), defaults=config.options, api_key=key, limits=limits)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{taken.getsockname()[1]}/v1"

    def say() -> None:
        print(f"{name} is at {address}; Ctrl-C ends", file=sys.stderr, flush=True)

    Server(app.asgi(options.cors_origins), streams, options.log_level, say).serve_on(taken)


def _findings(options: ServeOptions, key: str | None) -> Iterator[Finding]:
    if key is not None and not key.strip():
        where = _KEY if options.api_key is None else "--api_key"
        yield Finding("is empty", where, "everyone would know it", "give a key, or leave it out")
