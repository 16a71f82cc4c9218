"""The model on a hub: at every save and at the end, from a process of its own, at most one at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from megatune.config.settings import Settings
from megatune.hub.repository import Hub, use_modelscope
from megatune.hub.upload import CARD, answer_of, endpoint, later, start
from megatune.training.callbacks.base import Callback, StepReport, TrainSummary
from megatune.training.callbacks.plot import PLOT_NAME
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.manifest import TRAINING_FOLDER, read_manifest

_logger = logging.getLogger(__name__)
_FOLDER = ".push"
# What a push may take before it counts as one that hangs.
LONGEST_SECONDS = 600.0
_SLOWEST_BYTES = 5e6  # a second, beyond that
_STOPPED_SECONDS = 30.0
_NOT_SENT = (TRAINING_FOLDER, "iter_", "latest_checkpointed_iteration")  # nor Megatron's form of the model
_POLL_SECONDS = 0.2


class HubPush(Callback):
    """Pushes checkpoints; of those that come while one is under way the newest is next. No failure reaches the run.

    Args:
        write_card: writes README.md into a folder that is about to be sent.
        stop_requested: whether somebody wants the run to end.
    """

    def __init__(
        self,
        settings: Settings,
        output_dir: Path,
        log_dir: Path,
        write_card: Callable[[Path], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._settings, self._output_dir, self._log = settings.checkpoint, output_dir, log_dir / "push.log"
        self._write_card, self._stop_requested = write_card, stop_requested
        self._hub: Hub = "ms" if use_modelscope() else "hf"
        self._repo_id = settings.checkpoint.hub_model_id or output_dir.absolute().name
        self._waiting: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sent, self._deadline = output_dir, 0.0  # of the push that is under way
        self._has_warned = False

    def on_train_begin(self, schedule: RunSchedule) -> None:
        self._clean()  # what a killed run left

    def on_save(self, path: Path) -> None:
        if self._settings.hub_strategy == "every_save":
            self._waiting = path
            self._go_on()

    def on_step_end(self, report: StepReport) -> None:
        self._go_on()

    def on_train_end(self, summary: TrainSummary) -> None:
        if summary.outcome == "finished":
            return  # `on_final_model` follows
        if summary.outcome == "stopped":
            self._wait(time.monotonic() + _STOPPED_SECONDS, lambda: False)
        self._give_up("the run has ended")
        self._clean()

    def on_final_model(self, path: Path) -> None:
        """Push the final model; the bounded wait for it ends when the run is asked to stop."""
        if self._process is not None:  # a push of an earlier checkpoint, or of this one without its last card
            self._end()
        self._has_warned, self._waiting = False, path
        self._go_on()
        self._wait(self._deadline, self._stop_requested)
        self._give_up("the run was asked to end" if self._stop_requested() else "it hangs")
        self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._output_dir / _FOLDER, ignore_errors=True)

    def _go_on(self) -> None:
        """See whether the push under way has ended, and start the next one."""
        if self._process is not None and self._process.poll() is not None:
            answer, self._process = answer_of(self._process), None
            if "repo_id" in answer:
                print(f"pushed {self._sent.name} to {answer['repo_id']} on {endpoint(self._hub)}", flush=True)
            else:
                self._warn(answer["why"])
        if self._process is not None and time.monotonic() > self._deadline:
            self._give_up("it hangs")
        if self._process is None and self._waiting is not None:
            path, self._waiting = self._waiting, None
            try:
                self._start(path)
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")

    def _start(self, path: Path) -> None:
        self._sent = path
        folder = self._output_dir / _FOLDER
        num_bytes = _link_model(path, folder)
        if (self._output_dir / PLOT_NAME).is_file():
            shutil.copyfile(self._output_dir / PLOT_NAME, folder / PLOT_NAME)
        self._write_card(folder / CARD)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        order = {
            "task": "send",
            "hub": self._hub,
            "repo_id": self._repo_id,
            "private": self._settings.hub_private_repo,
            "folder": str(folder.absolute()),
            "message": f"Model of {path.name}",
        }
        self._deadline = time.monotonic() + LONGEST_SECONDS + num_bytes / _SLOWEST_BYTES
        self._process = start(order, self._log)

    def _wait(self, deadline: float, impatient: Callable[[], bool]) -> None:
        """Wait for the push under way."""
        while self._process is not None and time.monotonic() < deadline and not impatient():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_SECONDS)
                self._go_on()

    def _give_up(self, why: str) -> None:
        if self._process is not None:
            self._end()
            self._warn(why)

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        answer_of(self._process)
        self._process = None

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            command = later(self._hub, self._repo_id, self._sent)
            _logger.warning("pushing %s to %s failed: %s; later: %s", self._sent.name, self._repo_id, why, command)


def _link_model(checkpoint: Path, folder: Path) -> int:
    """Make a folder with the model's files of a checkpoint, which may be deleted meanwhile; return their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    files = [file for file in read_manifest(checkpoint).files if not file.name.startswith(_NOT_SENT)]
    for file in files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(checkpoint / file.name, target)
        except OSError:  # a file system without links
            shutil.copyfile(checkpoint / file.name, target)
    return sum(file.size for file in files)
