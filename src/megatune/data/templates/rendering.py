"""Render chat templates, which come with models and are not trusted, within limits of time and memory.

A template can loop forever or build texts as large as the memory, even within one step of C code. So templates are
rendered in a process that may be killed: its memory is bounded, and an alarm, set for each request, ends it. Jinja is
configured as in Transformers' chat templates, in the sandbox that keeps a template away from Python's objects.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatune.data.bad_rows import RowError

MAX_SECONDS = 10.0  # of CPU time: a process that is stopped or shares its cores loses none
MAX_BYTES = 2**30  # of memory in addition to the process's code
MAX_CHARACTERS = 2**26  # of a rendering
MAX_SOURCE = 2**20  # characters of a template; the longest published templates have 20,000

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
P = ParamSpec("P")
R = TypeVar("R")
_Process = subprocess.Popen[bytes]

_idle: list[_Process] = []  # as many as there were concurrent requests


class RenderLimitError(TemplateError):
    """Raised when a rendering exceeds the limits of time or memory."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: records the span of an answer."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration
    pieces: list[str]  # written so far by the current rendering
    spans: list[Span]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text, start = caller(), sum(map(len, self.pieces))
        self.spans.append((start, start + len(text)))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item; return an item directly if it cannot be a dict's attribute, as for messages."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))


def _refuse(message: object) -> None:
    raise TemplateError(str(message))  # it may be an object of Jinja's


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON without HTML escapes, unlike Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_environment = lru_cache(maxsize=1)(_Environment)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template


def render_marked(source: str, chat: Chat, tools: Tools | None = None, **given: Any) -> tuple[str, list[Span]]:
    """Render a chat template; also return the spans between {% generation %} and its end. Not thread-safe.

    Args:
        given: other variables of the template, such as special tokens and add_generation_prompt.

    Raises:
        RenderLimitError: the rendering takes too much memory.
        Exception: what the template raises; see `template_errors`.
    """
    if len(source) > MAX_SOURCE:
        raise RenderLimitError(f"it has {len(source):,} characters, and at most {MAX_SOURCE:,} are read")
    options = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": False, **given}
    marks: Any = _environment().extensions[_Generation.identifier]
    marks.pieces, marks.spans = [], []
    try:
        for piece in _compiled(source).generate(options):
            marks.pieces.append(piece)
        if sum(map(len, marks.pieces)) > MAX_CHARACTERS:
            raise RenderLimitError(f"it writes more than {MAX_CHARACTERS:,} characters")
        return "".join(marks.pieces), marks.spans
    except MemoryError:
        marks.pieces.clear()
        raise RenderLimitError("it takes more memory than any conversation needs") from None


def template_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that rendering a chat template can raise: its raise_exception, or an error in it."""
    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render(source: str, chat: Chat, tools: Tools | None = None, **given: Any) -> str:
    """Render a chat template as Transformers' apply_chat_template does; see `render_marked`.

    Raises:
        RenderLimitError: the rendering takes too much time or memory.
        Exception: what the template raises; see `template_errors`.
    """
    return run_limited(render_marked, source, chat, tools, **given)[0]


def run_limited(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a module-level function in another process, within the limits of time and memory.

    Raises:
        RenderLimitError: it took too long, or too much memory.
        Exception: what the function raises.
    """
    request = pickle.dumps((MAX_SECONDS, function, args, kwargs))
    for _ in range(2):  # another program may have killed the first process
        if (answered := _answer(_idle.pop() if _idle else _start(), request)) is not None:
            is_returned, answer = answered
            if is_returned:
                return answer  # type: ignore[no-any-return]
            raise answer
    raise RenderLimitError("the process that renders it was killed twice")


def _answer(process: _Process, request: bytes) -> tuple[bool, Any] | None:
    """Return whether the function returned, and its result or exception; None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
        answer: tuple[bool, Any] = pickle.load(process.stdout)
    except BaseException as error:  # after a KeyboardInterrupt the next request would read this request's answer
        process.kill()
        _close(process)
        if not isinstance(error, EOFError | BrokenPipeError | pickle.UnpicklingError):
            raise
        if process.returncode == -signal.SIGPROF:
            return False, RenderLimitError(f"it takes more than {MAX_SECONDS:g} seconds to render")
        return None
    _idle.append(process)
    return answer


def _start() -> _Process:
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer_requests; answer_requests({MAX_BYTES})"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _close(process: _Process) -> None:
    with suppress(BrokenPipeError), process:  # the process exits when its pipes are closed
        pass


@atexit.register
def _close_all() -> None:
    while _idle:
        _close(_idle.pop())


os.register_at_fork(after_in_child=_idle.clear)


def answer_requests(most_bytes: int) -> None:
    """Run the rendering process: call functions until there are no more requests."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process ends when its parent, which handles them, closes the pipe
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # sends what a library prints to stderr
    with open("/proc/self/statm") as file:
        most_bytes += int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    while True:
        try:
            seconds, function, args, kwargs = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = pickle.dumps((True, function(*args, **kwargs)))
        except MemoryError:
            answer = pickle.dumps((False, RenderLimitError("it takes more memory than any conversation needs")))
        except Exception as error:
            answer = pickle.dumps((False, error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer)
        answers.flush()


def limit_error(error: RenderLimitError) -> RowError:
    """Return the error of a row that exceeds the limits."""
    return RowError("template-limit", "the chat template cannot be rendered within its limits", str(error))
