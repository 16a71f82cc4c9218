"""What a rank knows about its place in the run, and how it reports that it is alive."""

from __future__ import annotations

import time
from pathlib import Path

from megatune.launch.heartbeat import HeartbeatWriter, heartbeat_path
from megatune.launch.world import RankEnv

STOP_FILE_POLL_SECONDS = 1.0  # run_dir may be on a network file system; a step may be milliseconds


class RankContext:
    """Handed to the target function of every rank, whether megatune or torchrun started it.

    Attributes:
        rank, local_rank, world_size, local_world_size, node_rank, master_addr, master_port: as torchrun names them.
        run_dir: where logs, heartbeats and error reports of this run are written.
        stop_file: a user who creates this file asks the run to save and stop.
        phase, step: of the last beat.
    """

    def __init__(self, env: RankEnv, run_dir: Path, stop_file: Path | None = None) -> None:
        self.rank = env.rank
        self.local_rank = env.local_rank
        self.world_size = env.world_size
        self.local_world_size = env.local_world_size
        self.node_rank = env.node_rank
        self.master_addr = env.master_addr
        self.master_port = env.master_port
        self.run_dir = run_dir
        self.stop_file = stop_file or run_dir / "STOP"
        self.phase = ""
        self.step = 0
        self._heartbeat = HeartbeatWriter(heartbeat_path(run_dir, env.rank))
        self._stop = False
        self._next_stop_poll = 0.0

    def beat(self, phase: str, step: int, *, limit: float | None = None) -> None:
        """Notes that this rank enters `phase` of `step`. A few microseconds; call it at least once a step.

        Args:
            phase: a short name, at most 40 bytes.
            step: the training step, 0 before the first.
            limit: seconds until the next beat after which the run counts as hung, for a phase that has its own
                measure (loading, saving); None for the run's hang_timeout.
        """
        self.phase = phase
        self.step = step
        self._heartbeat.write(phase, step, limit)

    def request_stop(self) -> None:
        """Makes `stop_requested` true; safe in a signal handler."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Whether this rank was asked to save and stop, by SIGTERM or by the stop file.

        Only this rank's view: the training loop has to reduce it over all ranks before it acts on it.
        """
        if not self._stop and (now := time.monotonic()) >= self._next_stop_poll:
            self._next_stop_poll = now + STOP_FILE_POLL_SECONDS
            self._stop = self.stop_file.exists()
        return self._stop
