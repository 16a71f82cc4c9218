"""The process of one engine: it builds, warms up, and does one step whenever it is told to."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from training.case import Case, Closing, Engine, Failure, Measured, Ready

WARMUP = 2  # steps that are not measured: compilers, autotuning and the allocator settle
_PROFILED_ROWS = 25


class LostError(Exception):
    """An engine can answer no more; the reason in one line."""


class Worker:
    """The other end of an engine's process.

    It starts importing at once, on the CPU; it takes the device when it is asked to build.

    Args:
        target: what the process does, given its end of the pipe; `serve` unless said.
    """

    def __init__(self, case: Case, engine: Engine, target: Callable[..., None] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target or serve, args=(theirs, case, engine), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, word: str, *details: Any, limit: float) -> Any:
        """Say what to do, and take the answer.

        Args:
            limit: seconds to wait for it.

        Raises:
            LostError: the engine failed, died or gave no answer in time.
        """
        with contextlib.suppress(OSError):  # it has failed already, and the reason waits in the pipe
            self._pipe.send((word, *details))
        try:
            if not self._pipe.poll(max(limit, 0.0)):
                raise LostError(f"no answer in {limit:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise LostError(f"the process died: {_how_it_ended(self._process.exitcode)}") from None
        if isinstance(answer, Failure):
            raise LostError(answer.reason)
        return answer

    def end(self) -> None:
        """Let the process go, and with it the device's memory."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


def _how_it_ended(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def serve(pipe: Connection, case: Case, engine: Engine) -> None:
    """What the process does: answer words until the pipe closes."""
    try:
        server = _Server(case, engine)
        while True:
            try:
                word, *details = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(server, word)(*details))
    except Exception as error:
        pipe.send(Failure(_reason(error)))
        raise


def _reason(error: Exception) -> str:
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


class _Server:
    """The words an engine knows: `build`, `step`, `memory` and `close`."""

    def __init__(self, case: Case, engine: Engine) -> None:
        from training.timeline import Timeline

        self._case, self._timeline = case, Timeline()
        self._engine: Any
        if engine.side == "megatune":
            from training.ours import Megatune

            self._engine = Megatune(case, engine.options, self._timeline)
        else:
            from training.theirs import Transformers

            self._engine = Transformers(case, self._timeline, **engine.options)

    def build(self, first_step: int) -> Ready:
        """Build the engine, and take the steps before `first_step` that are not measured."""
        from training.timeline import ON_GPU, synchronize

        began = time.perf_counter()
        self._engine.build()
        synchronize()
        seconds = time.perf_counter() - began
        warm = tuple(self.step(first_step - WARMUP + index).seconds for index in range(WARMUP))
        # As the training loop does on every rank: what was built stays, and nothing is collected within a step.
        gc.collect()
        gc.freeze()
        gc.disable()
        if ON_GPU:
            import torch

            torch.cuda.reset_peak_memory_stats()
        return Ready(self._engine.describe(), seconds, warm)

    def step(self, index: int) -> Measured:
        """One step; its rows are made before the clock starts."""
        from training.timeline import PHASES, synchronize

        batches = self._batches(index)
        synchronize()
        began = time.perf_counter()
        loss = self._engine.step(batches)
        synchronize()
        seconds = time.perf_counter() - began
        phases = self._timeline.seconds()
        return Measured(index, seconds, {phase: phases.get(phase, 0.0) for phase in PHASES}, loss)

    def close(self, index: int, profiled: bool) -> Closing:
        """Say what memory the steps took, and look into one more of them."""
        from training.timeline import ON_GPU, forward_parts, synchronize

        peak, reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
        if ON_GPU:
            import torch

            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        with forward_parts(self._engine.module) as parts:
            self._engine.step(self._batches(index))
            synchronize()
            seconds = parts()
        profile = self._profile(index + 1) if profiled else ""
        self._engine.close()
        return Closing(peak, reserved, seconds, profile)

    def memory(self, index: int) -> tuple[int, int]:
        """Bytes of all tensors between two steps, and at most during one more; on a CPU."""
        from training.live import kept_bytes, step_bytes

        kept = kept_bytes()
        batches = self._batches(index)
        return kept, kept + step_bytes(lambda: self._engine.step(batches))

    def _profile(self, index: int) -> str:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from training.timeline import ON_GPU, synchronize

        batches = self._batches(index)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_GPU
        with profile(activities=activities) as found:
            self._engine.step(batches)
            synchronize()
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        return found.key_averages().table(sort_by=by, row_limit=_PROFILED_ROWS, max_name_column_width=60)

    def _batches(self, index: int) -> list[Any]:
        from training.rows import micro_batches
        from training.timeline import ON_GPU

        batches = micro_batches(self._case, index)
        return [batch.pin_memory() for batch in batches] if ON_GPU else batches
