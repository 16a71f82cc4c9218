"""A judge on a trainer's device: it sleeps while the trainer computes, and has nothing to do by then."""

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


def test_a_judge_sleeps_while_a_trainer_has_its_device() -> None:
    said: list[str] = []

    def group(kind: Any, role: Any, name: str) -> Any:
        return kind(role, Calls(name, said))

    engine = group(EngineGroup, InferRole((0,), "model"), "engine")
    judge = group(EngineGroup, InferRole((1,), "judge", name="reward_model"), "judge")
    actor = group(ModelGroup, ModelRole("actor_train", (1,), Settings(), training=True), "actor")
    apart = group(ModelGroup, ModelRole("reference", (2,), Settings()), "reference")
    turns = Turns(engine, [actor, apart], [judge])
    assert turns.judges_take_turns
    for model in (actor, apart):
        turns.load(model)
    turns.transfer(actor)
    turns.sample()
    turns.compute(apart, "weights")
    turns.compute(actor, "weights")
    assert said == [
        "judge sleep 1", "actor load None", "reference load None",
        "actor offload gradients optimizer", "actor offload weights", "judge wake",
        "judge sleep 1", "actor onload weights",
    ]  # fmt: skip
