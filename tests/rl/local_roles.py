"""Roles of a run whose engines are in this process, and whose workers are there or on ranks of the pool: all of a run
but Ray."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from digits import problems
from torch import distributed

from megatune.config.rl.settings import InferRole, RLSettings
from megatune.engine import groups
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.pipeline.roles import EngineGroup, ModelGroup
from megatune.rl.pipeline.run import _read_all_problems as read
from megatune.rl.pipeline.run import drive
from megatune.rl.pipeline.startup import Roles, with_folders
from megatune.rl.problems import Problems
from megatune.rl.rewards.answer import Answer
from megatune.rl.rewards.judge_client import judge_context
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.rewards.task import RewardSpec, cached_reward, score_answer
from megatune.rl.rollout.server import EngineServer, engine_server
from megatune.rl.worker import model as models
from megatune.rl.worker import training
from megatune.rl.worker.distillation import DistillationWorker
from megatune.rl.worker.model import ReferenceWorker
from megatune.rl.worker.policy import PolicyWorker
from megatune.rl.worker.training import ValueWorker
from megatune.training.callbacks.plot import LossPlot


class LocalGroup:
    """`RoleGroup`, of objects; servers among them run in threads. Ranks of the pool have met already."""

    def __init__(self, *objects: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.objects, self.size, self.ranks, self.changes = objects, len(objects), range(len(objects)), 0
        self.loop = loop or asyncio.new_event_loop()
        self.run = self.loop.run_until_complete

    def call(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        return [None if method == "join" else self._called(each, method, *args) for each in self.objects]

    def start(self, method: str, *args: Any) -> Any:
        return SimpleNamespace(result=lambda: self.call(method, *args))

    def start_one(self, rank: int, method: str, *args: Any) -> Any:
        if isinstance(self.objects[rank], EngineServer):
            return self._asked(rank, method, *args)
        found = [getattr(self.objects[rank], method)(*args)]
        return SimpleNamespace(result=lambda: found)

    async def _asked(self, rank: int, method: str, *args: Any) -> list[Any]:
        return [await asyncio.wrap_future(self.objects[rank].ask(method, *args))]

    async def start_each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [(await self._asked(rank, method, *own))[0] for rank, own in enumerate(arguments)]

    def _called(self, each: Any, method: str, *args: Any) -> Any:
        return each.ask(method, *args).result() if isinstance(each, EngineServer) else getattr(each, method)(*args)


class RankGroup(LocalGroup):
    """The workers of a role on all ranks, of which the first one calls; the others `serve`."""

    def __init__(self, worker: Any, channel: Any) -> None:
        super().__init__(worker)
        self.name, self.channel, self.size = worker.role.name, channel, channel.size()
        self.ranks = range(self.size)

    def call(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        return self.start(method, *args).result()

    def start(self, method: str, *args: Any) -> Any:
        others = [self.start_one(rank, method, *args) for rank in range(1, self.size) if method != "join"]
        own = partial(super().call, method, *args)
        return SimpleNamespace(result=cache(lambda: [*own(), *(each for other in others for each in other.result())]))

    def start_one(self, rank: int, method: str, *args: Any) -> Any:
        if not rank:
            return super().start_one(0, method, *args)
        distributed.send_object_list([(self.name, method, args)], rank, self.channel)

        def answer() -> list[Any]:
            distributed.recv_object_list(found := [None], rank, self.channel)
            return found

        return SimpleNamespace(result=answer)


def serve(workers: Mapping[str, Any], channel: Any) -> int:
    """Answer what the first rank calls, until it calls nothing more."""
    while True:
        distributed.recv_object_list(asked := [None], 0, channel)
        if asked[0] is None:
            return 0
        name, method, args = asked[0]
        distributed.send_object_list(LocalGroup(workers[name]).call(method, *args), 0, channel)


async def score_here(job: RewardSpec, answers: Sequence[Answer], limit: float) -> list[dict[str, Any]]:
    """Score in this process, without a limit."""
    return [score_answer(cached_reward(job), answer) for answer in answers]


def _built_once(*args: Any, **options: Any) -> groups.RankCoordinates:
    """Build the groups of the first model; those of the others, in processes of their own in a run, are the same."""
    return groups.coordinates() if groups.parallel_state.is_initialized() else groups.build(*args, **options)


def run(settings: RLSettings, model: Path) -> int:
    """On one rank of the pool: run on the digits to the end."""
    validation = None if settings.validation is None else Problems(problems())
    return _run(settings, model, Problems(problems()), validation)


def run_a_step(settings: RLSettings, model: Path) -> tuple[int, str]:
    """The same, and somebody asks to stop at once; what is printed is returned, too."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = _run(settings, model, Problems(problems()), None, lambda: True)
    return code, said.getvalue()


def run_file(settings: RLSettings) -> int:
    """On ranks of the pool: run what a file says, with the rows and the models that it names."""
    settings, source = with_folders(settings)
    return _run(settings, source, *read(settings, source))


def _run(
    settings: RLSettings,
    model: Path,
    trained: Problems,
    validation: Problems | None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> int:
    training.build = models.build = _built_once
    run_dir, rollout = Path(settings.run.output_dir) / "launch", settings.rollout

    channel, rank = distributed.new_group(), distributed.get_rank()
    context = RankContext(RankEnv(rank, rank, channel.size(), channel.size(), "127.0.0.1", 1, 0), run_dir)
    policy = PolicyWorker if settings.actor_train.teacher is None else DistillationWorker
    kinds = {"actor_train": policy, "critic": ValueWorker}
    workers = {
        role.name: kinds.get(role.name, ReferenceWorker)(context, settings, role)  # type: ignore[abstract]
        for role in settings.models
    }
    if rank:
        return serve(workers, channel)
    models_of = {name: ModelGroup(worker.role, RankGroup(worker, channel)) for name, worker in workers.items()}
    loop = asyncio.new_event_loop()

    def engines(role: InferRole, max_running: int, context: int) -> EngineGroup:
        own = [RankContext(RankEnv(rank, 0, 1, 1, "127.0.0.1", 1, 0), run_dir) for rank in range(role.num_engines)]
        made = [engine_server(each, role, 0, max_running, context) for each in own]
        level = settings.sleep_level if role is settings.actor_infer else 1
        return EngineGroup(role, LocalGroup(*made, loop=loop), max_running, level)  # type: ignore[arg-type]

    longest = max(rollout.sequence_length, rollout.val_sequence_length or 0)
    roles = Roles(
        engines(settings.actor_infer, rollout.max_running_requests, longest),
        {
            role.name: engines(role, role.infer_batch_size, judge_context(rollout, role))
            for role in settings.samplers[1:]
        },
        models_of,
    )
    # Drawing takes longer than all steps of most runs; test_rl_command.py has it drawn.
    with contextlib.closing(loop), mock.patch.object(LossPlot, "on_train_end"):
        pool = RewardPool(settings.rewards, score_here)
        code = drive(settings, model, trained, validation, roles, pool, stop_requested)
    for other in range(1, channel.size()):
        distributed.send_object_list([None], other, channel)
    return code
