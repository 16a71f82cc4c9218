"""Transfers the trainer's weights to the rollout engines, and checks that they have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pipeline.learn import Learner, log_probs_of_version, routing_of
from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup
from megatune.rl.rollout.mismatch import Mismatch
from megatune.rl.samples import Problem, Request, Response, Rollouts
from megatune.rl.transport import PackedBucket, Route, choose_route, merge_buckets

_PROBE_TOKENS = 16


class Weights:
    """Transfers weights from actor_train to the engines."""

    def __init__(
        self, settings: RLSettings, scheduler: DeviceScheduler, policy: ModelGroup, engines: EngineGroup
    ) -> None:
        self._settings, self._scheduler, self._policy, self._engines = settings, scheduler, policy, engines
        self._route: Route | None = None
        self._connected = -1  # `RoleGroup.changes` when the route was chosen
        engines.on_loss = self._abort

    @property
    def engines_lose_weights(self) -> bool:
        """Whether engines lose their weights while they sleep."""
        return self._engines.sleep_level > 1 and self._scheduler.shares_devices(self._policy)

    def resume(self) -> None:
        """Let the engines continue to sample with their present weights."""
        self._scheduler.sample()

    def sync(self, version: int) -> dict[str, float]:
        """Send the current weights to the engines, while nothing is in flight, and return metrics. The engines have the
        devices afterwards."""
        self._scheduler.transfer(self._policy)
        buckets = self._send_all(version)
        self._scheduler.sample()
        nbytes, tensors = (sum(each.tensor_bytes for each in buckets), sum(len(each.contents) for each in buckets))
        return {"sync_bytes": float(nbytes), "sync_tensors": float(tensors)}

    def connect(self) -> Route:
        """Choose the route of the weights, and connect the trainer with the engines that are running."""
        role, trainer, engines = self._engines.role, self._policy.group, self._engines.group
        assert self._policy.info is not None
        workers = role.devices_per_engine if role.engine == "vllm" else 1
        receivers = [
            device
            for first in range(0, len(role.devices), role.devices_per_engine)
            for device in role.devices[first : first + workers]
        ]
        route = choose_route(
            self._policy.role.devices, receivers, self._settings.run.num_gpus_per_node,
            on_gpus=self._policy.info.on_gpu, seconds=self._settings.run.rpc_timeout,
        )  # fmt: skip
        here = tuple(place for place in route.listeners if place // workers in engines.ranks)
        route = self._route = trainer.call("open_route", replace(route, listeners=here))[0]
        if self._connected != engines.changes:  # an engine was lost since `here` was computed
            self._abort()
        joining = trainer.start("join_route")
        firsts = [(route, number * workers) for number in range(self._engines.number)]
        trainer.run(engines.start_each("connect", firsts))
        joining.result()
        return route

    def _abort(self) -> None:
        """End the rendezvous or the broadcast that waits for an engine that was lost."""
        if self._route is not None:
            self._route.abort()
            self._route = None

    def _send_all(self, version: int) -> list[PackedBucket]:
        """Send all buckets and commit them as a version. If an engine is lost during a broadcast, the broadcast is
        aborted, and the other engines reconnect and get all buckets again.

        Raises:
            MegatuneError: see `role.Pending.result`; nothing is committed then. UNAVAILABLE, if a broadcast breaks off
                although no engine was lost.
        """
        engines = self._engines.group
        while True:
            if self._route is None or self._connected != engines.changes:
                self._connected = engines.changes
                self._route = self.connect()
            sent, is_complete = self._stream(version, self._route)
            freed = self._policy.group.start("free_weights")
            if is_complete:
                engines.call("commit_update", version)
            freed.result()
            if is_complete:
                return sent
            if self._connected == engines.changes:
                why = "the connection between trainer and engines broke, and no engine was lost"
                fix = "check the network between the machines"
                finding = Finding("weights did not reach the rollout engines", "actor_infer", why, fix)
                raise MegatuneError(finding, ExitCode.UNAVAILABLE)

    def _stream(self, version: int, route: Route) -> tuple[list[PackedBucket], bool]:
        """Send buckets; the next one is packed while the engines read one. Return them, and whether all arrived; the
        trainer gathers the rest in any case, because gathering is collective."""
        trainer, engines = self._policy.group, self._engines.group
        assert self._policy.info is not None
        taking = [engines.start("begin_update", version, self._policy.info.num_tensors)]
        # Ranks that send nothing take part in the gathering.
        others = [trainer.start_one(rank, "drain_weights") for rank in range(trainer.size) if rank not in route.senders]
        packing = [trainer.start_one(rank, "pack_weights", True) for rank in route.senders]
        sent: list[PackedBucket] = []
        is_complete = True
        while (bucket := merge_buckets([each.result()[0] for each in packing])) is not None:
            while taking:
                is_complete &= False not in taking.pop().result()
            sent.append(bucket)
            if is_complete:
                taking.append(engines.start("update", bucket))
                if route.listeners:
                    taking.append(trainer.start_one(route.senders[0], "broadcast_weights"))
            packing = [trainer.start_one(rank, "pack_weights", False) for rank in route.senders]
        for each in (*taking, *others):
            is_complete &= False not in each.result()
        return sent, is_complete

    def probe(self, problems: Sequence[Problem], version: int, learner: Learner) -> Mismatch | None:
        """Let each engine sample a few tokens, and compare their log-probabilities with the trainer's. This is for
        asynchronous runs, whose training samples are partly from earlier weights.

        Raises:
            MegatuneError: NOT_FINITE, see `rollout.mismatch.check_mismatch`.
        """
        prompts = [problems[(version + number) % len(problems)].prompt_ids for number in range(self._engines.number)]
        requests = [self._request(number, version, prompt) for number, prompt in enumerate(prompts)]
        responses = self._engines.run(self._sample(requests))
        tokens = [np.concatenate([prompt, own.response_ids]) for prompt, own in zip(prompts, responses, strict=True)]
        lengths = [len(prompt) for prompt in prompts]
        ours = learner.log_probs(Rollouts(tokens, lengths, routing=routing_of(responses)))
        theirs = [log_probs_of_version(response, version) for response in responses]
        return learner.check_log_probs(ours, theirs, version)

    async def _sample(self, requests: Sequence[Request]) -> list[Response]:
        """Sample one request with each engine; all engines are idle."""
        found = await asyncio.gather(*(self._engines.generate([request]) for request in requests))
        return [own[0] for own in found]

    def _request(self, number: int, version: int, prompt: np.ndarray) -> Request:
        max_tokens, temperature = self._settings.rollout.max_response_length, self._settings.sampling_temperature
        return Request(f"probe-{version}-{number}-0", prompt, version, min(_PROBE_TOKENS, max_tokens), temperature)
