"""The trainer's weights in the rollout engines, and a check whether they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pipeline.learn import Learner, routing_of, sampled_by
from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup
from megatune.rl.rollout.mismatch import Mismatch
from megatune.rl.samples import Problem, Request, Response, Rollouts
from megatune.rl.transport import Parcel, Route, break_off, choose_route, merged

_PROBE_TOKENS = 16


class Weights:
    """Carries weights from actor_train to the engines."""

    def __init__(
        self, settings: RLSettings, scheduler: DeviceScheduler, policy: ModelGroup, engines: EngineGroup
    ) -> None:
        self._settings, self._scheduler, self._policy, self._engines = settings, scheduler, policy, engines
        self._route: Route | None = None
        self._connected = -1  # the group's number of changes when the route was chosen
        engines.on_loss = self._break_off

    @property
    def engines_forget(self) -> bool:
        """Whether engines lose their weights while others use their devices."""
        return self._engines.sleep_level > 1 and self._scheduler.meets_engines(self._policy)

    def resume(self) -> None:
        """Let the engines sample on, with the weights that they have."""
        self._scheduler.sample()

    def sync(self, version: int) -> dict[str, float]:
        """Give the engines the weights as they are now; nothing is in flight. The engines hold the devices then. Return
        metrics."""
        self._scheduler.transfer(self._policy)
        parcels = self._sent(version)
        self._scheduler.sample()
        nbytes, tensors = (sum(each.tensor_bytes for each in parcels), sum(len(each.contents) for each in parcels))
        return {"sync_bytes": float(nbytes), "sync_tensors": float(tensors)}

    def connect(self) -> Route:
        """Choose how weights travel, and let the trainer and the engines that are there meet."""
        role, trainer, engines = self._engines.role, self._policy.group, self._engines.group
        assert self._policy.ready is not None
        workers = role.devices_per_engine if role.engine == "vllm" else 1
        receivers = [
            device
            for first in range(0, len(role.devices), role.devices_per_engine)
            for device in role.devices[first : first + workers]
        ]
        route = choose_route(
            self._policy.role.devices, receivers, self._settings.run.num_gpus_per_node,
            on_gpus=self._policy.ready.on_gpu, seconds=self._settings.run.rpc_timeout,
        )  # fmt: skip
        here = tuple(place for place in route.listeners if place // workers in engines.ranks)
        route = self._route = trainer.call("open_route", replace(route, listeners=here))[0]
        if self._connected != engines.changes:  # since `here` was known
            self._break_off()
        joining = trainer.start("join_route")
        firsts = [(route, number * workers) for number in range(self._engines.number)]
        trainer.run(engines.start_each("connect", firsts))
        joining.result()
        return route

    def _break_off(self) -> None:
        """Let nobody wait for an engine that was lost in a meeting, or in a broadcast."""
        if self._route is not None:
            break_off(self._route)
            self._route = None

    def _sent(self, version: int) -> list[Parcel]:
        """Send all buckets, and have the engines use them as a version. Where an engine is lost in a broadcast, which
        breaks off then, the others meet anew and get all buckets from the first.

        Raises:
            MegatuneError: see `group.Pending.result`; nothing was committed then. UNAVAILABLE, where a broadcast breaks
                off though all engines are there.
        """
        engines = self._engines.group
        while True:
            if self._route is None or self._connected != engines.changes:
                self._connected = engines.changes
                self._route = self.connect()
            sent, is_whole = self._streamed(version, self._route)
            freed = self._policy.group.start("free_weights")
            if is_whole:
                engines.call("commit_update", version)
            freed.result()
            if is_whole:
                return sent
            if self._connected == engines.changes:
                why = "the connection of the trainer and the engines broke, and none of them was lost"
                finding = Finding("weights did not reach the rollout engines", "actor_infer", why, "see the network")
                raise MegatuneError(finding, ExitCode.UNAVAILABLE)

    def _streamed(self, version: int, route: Route) -> tuple[list[Parcel], bool]:
        """Send buckets: while the engines take one, the next is packed. Return them, and whether all came; the trainer
        gathers the rest in any case, which its ranks do together."""
        trainer, engines = self._policy.group, self._engines.group
        assert self._policy.ready is not None
        taking = [engines.start("begin_update", version, self._policy.ready.num_tensors)]
        # Ranks that send nothing take part in what the others gather.
        others = [trainer.start_one(rank, "drain_weights") for rank in range(trainer.size) if rank not in route.senders]
        packing = [trainer.start_one(rank, "pack_weights", True) for rank in route.senders]
        sent: list[Parcel] = []
        is_whole = True
        while (parcel := merged([each.result()[0] for each in packing])) is not None:
            while taking:
                is_whole &= False not in taking.pop().result()
            sent.append(parcel)
            if is_whole:
                taking.append(engines.start("update", parcel))
                if route.listeners:
                    taking.append(trainer.start_one(route.senders[0], "broadcast_weights"))
            packing = [trainer.start_one(rank, "pack_weights", False) for rank in route.senders]
        for each in (*taking, *others):
            is_whole &= False not in each.result()
        return sent, is_whole

    def probe(self, problems: Sequence[Problem], version: int, learner: Learner) -> Mismatch | None:
        """Let each engine sample a few tokens, and compare them with the trainer. For engines that share no device
        with it, as whatever else is trained on is of earlier weights, too.

        Raises:
            MegatuneError: NOT_FINITE, as `rollout.mismatch.check_mismatch`.
        """
        prompts = [problems[(version + place) % len(problems)].prompt_ids for place in range(self._engines.number)]
        requests = [self._request(place, version, prompt) for place, prompt in enumerate(prompts)]
        responses = self._engines.run(self._sampled(requests))
        tokens = [np.concatenate([prompt, own.response_ids]) for prompt, own in zip(prompts, responses, strict=True)]
        lengths = [len(prompt) for prompt in prompts]
        ours = learner.log_probs(Rollouts(tokens, lengths, routing=routing_of(responses)))
        return learner.checked(ours, [sampled_by(response, version) for response in responses], version)

    async def _sampled(self, requests: Sequence[Request]) -> list[Response]:
        """Sample a request by each engine, of which none has anything to do."""
        found = await asyncio.gather(*(self._engines.generate([request]) for request in requests))
        return [own[0] for own in found]

    def _request(self, place: int, version: int, prompt: np.ndarray) -> Request:
        generating = self._settings.actor_infer.generating_args
        most = min(_PROBE_TOKENS, self._settings.rollout.max_response_length)
        return Request(f"probe-{version}-{place}-0", prompt, version, most, generating.temperature)
