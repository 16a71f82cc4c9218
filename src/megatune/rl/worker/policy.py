"""Worker of actor_train: log-probabilities, updates, and streaming its weights to the engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from megatune.bridge.export import export_weights
from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.data.batches import Batch
from megatune.engine import device, groups
from megatune.engine.layers.adapter import without_adapters
from megatune.engine.sequences import whole_rows
from megatune.engine.step import Objective
from megatune.families import FAMILIES
from megatune.launch.context import RankContext
from megatune.objectives.policy.objective import OLD, ROLLOUT, DivergenceObjective, PolicyObjective
from megatune.rl.broadcast import LostPeerError
from megatune.rl.samples import Rollouts
from megatune.rl.transport import PackedBucket, Route, Sender
from megatune.rl.worker.batching import SampleValues, response_values
from megatune.rl.worker.model import WorkerInfo
from megatune.rl.worker.training import TrainedWorker, TrainResult
from megatune.training.train_step import StepResult


class PolicyWorker(TrainedWorker):
    """One rank of actor_train. See `ModelWorker`."""

    _route: Route
    _sender: Sender | None
    _stream: Iterator[dict[str, Tensor]]
    _first: SampleValues  # log-probabilities from the first pass over each sample of the step

    def __init__(self, context: RankContext, settings: RLSettings, role: ModelRole) -> None:
        super().__init__(context, settings, role)
        objective = self.objective(1)
        self.token_extras, self.document_extras = objective.token_extras, objective.document_extras

    def load(self, checkpoint: str | None = None) -> WorkerInfo:
        super().load(checkpoint)
        return self._info(len(self.weight_shapes()))

    def objective(self, num_samples: int) -> PolicyObjective | DivergenceObjective:
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
            first=[] if self._keeps_first else None,
        )

    @property
    def _keeps_first(self) -> bool:
        """Whether the ratios of later epochs are relative to the first pass over a sample."""
        return self.rl.algorithm.ppo_epochs > 1 and not self.rl.algorithm.enable_old_logprobs_recompute

    def train(self, rollouts: Rollouts, step: int) -> TrainResult:
        self._first = {}
        return super().train(rollouts, step)

    def _update(self, rollouts: Rollouts, samples: Sequence[int], learning_rate: float, step: int) -> StepResult:
        # `_first` has no sample of a first-epoch update, and every trained sample of a later one.
        is_later = any(sample in self._first for sample in samples)
        self.token_extras = (*self.objective(1).token_extras, *(OLD,) * is_later)
        if is_later:
            old = [self._first.get(sample, values) for sample, values in enumerate(rollouts.per_token[ROLLOUT])]
            rollouts = replace(rollouts, per_token={**rollouts.per_token, OLD: old})
        return super()._update(rollouts, samples, learning_rate, step)

    def _after_update(
        self, rollouts: Rollouts, mine: Sequence[Sequence[int]], batches: Sequence[Batch], objective: Objective
    ) -> None:
        if not self._keeps_first:
            return
        assert isinstance(objective, PolicyObjective)
        assert objective.first is not None
        coords, found = self.loaded.coords, SampleValues()
        for samples, batch, (values, boundaries) in zip(mine, batches, objective.first, strict=False):
            found |= response_values(rollouts, samples, batch, whole_rows(values, boundaries))
        for each in groups.all_gather_object(found if coords.tp_rank == coords.cp_rank == 0 else SampleValues()):
            self._first |= each

    def reference_log_probs(self, rollouts: Rollouts) -> SampleValues:
        """Compute log-probabilities without the adapters: the reference of a run that trains adapters."""
        assert self.settings.finetuning.finetuning_type == "lora", "without adapters a reference is a model of its own"
        with without_adapters(self.loaded.model):
            return self.log_probs(rollouts, "reference log-probs")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors of `weights`."""
        if (adapter := self.rl.actor_infer.adapter) is not None:
            return adapter.shapes
        architecture = self.loaded.architecture
        weights = FAMILIES[architecture.model_type].weight_map(architecture)
        return self.loaded.form.all_shapes(weights, architecture)

    def open_route(self, route: Route) -> Route:
        """Prepare to send weights, if this rank does; the first sender opens the store of the rendezvous."""
        rank = self.context.rank
        self._sender = Sender(route, device.current(), rank) if rank in route.senders else None
        if self._sender is not None and rank == route.senders[0]:
            route = self._sender.open(self.context.master_addr)
        self._route = route
        return route

    def join_route(self) -> None:
        """Connect with the listeners."""
        if self._sender is not None:
            self._sender.join()

    def pack_weights(self, first: bool) -> PackedBucket | None:
        """Pack the next bucket of the stream, or the first of a new stream; return None at its end."""
        assert self._sender is not None
        if first:
            self._stream = self.weights(self._route.senders)
        bucket = next(self._stream, None)
        return None if bucket is None else self._sender.pack(bucket)

    def drain_weights(self) -> None:
        """Take part in the collective gathering of a stream of which this rank sends nothing."""
        for _ in self.weights(self._route.senders):
            raise AssertionError("buckets for a rank that sends none")

    def broadcast_weights(self) -> bool:
        """Broadcast the last bucket to the listeners; return whether all are still connected."""
        assert self._sender is not None
        try:
            self._sender.broadcast()
        except LostPeerError:
            return False
        return True

    def free_weights(self) -> None:
        """Free the buffers of the buckets."""
        if self._sender is not None:
            self._sender.free()

    def weights(self, ranks: Collection[int] = (0,)) -> Iterator[dict[str, Tensor]]:
        """Stream the weights as whole tensors on the device under their Hugging Face names, with adapters merged; for
        engines that support adapters, stream only the adapter.

        Every rank iterates to the end. Those in `ranks` get buckets of at most model_update_buffer_size_mb, or of a
        single larger tensor; for others the stream is empty.
        """
        self._need("weights")
        alone = self.rl.actor_infer.adapter is not None
        tensors = export_weights(self.loaded, ranks, self.settings.finetuning, adapters_alone=alone)
        for number, bucket in enumerate(in_buckets(tensors, self.rl.run.model_update_buffer_size_mb * 2**20), 1):
            self.context.beat(f"weights, bucket {number}", self.step)
            yield bucket


def in_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors, in order, into buckets of at most `max_bytes` bytes, or of a single larger tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
