"""Roles of a run whose workers and engines are in this process: all of a run but Ray."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from digits import problems

from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.engine import groups
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.cluster.weights import Sync
from megatune.rl.pipeline import hosts, weights
from megatune.rl.pipeline.roles import EngineGroup, ModelGroup
from megatune.rl.pipeline.run import drive
from megatune.rl.pipeline.startup import Roles
from megatune.rl.problems import Problems
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.worker import training

_CONTEXT = 64


class _Pending:
    done = True

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def result(self) -> list[Any]:
        return self._answers


class LocalGroup:
    """`RoleGroup`, of objects. Ranks of the pool have met already."""

    def __init__(self, *objects: Any) -> None:
        self.objects, self.size = objects, len(objects)
        self.watch = SimpleNamespace(wait=lambda done, seconds: None)

    def call(self, method: str, *args: Any) -> list[Any]:
        return [None if method == "join" else getattr(each, method)(*args) for each in self.objects]

    def start(self, method: str, *args: Any) -> _Pending:
        return _Pending(self.call(method, *args))

    def start_each(self, method: str, arguments: list[tuple[Any, ...]]) -> _Pending:
        return _Pending([getattr(each, method)(*own) for each, own in zip(self.objects, arguments, strict=True)])


def _sync(trainer: LocalGroup, engines: LocalGroup, version: int, *, num_tensors: int) -> Sync:
    began = time.monotonic()
    engines.call("begin_update", version, num_tensors)
    for bucket in trainer.objects[0].weights():
        engines.call("update", bucket)
    engines.call("commit_update", version)
    return Sync(num_tensors, 1, 1, time.monotonic() - began)


def _built_once(*args: Any, **options: Any) -> groups.RankCoordinates:
    """Build the groups of the first model; those of the others, in processes of their own in a run, are the same."""
    return groups.place() if groups.parallel_state.is_initialized() else groups.build(*args, **options)


def run(settings: RLSettings, model: Path) -> int:
    """On one rank of the pool: run to the end."""
    weights.sync_weights = _sync
    training.build = _built_once
    run_dir = Path(settings.run.output_dir) / "launch"

    def model_group(host: Any, role: ModelRole | None) -> ModelGroup | None:
        context = RankContext(RankEnv(0, 0, 1, 1, "127.0.0.1", 1, 0), run_dir)
        return None if role is None else ModelGroup(role, LocalGroup(host(context, settings, role)))

    engine = hosts.engine(None, settings.actor_infer, 0, settings.rollout.max_running_requests, _CONTEXT)
    policy = model_group(hosts.policy, settings.actor_train)
    assert policy is not None
    roles = Roles(
        EngineGroup(settings.actor_infer, LocalGroup(engine)),
        policy,
        model_group(hosts.frozen, settings.reference),
        model_group(hosts.critic, settings.critic),
        {},
        {},
    )
    validation = None if settings.validation is None else Problems(problems())
    with RewardPool(settings.rewards) as pool:
        return drive(settings, model, Problems(problems()), validation, roles, pool)
