"""Rendering chat templates, which come with models, within limits of time and memory.

A template can loop without end, or make texts as large as the memory, within one step of C code, too. So templates are
rendered in a process that may be killed: its memory is bounded, and an alarm, set for each request, ends it. Jinja is
as Transformers' chat templates see it, in the sandbox that keeps a template from Python's objects.
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

MOST_SECONDS = 10.0  # of the process's own time: one that is stopped, or shares its cores, loses none
MOST_BYTES = 2**30  # that it takes beside its code
MOST_SIZE = 2**26  # characters of what is rendered
MOST_SOURCE = 2**20  # characters of a template; the longest published ones have 20,000

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
P = ParamSpec("P")
R = TypeVar("R")
_Process = subprocess.Popen[bytes]

_idle: list[_Process] = []  # as many as there were requests at the same time


class RenderLimitError(TemplateError):
    """A rendering that would take more time or memory than any conversation needs."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: notes where an answer is written."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration
    pieces: list[str]  # that the present rendering has written
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
        """Return an attribute or item; at once where it can only be an item, as of messages."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))


def _refuse(message: object) -> None:
    raise TemplateError(str(message))  # it may be an object of Jinja's


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON without HTML's escapes, which Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_environment = lru_cache(maxsize=1)(_Environment)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template


def render_marked(source: str, chat: Chat, tools: Tools | None = None, **given: Any) -> tuple[str, list[Span]]:
    """Render a chat template, and return the spans between {% generation %} and its end, too. Not for several threads.

    Args:
        given: what else the template may read, such as special tokens and add_generation_prompt.

    Raises:
        RenderLimitError: it takes too much memory.
        Exception: what the template raises; see `template_errors`.
    """
    if len(source) > MOST_SOURCE:
        raise RenderLimitError(f"it has {len(source):,} characters, and at most {MOST_SOURCE:,} are read")
    options = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": False, **given}
    marks: Any = _environment().extensions[_Generation.identifier]
    marks.pieces, marks.spans = [], []
    try:
        for piece in _compiled(source).generate(options):
            marks.pieces.append(piece)
        if sum(map(len, marks.pieces)) > MOST_SIZE:
            raise RenderLimitError(f"it writes more than {MOST_SIZE:,} characters")
        return "".join(marks.pieces), marks.spans
    except MemoryError:
        marks.pieces.clear()
        raise RenderLimitError("it takes more memory than any conversation needs") from None


def template_errors() -> tuple[type[Exception], ...]:
    """Return what rendering a chat template can raise: its own refusal, or a fault in it."""
    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render(source: str, chat: Chat, tools: Tools | None = None, **given: Any) -> str:
    """Render a chat template as Transformers' apply_chat_template does; see `render_marked`.

    Raises:
        RenderLimitError: it takes too much time or memory.
        Exception: what the template raises; see `template_errors`.
    """
    return limited(render_marked, source, chat, tools, **given)[0]


def limited(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of a module in a process that ends if it takes too long.

    Raises:
        RenderLimitError: it took too long, or more memory than it can ask for in good order.
        Exception: what the function raises.
    """
    request = pickle.dumps((MOST_SECONDS, function, args, kwargs))
    for _ in range(2):  # the first process may have been ended by somebody else
        if (answered := _answer(_idle.pop() if _idle else _start(), request)) is not None:
            is_returned, answer = answered
            if is_returned:
                return answer  # type: ignore[no-any-return]
            raise answer
    raise RenderLimitError("the process that renders it has ended, twice")


def _answer(process: _Process, request: bytes) -> tuple[bool, Any] | None:
    """Return whether the function returned, and what it returned or raised; None where the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
        answer: tuple[bool, Any] = pickle.load(process.stdout)
    except BaseException as error:  # with a KeyboardInterrupt its answer would be taken for that to the next request
        process.kill()
        _close(process)
        if not isinstance(error, EOFError | BrokenPipeError | pickle.UnpicklingError):
            raise
        if process.returncode == -signal.SIGPROF:
            return False, RenderLimitError(f"it takes more than {MOST_SECONDS:g} seconds to render")
        return None
    _idle.append(process)
    return answer


def _start() -> _Process:
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer_requests; answer_requests({MOST_BYTES})"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _close(process: _Process) -> None:
    with suppress(BrokenPipeError), process:  # without its pipes it ends
        pass


@atexit.register
def _close_all() -> None:
    while _idle:
        _close(_idle.pop())


os.register_at_fork(after_in_child=_idle.clear)


def answer_requests(most_bytes: int) -> None:
    """Do what the process does: call functions until there are no more requests."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the pipe from its parent, which handles them
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints
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


def beyond_limits(error: RenderLimitError) -> RowError:
    """Return what to say of the row."""
    return RowError("template-limit", "the chat template cannot be rendered within its limits", str(error))
