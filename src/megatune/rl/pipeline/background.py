"""Sampling beside training: a thread of the driver that pumps until it is paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REST_SECONDS = 0.001


class Background:
    """Calls `pump` again and again while it runs; whoever holds it has what `pump` works on to himself."""

    def __init__(self, pump: Callable[[], object]) -> None:
        self._pump = pump
        self._running = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Go on."""
        self._running.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stand still inside; an error of the thread's is raised here."""
        was_running = self._running.is_set()
        self._running.clear()
        with self._lock:
            self.check()
            yield
        if was_running:
            self._running.set()

    def check(self) -> None:
        """Raise an error of the thread's."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._running.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._running.wait()
            with self._lock:
                if self._running.is_set() and not self._ended.is_set():
                    try:
                        self._pump()
                    except BaseException as error:
                        self._error = error
                        self._running.clear()
                        self._ended.set()
            time.sleep(_REST_SECONDS)  # whoever waits for the lock gets it
