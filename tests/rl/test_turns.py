"""Whose turn it is on devices that roles share: what is asked of them, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatune.config.rl.settings import InferRole, ModelRole
from megatune.config.settings import Settings
from megatune.rl.pipeline.roles import EngineGroup, ModelGroup, Turns


class Calls:
    """`RoleGroup` of actors that do whatever they are asked."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def call(self, method: str, *args: Any) -> list[Any]:
        self.said.append(" ".join([self.name, method, *map(str, args)]))
        return [None]

    def start(self, method: str, *args: Any) -> Any:
        return SimpleNamespace(result=lambda: self.call(method, *args))


def test_an_engine_has_its_cache_once_the_trainer_has_left() -> None:
    said: list[str] = []
    engines = EngineGroup(InferRole((0,), "model", sleep_level=2), Calls("engine", said))  # type: ignore[arg-type]
    actor = ModelGroup(ModelRole("actor_train", (0,), Settings(), training=True), Calls("actor", said))  # type: ignore[arg-type]
    turns = Turns(engines, [actor])
    turns.load(actor)
    turns.transfer(actor)
    turns.sample()
    turns.compute(actor, "weights")
    assert said == [
        "engine sleep 2", "actor load None", "actor offload gradients optimizer", "engine wake weights",
        "actor offload weights", "engine wake cache", "engine sleep 2", "actor onload weights",
    ]  # fmt: skip
