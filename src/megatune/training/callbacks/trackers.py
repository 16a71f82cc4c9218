"""Sends metrics to experiment trackers, each through a pipe to a separate process: `megatune.training.trackers`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.training.callbacks.base import Callback, Record, Shown, TrainSummary, is_evaluation, is_log
from megatune.training.callbacks.metrics import METRICS_NAME
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.files import read_json_lines, write_atomically
from megatune.training.trackers import IDS_NAME, RunInfo, new_id, read_ids, run_info
from megatune.training.trackers.worker import EXIT_REPORTED, kill_children

_logger = logging.getLogger(__name__)
_PIPE_BYTES = 1 << 20  # about a thousand log lines
FINISH_SECONDS = 30.0


class Trackers(Callback):
    """Reports to trackers. A resumed run continues the tracker's run, and skips steps that it already has.

    Args:
        workers: name -> "module:Class" of a `Tracker`.
        log_dir: for the output of the trackers' libraries.
        resume_step: steps done before this process.
    """

    def __init__(
        self, settings: Settings, workers: Mapping[str, str], output_dir: Path, log_dir: Path, resume_step: int = 0
    ) -> None:
        self._output_dir, self._log_dir, self._shown = output_dir, log_dir, Shown.of(settings)
        is_resumed = resume_step > 0 and not settings.run.overwrite_output_dir
        earlier = read_ids(output_dir) if is_resumed else {}
        ids = {name: earlier.get(name) or new_id(name) for name in workers}
        self._ids = {**earlier, **ids}
        self._workers = {name: (target, run_info(settings, ids[name], output_dir)) for name, target in workers.items()}
        # Steps that an earlier process logged after the checkpoint are still in this file, and in the trackers' runs.
        records = read_json_lines(output_dir / METRICS_NAME) if earlier else []
        self._logged = {key: max((r["step"] for r in records if key in r), default=0) for key in ("loss", "eval_loss")}
        self._new = {name for name in workers if name not in earlier}
        self._running: list[TrackerProcess] = []

    def on_train_begin(self, schedule: RunSchedule) -> None:
        write_atomically(self._output_dir / IDS_NAME, json.dumps(self._ids, indent=1) + "\n")
        for name, (target, info) in self._workers.items():
            self._running.append(TrackerProcess(name, target, info, self._log_dir / f"tracker-{name}.log"))

    def on_record(self, record: Record) -> None:
        if not (is_log(record) or is_evaluation(record)):
            return
        step, logged = record["step"], self._logged["loss" if is_log(record) else "eval_loss"]
        for process in self._running:
            if process.name in self._new or step > logged:
                process.send({"values": self._shown.scalars(record), "step": step})

    def on_train_end(self, summary: TrainSummary) -> None:
        values = {"step": summary.step, "train_runtime": summary.seconds}
        if summary.best_loss is not None:
            values["best_eval_loss"] = summary.best_loss
        deadline = time.monotonic() + FINISH_SECONDS
        for process in self._running:
            process.send({"finish": summary.outcome, "values": values})
        for process in self._running if summary.outcome in ("finished", "stopped") else ():
            process.finish(deadline, FINISH_SECONDS)
        # After a failure, the processes outlive this one for a while, so that other ranks do not wait: see the worker.


class TrackerProcess:
    """A tracker's process. Rank 0 waits for it only at the end."""

    def __init__(self, name: str, target: str, info: RunInfo, log: Path) -> None:
        self.name, self._log = name, log
        self._rest = b""  # of a line whose beginning is in the pipe
        self._is_off = self._has_dropped = False
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError):  # a kernel may allow less
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        module = "megatune.training.trackers.worker"
        words = [sys.executable, "-P", "-m", module, target, str(os.getpid()), str(log.absolute()), name]
        try:
            # A new session, so that killing the rank's process group does not lose the last numbers.
            self._process = subprocess.Popen(words, stdin=read, start_new_session=True)
        finally:
            os.close(read)
        self.send({"begin": asdict(info)})

    def send(self, order: Mapping[str, Any]) -> None:
        """Write a message into the pipe. If it is full, the message is dropped, with one warning."""
        if self._is_off or self._has_ended():
            return
        self._write()
        if not self._rest:
            self._rest = json.dumps(order).encode() + b"\n"
            self._write()
        elif not self._has_dropped:
            self._has_dropped = True
            _logger.warning("%s does not keep up: it gets no numbers until it catches up (%s)", self.name, self._log)

    def finish(self, deadline: float, limit: float) -> None:
        """Wait for the process to end until the deadline, by the monotonic clock, `limit` seconds after the request."""
        while self._rest and not self._is_off and (left := deadline - time.monotonic()) > 0 and not self._has_ended():
            select.select([], [self._pipe], [], min(left, 0.1))
            self._write()
        os.close(self._pipe)
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            self._has_ended()
        except subprocess.TimeoutExpired:
            self._kill()
            _logger.warning("%s did not finish in %.0f s and was ended (%s)", self.name, limit, self._log)

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]
        except BlockingIOError:
            pass
        except OSError:
            self._has_ended()

    def _has_ended(self) -> bool:
        """Return whether the process has ended. Warns once, unless it was asked to end or has reported the cause."""
        code = self._process.poll()
        if code is not None and not self._is_off:
            self._is_off = True
            if code not in (0, EXIT_REPORTED):
                _logger.warning("%s ended with code %d and is off for the rest of the run", self.name, code)
        return code is not None

    def _kill(self) -> None:
        """Kill the process and its children."""
        kill_children(self._process.pid)
        self._process.kill()
        self._process.wait()
