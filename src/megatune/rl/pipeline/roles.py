"""Groups of actors as the driver calls them, and whose turn it is on the devices that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from megatune.config.rl.settings import InferRole, ModelRole
from megatune.errors import MegatuneError
from megatune.rl.cluster.group import Pending, RoleGroup
from megatune.rl.rollout.engine import Memory
from megatune.rl.samples import Request, Response, Rollouts
from megatune.rl.worker.model import Ready
from megatune.rl.worker.rows import merged

_CLOSE_SECONDS = 30.0
PARTS = ("weights", "gradients", "optimizer")


class ModelGroup:
    """A role with a model of our engine.

    Attributes:
        ready: what rank 0 said once it was loaded.
        meanwhile: called with a call in flight; returns when it is done, or before.
    """

    def __init__(self, role: ModelRole, group: RoleGroup) -> None:
        self.role, self.group = role, group
        self.ready: Ready | None = None
        self.meanwhile: Callable[[Pending], None] = lambda pending: None
        self._held: set[str] = set()  # parts on the devices

    def load(self, checkpoint: str | None = None) -> Ready:
        """Load the role's model, or its checkpoint."""
        self.ready = self.group.call("load", checkpoint)[0]
        self._held = set(PARTS)
        return self.ready

    def ask(self, method: str, rollouts: Rollouts, *args: object) -> list[np.ndarray]:
        """Ask for values of the responses' tokens: fp32 [r] of each sample."""
        return merged(self.call(method, rollouts, *args), rollouts)

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of all ranks, and return their answers."""
        pending = self.group.start(method, *args)
        self.meanwhile(pending)
        return pending.result()

    def hold(self, *parts: str) -> None:
        """Have these parts on the devices, and no others."""
        if gone := self._held - set(parts):
            self.call("offload", *sorted(gone))
        if missing := set(parts) - self._held:
            self.call("onload", *sorted(missing))
        self._held = set(parts)


class EngineGroup:
    """The rollout engines: `engines.Engines`, in actors.

    Args:
        sleep_level: 1 keeps their weights while they sleep.
    """

    def __init__(self, role: InferRole, group: RoleGroup, sleep_level: int = 1) -> None:
        self.role, self.group, self.sleep_level = role, group, sleep_level
        self._asleep: set[Memory] = set()
        self._submitted: list[Pending] = []
        self._stepping: Pending | None = None

    @property
    def number(self) -> int:
        """See `Engines`."""
        return self.group.size

    def submit(self, requests: Sequence[Sequence[Request]]) -> None:
        """See `Engines`. An actor does one call after the other, so that nobody need wait for this one."""
        self._submitted.append(self.group.start_each("submit", [(list(own),) for own in requests]))

    def step(self, *, wait: bool = True) -> list[Response]:
        """See `Engines`."""
        if self._stepping is None:
            self._stepping = self.group.start("step")
        return self.settle() if wait or self._stepping.done else []

    def settle(self) -> list[Response]:
        """See `Engines`."""
        if self._stepping is None:
            return []
        found, self._stepping = self._stepping.result(), None
        submitted, self._submitted = self._submitted, []
        for each in submitted:
            each.result()
        return [response for own in found for response in own]

    def wait(self, other: Pending, seconds: float) -> None:
        """Wait until another call, or the step that the engines are at, is done."""
        self.group.watch.wait(lambda: other.done or (self._stepping is not None and self._stepping.done), seconds)

    def abort(self, ids: Sequence[str] | None = None) -> list[Response]:
        """See `Engines`."""
        return [response for own in self.group.call("abort", ids) for response in own]

    def sleep(self) -> None:
        """Free the devices."""
        if not self._asleep:
            self.group.call("sleep", self.sleep_level)
            self._asleep = {"weights", "cache"}

    def close(self) -> None:
        """Let the engines end what they have started, and remove what they have left in shared memory."""
        with suppress(MegatuneError):  # they are killed next
            self.group.call("close", limit=_CLOSE_SECONDS)

    def wake(self, *parts: Memory) -> None:
        """Take the devices again, for these parts of an engine or for all of it."""
        if missing := self._asleep & set(parts or self._asleep):
            self.group.call("wake", *sorted(missing))
            self._asleep -= missing


class DeviceScheduler:
    """Schedules colocated roles: those that share devices use them one after the other; others are never moved.

    Args:
        judges: engines that work beside the rollout engines, on other devices; they may share those of models.
    """

    def __init__(self, engines: EngineGroup, models: Sequence[ModelGroup], judges: Sequence[EngineGroup] = ()) -> None:
        self._engines, self._models, self._judges = engines, list(models), list(judges)

    def load(self, model: ModelGroup, checkpoint: str | None = None) -> None:
        """Load a model, with room for it."""
        self._let_sleep(model)
        self._clear_of(model, ())
        model.load(checkpoint)

    def sample(self) -> None:
        """Give the devices to the engines, and to judges."""
        for model in self._models:
            if self.meets_engines(model) or self._judges_of(model):
                model.hold()
        for engines in (self._engines, *self._judges):
            engines.wake()

    def compute(self, model: ModelGroup, *parts: str) -> None:
        """Give the devices to a model, which needs these parts. Judges that share them have nothing to do."""
        self._let_sleep(model)
        if self._others(model) or self.meets_engines(model) or self._judges_of(model):
            model.hold(*self._clear_of(model, parts))

    def transfer(self, model: ModelGroup) -> None:
        """Have the model's weights on the devices, and the engines'. Their cache comes back with `sample`, when the
        model has left: together they would be the most that a step needs."""
        for judge in self._judges_of(model):
            judge.sleep()
        if self._others(model) or self.meets_engines(model) or self._judges_of(model):
            model.hold(*self._clear_of(model, ("weights",)))
        for other in self._models:
            if other is not model and self.meets_engines(other):
                other.hold()
        self._engines.wake("weights")

    @property
    def judges_share_devices(self) -> bool:
        """Whether a judge shares a device with a model."""
        return any(map(self._judges_of, self._models))

    def _let_sleep(self, model: ModelGroup) -> None:
        if self.meets_engines(model):
            self._engines.sleep()
        for judge in self._judges_of(model):
            judge.sleep()

    def _judges_of(self, model: ModelGroup) -> list[EngineGroup]:
        return [judge for judge in self._judges if {*judge.role.devices} & {*model.role.devices}]

    def _clear_of(self, model: ModelGroup, parts: Sequence[str]) -> Sequence[str]:
        for other in self._others(model):
            other.hold()
        return parts

    def _others(self, model: ModelGroup) -> list[ModelGroup]:
        return [each for each in self._models if each is not model and {*each.role.devices} & {*model.role.devices}]

    def meets_engines(self, model: ModelGroup) -> bool:
        """Whether a model shares a device with an engine."""
        return bool({*model.role.devices} & {*self._engines.role.devices})
