"""Streams answers of a backend to many clients, as events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from megatune.generation.endpoint.responses import ApiError
from megatune.generation.options import Sampling
from megatune.generation.prompt import Backend, Prompt, Reply

Event = Prompt | str | Reply
Events = AsyncGenerator[Event, None]


class Streams:
    """Answers prompts in threads, as many at a time as the backend supports; others wait.

    Args:
        max_waiting: maximum number of waiting prompts; more are rejected.
    """

    def __init__(self, backend: Backend, max_waiting: int) -> None:
        self._backend, self._max_waiting = backend, max_waiting
        self._threads = ThreadPoolExecutor(backend.max_concurrency, "generate")
        self._tokenizing = threading.Lock()  # tokenizers are not thread-safe
        self._unfinished = 0  # in the event loop's thread only
        self._stopped = False

    async def stream(self, make: Callable[[], Prompt], sampling: Sampling) -> Events:
        """Yield the prompt when its answer begins, then pieces of text, and finally the whole answer.

        Closing the iterator ends the answer.

        Args:
            make: builds the prompt; called in a thread, because it may take a while.

        Raises:
            ApiError: (503) too many prompts are waiting, or the endpoint is shutting down.
        """
        if self._stopped:
            raise _ending()
        if self._unfinished >= self._backend.max_concurrency + self._max_waiting:
            raise ApiError(503, "too many requests are waiting; try again later", code="queue_full")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | BaseException]()
        left = threading.Event()

        def tell(event: Event | BaseException) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def is_stopped() -> bool:
            return left.is_set() or self._stopped

        def answer() -> Reply | BaseException:
            if is_stopped():
                return _ending()
            with self._tokenizing:
                prompt = make()
            tell(prompt)
            reply = self._backend.write(prompt, sampling, tell, is_stopped)
            return _ending() if is_stopped() else reply

        def work() -> None:
            try:
                last = answer()
            except BaseException as error:
                last = error
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish)  # first: a client that has its answer may send the next prompt
            tell(last)

        self._unfinished += 1
        self._threads.submit(work)
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Reply):
                    return
        finally:
            left.set()

    def _finish(self) -> None:
        self._unfinished -= 1

    def stop(self) -> None:
        """End running and waiting answers; safe to call from a signal handler."""
        self._stopped = True

    def close(self) -> None:
        """End the threads and their answers, after the last request."""
        self.stop()
        self._threads.shutdown(wait=False)
        self._backend.close()


def _ending() -> ApiError:
    return ApiError(503, "the endpoint is ending", code="ending")
