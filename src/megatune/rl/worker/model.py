"""What every role with a model of our engine does on a rank: join the others, load, move between device and host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.samples import Rollouts

# By number of the sample: fp32 [r], values of its response's tokens. Each rank answers for the samples that it alone
# answers for; most hold none.
Answer = dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says once it is loaded; the same on all ranks of the role, but for memory.

    Attributes:
        step: of the checkpoint that the run resumes from, 0 without one.
        data_parallel_size: ranks that get different samples.
        num_tensors: what `weights` gives; 0 where it gives none.
        memory_gib: on this rank's device.
        notes: lines that a user should see.
    """

    step: int
    data_parallel_size: int
    num_tensors: int
    memory_gib: float
    notes: tuple[str, ...] = ()


class ModelWorker:
    """One rank of a role. Its methods are called on all ranks of the role, with the same arguments, in one order.

    Where a call is, `context.phase` and `context.step` say, and heartbeats in `run_dir` (`launch.context.read_beat`).

    Args:
        role: one of the settings' roles.
        env: which rank this is, and where the ranks meet.
        run_dir: for heartbeats and logs of this role; ranks of a machine share it.
    """

    def __init__(self, settings: RLSettings, role: ModelRole, env: RankEnv, run_dir: Path | str) -> None:
        self.all_settings, self.role, self.settings = settings, role, role.settings
        self.context = RankContext(env, Path(run_dir))

    def join(self) -> None:
        """Meet the other ranks of the role.

        Raises:
            MegatuneError: UNAVAILABLE, naming address and ranks.
        """
        raise NotImplementedError

    def load(self, checkpoint: str | None = None) -> Ready:
        """Build the layout and load the role's model, or the checkpoint that the run resumes from.

        Raises:
            MegatuneError: INPUT, SETTINGS: what cannot be used.
        """
        raise NotImplementedError

    def offload(self, *parts: str) -> int:
        """Move parts of the model to the host's memory, and free the device's.

        Args:
            parts: of "weights", "gradients", "optimizer"; none stands for all. Gradients are not kept: every update
                begins with new ones.

        Returns:
            Bytes of the device that are free now.
        """
        raise NotImplementedError

    def onload(self, *parts: str) -> int:
        """Move parts back to the device, bit for bit; what is there already stays. Returns bytes moved.

        Every method that computes needs "weights", and says so; `train` and `save` need all.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Take the groups down, so that the process can end."""
        raise NotImplementedError


def merged(answers: Sequence[Answer], rollouts: Rollouts) -> list[np.ndarray]:
    """Put the answers of a role's ranks together: fp32 [r] of each sample, in order."""
    raise NotImplementedError
