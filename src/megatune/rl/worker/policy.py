"""The model that is trained: log-probabilities, updates, its weights as a stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial

from torch import Tensor

from megatune.bridge.export import export_weights
from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.engine.layers.adapter import without_adapters
from megatune.engine.step import token_log_probs
from megatune.families import FAMILIES
from megatune.launch.context import RankContext
from megatune.objectives.policy.objective import PolicyObjective
from megatune.rl.samples import Rollouts
from megatune.rl.worker.model import Compute, Ready
from megatune.rl.worker.rows import Answer
from megatune.rl.worker.training import TrainedWorker


class PolicyWorker(TrainedWorker):
    """One rank of actor_train. See `ModelWorker`."""

    def __init__(self, settings: RLSettings, role: ModelRole, context: RankContext) -> None:
        super().__init__(settings, role, context)
        objective = self.objective(1)
        self.token_extras, self.document_extras = objective.token_extras, objective.document_extras

    def load(self, checkpoint: str | None = None) -> Ready:
        super().load(checkpoint)
        return self._ready(len(self.weight_shapes()))

    def objective(self, num_samples: int) -> PolicyObjective:
        role = self.role
        return PolicyObjective(
            self.rl.algorithm,
            self.rl.sampling_temperature,
            role.pg_variant,
            role.topr_positive_weight,
            role.topr_negative_weight,
            norm_length=self.rl.rollout.max_sequence_length - 1,
            samples=num_samples,
            ratio=(role.pg_ratio_low, role.pg_ratio_high),
        )

    def log_probs(self, rollouts: Rollouts, temperature: float | None = None) -> Answer:
        """Compute log-probabilities of the responses' tokens, of the weights as they are.

        Args:
            temperature: that logits are divided by; None for that of sampling.
        """
        return self._forward("log-probs", rollouts, self._at(temperature))

    def reference_log_probs(self, rollouts: Rollouts, temperature: float | None = None) -> Answer:
        """Compute those of the model without its adapters: the reference of a run that trains adapters."""
        assert self.settings.finetuning.finetuning_type == "lora", "without adapters a reference is a model of its own"
        with without_adapters(self.loaded.model):
            return self._forward("reference log-probs", rollouts, self._at(temperature))

    def _at(self, temperature: float | None) -> Compute:
        asked = self.rl.sampling_temperature if temperature is None else temperature
        return partial(token_log_probs, temperature=asked)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of what `weights` gives."""
        architecture = self.loaded.architecture
        weights = FAMILIES[architecture.model_type].weight_map(architecture)
        return self.loaded.form.all_shapes(weights, architecture)

    def weights(self, ranks: Collection[int] = (0,)) -> Iterator[dict[str, Tensor]]:
        """Stream the weights: whole tensors by their Hugging Face names, adapters merged into them, on the device.

        Every rank iterates to the end. Those in `ranks` get buckets of at most model_update_buffer_size_mb, or of one
        tensor where that is larger; for others the stream is empty.
        """
        self._need("weights")
        tensors = export_weights(self.loaded, ranks, self.settings.finetuning)
        for number, bucket in enumerate(in_buckets(tensors, self.rl.run.model_update_buffer_size_mb * 2**20), 1):
            self.context.beat(f"weights, bucket {number}", self.step)
            yield bucket


def in_buckets(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Gather tensors, in their order, into buckets of at most so many bytes, or of one tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
