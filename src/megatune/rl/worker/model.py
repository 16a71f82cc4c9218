"""Base worker of roles whose model runs in megatune's engine: rendezvous, forward passes, offloading; and the worker of
roles that are not trained: the reference, teachers and reward models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from megatune.bridge.assemble import Assembly, LoadedModel, load_model
from megatune.config.derived import resolve_finetuning
from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.config.settings import Settings
from megatune.data.bad_rows import MOST_NAMED
from megatune.data.batches import Batch, Collator, MediaShard
from megatune.engine import device, groups
from megatune.engine.groups import build
from megatune.engine.model import Chunk
from megatune.engine.offload import PARTS, Offload, Part
from megatune.engine.step import eval_mode, logits, token_log_probs
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.launch.context import RankContext
from megatune.rl.samples import Rollouts
from megatune.rl.worker.batching import BatchLayout, SampleValues, batches, response_values
from megatune.training.agreement import model_on_node

_BEAT_INTERVAL = 8  # micro-batches per pipeline stage between two heartbeats of a forward-only pass
# Computes fp32 [b, s] of each micro-batch; returns nothing before the last pipeline stage.
Compute: TypeAlias = Callable[[list[Chunk], Sequence[Batch]], Sequence[Tensor]]
_PADDING = 0  # any token will do: padding is neither trained nor attended to


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts about a loaded worker; the same on all ranks of the role.

    Attributes:
        data_parallel_size: number of ranks with different samples.
        num_tensors: number of tensors of `weights`, 0 without that method.
        on_gpu: whether its device is a GPU.
    """

    data_parallel_size: int
    num_tensors: int = 0
    on_gpu: bool = False


