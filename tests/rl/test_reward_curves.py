"""The reward of the first twenty steps is the same in every layout: all of a step but Ray and the reward's processes.

Every rank samples the same responses by itself, and all train together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import CHARACTERS, make_model, problems, settings
from digits_reward import repeats
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Layout
from local_roles import LocalGroup
from worker_kit import started

from megatune.config.rl.settings import RLSettings
from megatune.engine import groups
from megatune.rl.cluster.timeline import PhaseTimer
from megatune.rl.pipeline.collector import Collector, ProblemOrder
from megatune.rl.pipeline.groups import Group, RequestBuilder
from megatune.rl.pipeline.learn import Learner
from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.rewards.answer import Answer
from megatune.rl.rollout.builtin import BuiltinEngine
from megatune.rl.rollout.server import EngineServer
from megatune.rl.samples import Sample
from megatune.rl.transport import Route, Sender
from megatune.rl.worker.policy import PolicyWorker

STEPS, LIMIT = 20, 280.0
ALL = {**EXPERT_LAYOUTS, **SEQUENCE_LAYOUTS, **LAYOUTS}


class Together(LocalGroup):
    """A role of which every rank has one worker, and all are called at once."""

    def call(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        found = getattr(self.objects[0], method)(*args)
        return groups.all_gather_object(found)


class Pool:
    """Scores samples at once."""

    async def score(self, sample: Sample) -> None:
        sample.score = repeats(Answer(sample.text, row=sample.problem.row)).score


def _text(ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[each] for each in ids).replace("#", "")


def curve(settings: RLSettings) -> list[float]:
    """On every rank: rewards by step."""
    rollout, run = settings.rollout, settings.run
    worker = started(PolicyWorker, settings)
    engine = BuiltinEngine(settings.actor_infer, max_running=128, context=64)
    server = EngineServer(worker.context, lambda: engine)
    policy = ModelGroup(settings.actor_train, Together(worker))  # type: ignore[arg-type]
    policy.info = worker._info()
    engines = EngineGroup(settings.actor_infer, LocalGroup(server), 128)  # type: ignore[arg-type]
    scheduler = DeviceScheduler(engines, [])
    stops = (CHARACTERS.index("#"),)
    sampling = RequestBuilder(
        settings.actor_infer.generating_args, run.seed, rollout.max_response_length, stop_token_ids=stops
    )
    order = ProblemOrder(problems(), run.seed)
    collector = Collector(
        Sampler(engines, Pool(), sampling, _text, None),  # type: ignore[arg-type]
        order.at, {"digits": rollout.rollout_batch_size}, {},
        rollout.num_return_sequences_in_group,
    )  # fmt: skip
    learner = Learner(settings, scheduler, {"actor_train": policy})
    rewards, sender = [], Sender(Route("file"), torch.device("cpu"))
    for step in range(STEPS):
        buckets = list(worker.weights(range(len(settings.actor_train.devices))))
        engine.begin_update(step + 1, sum(map(len, buckets)))
        for bucket in buckets:
            engine.update(sender.pack(bucket))
        engine.commit_update(step + 1)
        taken = engines.run(collector.take())
        rewards.append(_mean(taken.groups))
        learner.learn(taken.groups, step, PhaseTimer())
    return rewards


def _mean(taken: Sequence[Group]) -> float:
    return float(sum(group.scores.sum() for group in taken) / sum(group.size for group in taken))


def settings_in(layout: Layout, model: Path) -> RLSettings:
    found = settings(model, Path("unused"), steps=STEPS, devices=tuple(range(layout.world_size)))
    own, engine = layout.settings(), found.actor_train.settings
    names = ("parallel", "experts", "performance", "data")
    optimizer = engine.optimizer.model_copy(update={"learning_rate": 1e-2})
    batch = engine.batch.model_copy(
        update={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 10 // layout.dp_size}
    )
    changes = {name: getattr(own, name) for name in names} | {"optimizer": optimizer, "batch": batch}
    tokens = {"packed_tokens_train": 40, "packed_tokens_forward": 40} if layout.packed else {}
    actor = found.actor_train.model_copy(update={"settings": engine.model_copy(update=changes), **tokens})
    # On a device of its own, so that nothing takes scheduler.
    infer = found.actor_infer.model_copy(update={"device_mapping": [layout.world_size]})
    return replace(found, actor_train=actor, actor_infer=infer)


@pytest.fixture(scope="module")
def expected(pool, tmp_path_factory):
    """The model, and its curve on one rank."""
    made: dict[bool, tuple[Path, list[float]]] = {}

    def of(has_experts: bool) -> tuple[Path, list[float]]:
        if has_experts not in made:
            model = make_model(tmp_path_factory.mktemp("digits") / "model", num_layers=4, has_experts=has_experts)
            made[has_experts] = model, pool.run(1, curve, settings_in(ALL["1"], model), limit=LIMIT)[0]
        return made[has_experts]

    return of


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout", ["tp2 sp", "pp2", "pp2 vpp2", "dp2", "cp2 p2p", "packed", "pp2, packed", "ep2", "ep2, packed"]
)
def test_the_reward_of_the_first_steps_is_that_of_one_rank(pool, expected, layout):
    model, alone = expected("ep2" in layout)
    assert alone[-1] > 2 * alone[0], "it learns"
    for found in pool.run(ALL[layout].world_size, curve, settings_in(ALL[layout], model), limit=LIMIT):
        assert found == pytest.approx(alone, abs=5e-4)
