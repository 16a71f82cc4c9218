"""A reference or a teacher computed by Transformers (hf_infer): a whole model on each rank, each with its samples."""

from __future__ import annotations

from typing import Any

import torch

from megatune.bridge.assemble import open_checkpoint
from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.engine import device
from megatune.families import load_architecture
from megatune.hub.models import open_model
from megatune.launch.context import RankContext
from megatune.rl.samples import Rollouts
from megatune.rl.worker.batching import Sharing
from megatune.rl.worker.model import Ready
from megatune.rl.worker.rows import Answer
from megatune.verify.reference import load_reference_model


class TransformersWorker:
    """One rank of a role with strategy "hf". Ranks exchange nothing. See `ModelWorker`."""

    def __init__(self, context: RankContext, settings: RLSettings, role: ModelRole) -> None:
        self.rl, self.role, self.settings = settings, role, role.settings
        self.context = context

    def join(self) -> None:
        """Take this rank's device."""
        device.select(self.context.local_rank)

    def load(self, checkpoint: str | None = None) -> Ready:
        """Load the role's model.

        Raises:
            MegatuneError: INPUT: what cannot be used.
        """
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        model = self.settings.model
        assert model.model_name_or_path is not None
        folder = open_model(model.model_name_or_path, model.model_revision, model.cache_dir).fetch()
        open_checkpoint(folder, load_architecture(folder))  # every key is there, and none too many
        dtype = getattr(torch, self.settings.precision.params_dtype)
        self._model: Any = load_reference_model(folder, dtype).to(device.current())
        return Ready(self.context.world_size)

    def offload(self, *parts: str) -> int:
        """Move the model to the host's memory; returns the bytes of the device that are free now."""
        before = device.memory_bytes()
        self._model.to("cpu")
        torch.cuda.empty_cache()
        return max(0, before - device.memory_bytes())

    def onload(self, *parts: str) -> int:
        """Move the model back to the device."""
        before = device.memory_bytes()
        self._model.to(device.current())
        return max(0, device.memory_bytes() - before)

    def leave(self) -> None:
        """Nothing is to be taken down."""

    @torch.no_grad()
    def log_probs(self, rollouts: Rollouts, temperature: float | None = None) -> Answer:
        """Compute log-probabilities of the responses' tokens.

        Args:
            temperature: that logits are divided by; None for that of sampling.
        """
        temperature = self.rl.sampling_temperature if temperature is None else temperature
        shares = Sharing(self.context.world_size, self.role.infer_batch_size).shares(rollouts.lengths)
        mine, found = shares[self.context.rank], Answer()
        for number, samples in enumerate(mine, 1):
            self.context.beat(f"log-probs, micro-batch {number} of {len(mine)}", 0)
            if samples:
                found |= self._of_rows(rollouts, samples, temperature)
        return found

    def _of_rows(self, rollouts: Rollouts, samples: list[int], temperature: float) -> Answer:
        lengths = rollouts.lengths
        input_ids = torch.zeros(len(samples), max(lengths[sample] for sample in samples), dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, sample in enumerate(samples):
            input_ids[row, : lengths[sample]] = torch.tensor(rollouts.tokens[sample])
            mask[row, : lengths[sample]] = 1
        where = device.current()
        logits = self._model(input_ids=input_ids.to(where), attention_mask=mask.to(where), use_cache=False).logits
        found: Answer = {}
        for row, sample in enumerate(samples):
            places = torch.from_numpy(rollouts.sampled(sample))
            own = logits[row, (places - 1).to(where)].float() / temperature
            labels = input_ids[row, places].to(where)
            found[sample] = -torch.nn.functional.cross_entropy(own, labels, reduction="none").cpu().numpy()
        return found
