"""Models that are not trained: the reference, and teachers."""

from __future__ import annotations

from megatune.bridge.assemble import load_model
from megatune.engine.groups import build
from megatune.rl.worker.model import ModelWorker, Ready, offload_of


class ReferenceWorker(ModelWorker):
    """One rank of a role with strategy "megatron" that only runs forward. See `ModelWorker`."""

    def load(self, checkpoint: str | None = None) -> Ready:
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        source, self.settings = self._source()
        place = build(self.settings.parallel, seed=self.settings.run.seed, timeout=self.settings.run.ddp_timeout)
        self.loaded = load_model(source, self.settings, place, trained=False)
        self._offload = offload_of(self.loaded)
        return self._ready()
