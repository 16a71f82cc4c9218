"""Whose turn it is on devices that roles share: what is asked of them, in which order."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from megatune.config.rl.settings import InferRole, ModelRole
from megatune.config.settings import Settings
from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup


class Calls:
    """`RoleGroup` of actors that do whatever they are asked."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.size, self.ranks = name, said, 1, [0]
        self.loop, self.run = asyncio.new_event_loop(), None

    def call(self, method: str, *args: Any) -> list[Any]:
        self.said.append(" ".join([self.name, method, *map(str, args)]))
        return [None]


def _infer(device: int, **changes: Any) -> InferRole:
    return InferRole(device_mapping=[device], model_name_or_path="model", **changes)


def _role(name: str, device: int) -> ModelRole:
    return ModelRole(name=name, device_mapping=[device], settings=Settings(), training=name == "actor_train")


def test_an_engine_has_its_cache_once_the_trainer_has_left() -> None:
    said: list[str] = []
    engines = EngineGroup(_infer(0), Calls("engine", said), 1, sleep_level=2)  # type: ignore[arg-type]
    actor = ModelGroup(_role("actor_train", 0), Calls("actor", said))  # type: ignore[arg-type]
    scheduler = DeviceScheduler(engines, [actor])
    scheduler.load(actor)
    scheduler.transfer(actor)
    scheduler.sample()
    scheduler.compute(actor, "weights")
    assert said == [
        "engine sleep 2", "actor load None", "actor offload gradients optimizer", "engine wake weights",
        "actor offload weights", "engine wake cache", "engine sleep 2", "actor onload weights",
    ]  # fmt: skip


def test_a_judge_sleeps_while_a_trainer_has_its_device() -> None:
    said: list[str] = []

    def group(kind: Any, role: Any, name: str) -> Any:
        return kind(role, Calls(name, said))

    engines = partial(EngineGroup, max_running=1)
    engine = group(engines, _infer(0), "engine")
    judge = group(engines, _infer(1, name="reward_model"), "judge")
    actor = group(ModelGroup, _role("actor_train", 1), "actor")
    apart = group(ModelGroup, _role("reference", 2), "reference")
    scheduler = DeviceScheduler(engine, [actor, apart], [judge])
    for model in (actor, apart):
        scheduler.load(model)
    scheduler.transfer(actor)
    scheduler.sample()
    scheduler.compute(apart, "weights")
    scheduler.compute(actor, "weights")
    assert said == [
        "judge sleep 1", "actor load None", "reference load None",
        "actor offload gradients optimizer", "actor offload weights", "judge wake cache weights",
        "judge sleep 1", "actor onload weights",
    ]  # fmt: skip