class ModelWorker(ABC):
    """One rank of a role. Methods are called on all ranks of the role, with the same arguments, in the same order.

    Args:
        context: rank and rendezvous address; gets a heartbeat for each group of micro-batches, update or bucket.
        role: one of the settings' roles.
    """

    loaded: LoadedModel
    _offload: Offload

    def __init__(self, context: RankContext, settings: RLSettings, role: ModelRole) -> None:
        self.rl, self.role, self.settings = settings, role, role.settings
        self.context = context
        self.step = 0  # completed steps

    def join(self) -> None:
        """Initialize torch.distributed with the other ranks of the role.

        Raises:
            MegatuneError: UNAVAILABLE, naming address and ranks.
        """
        context, timeout = self.context, self.settings.run.ddp_timeout
        context.beat("join", 0, limit=timeout)
        ranks = context.rank, context.world_size, context.local_rank
        try:
            groups.join(*ranks, context.master_addr, context.master_port, timeout=timeout)
        except MegatuneError as error:
            fix = "start again (another port is chosen each time); on several machines, check that they can connect"
            raise MegatuneError([replace(each, fix=fix) for each in error.findings], error.exit_code) from error

    @abstractmethod
    def load(self, checkpoint: str | None = None) -> WorkerInfo:
        """Build the layout and load the role's model.

        Args:
            checkpoint: the checkpoint to resume from, for a trained role.

        Raises:
            MegatuneError: INPUT, SETTINGS: the model, checkpoint or settings cannot be used.
        """

    def log_probs(self, rollouts: Rollouts, phase: str = "log-probs") -> SampleValues:
        """Compute log-probabilities of the responses' tokens with the current weights, at the sampling temperature.

        Args:
            phase: name of the phase in heartbeats.
        """
        return self._forward(phase, rollouts, partial(token_log_probs, temperature=self.rl.sampling_temperature))

    def values(self, rollouts: Rollouts) -> SampleValues:
        """Compute the score of the state before each response token, where its log-probability is computed, too. The
        model needs a score head."""
        return self._forward("values", rollouts, logits)

    def offload(self, *parts: Part) -> int:
        """Move parts of the model to host memory, and free device memory.

        Args:
            parts: of "weights", "gradients", "optimizer"; none means all. Gradients are dropped, since every update
                begins with new ones.

        Returns:
            Number of bytes freed on the device.
        """
        self.context.beat("offload", self.step)
        return self._offload.move_out(parts or PARTS)

    def onload(self, *parts: Part) -> int:
        """Move parts back to the device unchanged, unless they are there already. Return the number of bytes moved.

        Forward passes and `weights` need the weights; `train` and `save` need all parts.
        """
        self.context.beat("onload", self.step)
        return self._offload.move_in(parts or PARTS)

    def _source(self, resumed: Path | None = None) -> tuple[Path, Settings]:
        """Find the model's folder, and complete the settings from its adapters. Collective."""
        source = model_on_node(self.context, self.settings, None, resumed)
        finetuning = resolve_finetuning(self.settings.finetuning, load_architecture(source, self.settings.run.stage))
        return source, self.settings.model_copy(update={"finetuning": finetuning})

    def _info(self, num_tensors: int = 0) -> WorkerInfo:
        return WorkerInfo(self.loaded.coords.dp_size, num_tensors, device.current().type == "cuda")

    def _need(self, *parts: Part) -> None:
        missing = [part for part in parts if part in self._offload.offloaded]
        assert not missing, f"{self.role.name}: {', '.join(missing)} on the host: onload first"

    def _batch_layout(self, *, training: bool) -> BatchLayout:
        """Return how samples are assigned to ranks. Both settings that bound the tokens of micro-batches, packing and
        dynamic batching, pack samples, which needs no padding."""
        role, parallel = self.role, self.settings.parallel
        if training:
            num_rows = self.settings.batch.per_device_train_batch_size
            tokens, fewest = role.packed_tokens_train or role.dynamic_tokens_train, role.min_micro_batches_train
        else:
            num_rows, fewest = role.infer_batch_size, role.min_micro_batches_forward
            tokens = role.packed_tokens_forward or role.dynamic_tokens_forward
        return BatchLayout(
            self.loaded.coords.dp_size,
            num_rows,
            tokens,
            parallel.document_multiple,
            parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1,
            fewest,
        )

    def _batches(
        self,
        rollouts: Rollouts,
        by_rank: Sequence[Sequence[Sequence[int]]],
        layout: BatchLayout,
        per_token: Sequence[str] = (),
        per_sample: Sequence[str] = (),
    ) -> list[Batch]:
        """Build this rank's micro-batches."""
        parallel, coords = self.settings.parallel, self.loaded.coords
        multiples = parallel.sequence_multiple, parallel.document_multiple
        vision = next((each.vision for each in rollouts.images if each is not None), None)
        collator = Collator(layout.rows, layout.packed_tokens is not None, *multiples, _PADDING, vision)
        same_length = coords.pp_size > 1
        decodes = MediaShard(coords.cp_rank * coords.tp_size + coords.tp_rank, coords.cp_size * coords.tp_size)
        found = batches(
            rollouts,
            by_rank,
            coords.dp_rank,
            collator,
            same_length=same_length,
            per_token=per_token,
            per_sample=per_sample,
            replay=self.role.replays_routing,
            shard=None if coords.pp_rank else decodes,
        )
        if unreadable := [each for batch in found for each in batch.unreadable]:
            findings = [Finding(each.reason, each.where, each.detail) for each in unreadable[:MOST_NAMED]]
            raise MegatuneError(findings, ExitCode.DATA)
        return found

    def _forward(self, phase: str, rollouts: Rollouts, compute: Compute) -> SampleValues:
        """Compute a value for each token with the current weights."""
        self._need("weights")
        coords, layout, found = self.loaded.coords, self._batch_layout(training=False), SampleValues()
        by_rank = layout.assign(rollouts.lengths)
        mine, batches = by_rank[coords.dp_rank], self._batches(rollouts, by_rank, layout)
        size = _BEAT_INTERVAL * coords.pp_size
        with eval_mode(self.loaded.model):
            for first in range(0, len(batches), size):
                self.context.beat(f"{phase}, micro-batch {first + 1} of {len(batches)}", self.step)
                part = slice(first, first + size)
                # Tensor- and context-parallel ranks have the same values.
                values = compute(self.loaded.model, batches[part])
                if coords.tp_rank == coords.cp_rank == 0:
                    for samples, batch, own in zip(mine[part], batches[part], values, strict=False):
                        found |= response_values(rollouts, samples, batch, own)
        return found


def offload_of(loaded: LoadedModel) -> Offload:
    """Return the `Offload` of a model, and of its optimizer if it has one."""
    return Offload(loaded.model, loaded.optimizer if isinstance(loaded, Assembly) else None)


class ReferenceWorker(ModelWorker):
    """One rank of a role with strategy "megatron" that only runs forward. See `ModelWorker`."""

    def load(self, checkpoint: str | None = None) -> WorkerInfo:
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        source, self.settings = self._source()
        coords = build(self.settings.parallel, seed=self.settings.run.seed, timeout=self.settings.run.ddp_timeout)
        self.loaded = load_model(source, self.settings, coords, trained=False)
        self._offload = offload_of(self.loaded)
        return self._info()
