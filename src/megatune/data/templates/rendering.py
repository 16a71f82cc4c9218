"""Rendering chat templates, which come with models, within limits of time and memory.

A template can loop without end, or make texts as large as the memory, within one step of C code, too. So templates are
rendered in a process that may be killed: its memory is bounded, and an alarm, set for each request, ends it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from megatune.data.bad_rows import RowError
from megatune.data.templates.sandbox import Chat, RenderLimitError, Tools, render_marked

MOST_SECONDS = 10.0  # of the process's own time: one that is stopped, or shares its cores, loses none
MOST_BYTES = 2**30  # that it takes beside its code

P = ParamSpec("P")
R = TypeVar("R")
_Process = subprocess.Popen[bytes]

_idle: list[_Process] = []  # as many as there were requests at the same time


def render(source: str, chat: Chat, tools: Tools | None = None, **given: Any) -> str:
    """Render a chat template as Transformers' apply_chat_template does; see `sandbox.render_marked`.

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
