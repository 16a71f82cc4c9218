"""Models that are not trained: the reference, and teachers."""

from __future__ import annotations

from functools import partial

from megatune.bridge.assemble import load_model
from megatune.engine.groups import build
from megatune.engine.step import token_log_probs
from megatune.rl.samples import Rollouts
from megatune.rl.worker.model import ModelWorker, Ready, offload_of
from megatune.rl.worker.rows import Answer


class ReferenceWorker(ModelWorker):
    """One rank of a role with strategy "megatron" that only runs forward. See `ModelWorker`."""

    def load(self, checkpoint: str | None = None) -> Ready:
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        source, self.settings = self._source()
        place = build(self.settings.parallel, seed=self.settings.run.seed, timeout=self.settings.run.ddp_timeout)
        self.loaded = load_model(source, self.settings, place, trained=False)
        self._offload = offload_of(self.loaded)
        return self._ready()

    def log_probs(self, rollouts: Rollouts, temperature: float | None = None) -> Answer:
        """Compute log-probabilities of the responses' tokens.

        Args:
            temperature: that logits are divided by; None for that of sampling.
        """
        temperature = self.rl.sampling_temperature if temperature is None else temperature
        return self._forward("log-probs", rollouts, partial(token_log_probs, temperature=temperature))
