"""The trainer's weights in the rollout engines, and a look at whether they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.rl.cluster.weights import Sync, sync_weights
from megatune.rl.pipeline.learn import Learner, sampled_by
from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup
from megatune.rl.rollout.mismatch import Mismatch
from megatune.rl.samples import Problem, Request, Response, Rollouts

_PROBE_TOKENS = 16


class Weights:
    """Carries weights from actor_train to the engines."""

    def __init__(
        self, settings: RLSettings, scheduler: DeviceScheduler, policy: ModelGroup, engines: EngineGroup
    ) -> None:
        self._settings, self._scheduler, self._policy, self._engines = settings, scheduler, policy, engines

    @property
    def engines_forget(self) -> bool:
        """Whether engines lose their weights while others use their devices."""
        return self._engines.sleep_level > 1 and self._scheduler.meets_engines(self._policy)

    def resume(self) -> None:
        """Let the engines sample on, with the weights that they have."""
        self._scheduler.sample()

    def sync(self, version: int) -> Sync:
        """Give the engines the weights as they are now; nothing is in flight. The engines hold the devices then."""
        assert self._policy.ready is not None
        self._scheduler.transfer(self._policy)
        found = sync_weights(
            self._policy.group, self._engines.group, version, num_tensors=self._policy.ready.num_tensors
        )
        self._scheduler.sample()
        return found

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
        ours = learner.log_probs(Rollouts(tokens, [len(prompt) for prompt in prompts]))
        return learner.checked(ours, [sampled_by(response, version) for response in responses], version)

    async def _sampled(self, requests: Sequence[Request]) -> list[Response]:
        """Sample a request by each engine, of which none has anything to do."""
        found = await asyncio.gather(*(self._engines.generate([request]) for request in requests))
        return [own[0] for own in found]

    def _request(self, place: int, version: int, prompt: np.ndarray) -> Request:
        generating = self._settings.actor_infer.generating_args
        most = min(_PROBE_TOKENS, self._settings.rollout.max_response_length)
        return Request(f"probe-{version}-{place}-0", prompt, version, most, generating.temperature)
