"""Answers as events, for many clients at once: what the endpoint asks of a backend."""

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
    """Answers as many prompts at a time as the backend can, each in a thread; others wait.

    Args:
        max_waiting: prompts that may wait; more are refused.
    """

    def __init__(self, backend: Backend, max_waiting: int) -> None:
        self._backend, self._max_waiting = backend, max_waiting
        self._threads = ThreadPoolExecutor(backend.at_once, "generate")
        self._tokenizing = threading.Lock()  # a tokenizer serves one thread
        self._unfinished = 0  # in the event loop's thread only
        self._stopped = False

    async def stream(self, make: Callable[[], Prompt], sampling: Sampling) -> Events:
        """Yield the prompt as soon as its turn has come, then pieces of text, and at last the whole answer.

        Closing the iterator ends the answer.

        Args:
            make: makes the prompt, which may take a while: in a thread.

        Raises:
            ApiError: (503) too many are waiting, or the endpoint ends.
        """
        if self._stopped:
            raise _ending()
        if self._unfinished >= self._backend.at_once + self._max_waiting:
            raise ApiError(503, f"{self._max_waiting} requests are waiting; try again later", code="queue_full")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | BaseException]()
        left = threading.Event()

        def tell(event: Event | BaseException) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def is_stopped() -> bool:
            return left.is_set() or self._stopped

        def work() -> None:
            try:
                if not is_stopped():
                    with self._tokenizing:
                        prompt = make()
                    tell(prompt)
                    reply = self._backend.write(prompt, sampling, tell, is_stopped)
                tell(_ending() if is_stopped() else reply)
            except BaseException as error:
                tell(error)
            finally:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._finish)

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
        """End the answers that are being written, and those that wait; a signal may call it at any moment."""
        self._stopped = True

    def close(self) -> None:
        """End the threads, with their answers, when nobody asks any more."""
        self.stop()
        self._threads.shutdown(wait=False)
        self._backend.close()


def _ending() -> ApiError:
    return ApiError(503, "the endpoint is ending", code="ending")
