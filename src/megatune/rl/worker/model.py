"""What every role with a model of our engine does on a rank: join the others, compute forward, move between device and
host; and the roles that do no more than that: the reference, teachers and reward models."""

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
from megatune.rl.worker.batching import Answer, Sharing, answer, batches
from megatune.training.agreement import model_on_node

# Micro-batches, for each stage of the pipeline, between two heartbeats of a pass that only runs forward.
_GROUP = 8
# Of micro-batches: fp32 [b, s] each; none before the last pipeline stage.
Compute: TypeAlias = Callable[[list[Chunk], Sequence[Batch]], Sequence[Tensor]]
_PADDING = 0  # any token: padding trains nothing, and nobody attends to it


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says once it is loaded; the same on all ranks of the role.

    Attributes:
        data_parallel_size: ranks that get different samples.
        num_tensors: that `weights` gives; 0 where it gives none.
        on_gpu: whether its device is a GPU.
    """

    data_parallel_size: int
    num_tensors: int = 0
    on_gpu: bool = False


class ModelWorker(ABC):
    """One rank of a role. Its methods are called on all ranks of the role, with the same arguments, in one order.

    Args:
        role: one of the settings' roles.
        context: which rank this is, and where the ranks meet; gets a beat for each micro-batch, update or bucket.
    """

    loaded: LoadedModel
    _offload: Offload

    def __init__(self, context: RankContext, settings: RLSettings, role: ModelRole) -> None:
        self.rl, self.role, self.settings = settings, role, role.settings
        self.context = context
        self.step = 0  # steps done

    def join(self) -> None:
        """Meet the other ranks of the role.

        Raises:
            MegatuneError: UNAVAILABLE, naming address and ranks.
        """
        context, timeout = self.context, self.settings.run.ddp_timeout
        context.beat("join", 0, limit=timeout)
        ranks = context.rank, context.world_size, context.local_rank
        try:
            groups.join(*ranks, context.master_addr, context.master_port, timeout=timeout)
        except MegatuneError as error:
            fix = "start again: another port is chosen each time; on several machines see whether they reach each other"
            raise MegatuneError([replace(each, fix=fix) for each in error.findings], error.exit_code) from error

    @abstractmethod
    def load(self, checkpoint: str | None = None) -> Ready:
        """Build the layout and load the role's model.

        Args:
            checkpoint: of a role that is trained: what the run resumes from.

        Raises:
            MegatuneError: INPUT, SETTINGS: what cannot be used.
        """

    def log_probs(self, rollouts: Rollouts, phase: str = "log-probs") -> Answer:
        """Compute log-probabilities of the responses' tokens, of the weights as they are, at the temperature of
        sampling.

        Args:
            phase: that the heartbeats have.
        """
        return self._forward(phase, rollouts, partial(token_log_probs, temperature=self.rl.sampling_temperature))

    def values(self, rollouts: Rollouts) -> Answer:
        """Compute the score, of a model that has one, of the state before each token of the responses: where its
        log-probability is computed."""
        return self._forward("values", rollouts, logits)

    def offload(self, *parts: Part) -> int:
        """Move parts of the model to the host's memory, and free the device's.

        Args:
            parts: of "weights", "gradients", "optimizer"; none stands for all. Gradients are not kept: every update
                begins with new ones.

        Returns:
            Bytes of the device that are free now.
        """
        self.context.beat("offload", self.step)
        return self._offload.move_out(parts or PARTS)

    def onload(self, *parts: Part) -> int:
        """Move parts back to the device, bit for bit; what is there already stays. Returns bytes moved.

        What computes log-probabilities or values, and `weights`, need the weights; `train` and `save` need all.
        """
        self.context.beat("onload", self.step)
        return self._offload.move_in(parts or PARTS)

    def _source(self, resumed: Path | None = None) -> tuple[Path, Settings]:
        """Find the model's own folder, and settings with what its adapters say of them. Collective."""
        source = model_on_node(self.context, self.settings, None, resumed)
        finetuning = resolve_finetuning(self.settings.finetuning, load_architecture(source, self.settings.run.stage))
        return source, self.settings.model_copy(update={"finetuning": finetuning})

    def _ready(self, num_tensors: int = 0) -> Ready:
        return Ready(self.loaded.coords.dp_size, num_tensors, device.current().type == "cuda")

    def _need(self, *parts: Part) -> None:
        missing = [part for part in parts if part in self._offload.offloaded]
        assert not missing, f"{self.role.name}: {', '.join(missing)} on the host: onload first"

    def _sharing(self, *, training: bool) -> Sharing:
        """How ranks share samples. Micro-batches that are bounded by tokens are packed, whichever of the two settings
        asks for it: side by side samples take the tokens that they have, and no padding."""
        role, parallel = self.role, self.settings.parallel
        if training:
            num_rows = self.settings.batch.per_device_train_batch_size
            tokens, fewest = role.packed_tokens_train or role.dynamic_tokens_train, role.min_micro_batches_train
        else:
            num_rows, fewest = role.infer_batch_size, role.min_micro_batches_forward
            tokens = role.packed_tokens_forward or role.dynamic_tokens_forward
        return Sharing(
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
        shares: Sequence[Sequence[Sequence[int]]],
        sharing: Sharing,
        per_token: Sequence[str] = (),
        per_sample: Sequence[str] = (),
    ) -> list[Batch]:
        """Make this rank's micro-batches."""
        parallel, coords = self.settings.parallel, self.loaded.coords
        multiples = parallel.sequence_multiple, parallel.document_multiple
        vision = next((each.vision for each in rollouts.shown if each is not None), None)
        collator = Collator(sharing.rows, sharing.packed_tokens is not None, *multiples, _PADDING, vision)
        same_length = coords.pp_size > 1
        decodes = MediaShard(coords.cp_rank * coords.tp_size + coords.tp_rank, coords.cp_size * coords.tp_size)
        found = batches(
            rollouts,
            shares,
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

    def _forward(self, phase: str, rollouts: Rollouts, compute: Compute) -> Answer:
        """Compute a number of each token, of the weights as they are."""
        self._need("weights")
        coords, sharing, found = self.loaded.coords, self._sharing(training=False), Answer()
        shares = sharing.shares(rollouts.lengths)
        mine, batches = shares[coords.dp_rank], self._batches(rollouts, shares, sharing)
        size = _GROUP * coords.pp_size
        with eval_mode(self.loaded.model):
            for first in range(0, len(batches), size):
                self.context.beat(f"{phase}, micro-batch {first + 1} of {len(batches)}", self.step)
                part = slice(first, first + size)
                # Tensor- and context-parallel ranks hold the same values.
                values = compute(self.loaded.model, batches[part])
                if coords.tp_rank == coords.cp_rank == 0:
                    for samples, batch, own in zip(mine[part], batches[part], values, strict=False):
                        found |= answer(rollouts, samples, batch, own)
        return found


def offload_of(loaded: LoadedModel) -> Offload:
    """Return what moves a model, with its optimizer if it has one."""
    return Offload(loaded.model, loaded.optimizer if isinstance(loaded, Assembly) else None)


class ReferenceWorker(ModelWorker):
    """One rank of a role with strategy "megatron" that only runs forward. See `ModelWorker`."""

    def load(self, checkpoint: str | None = None) -> Ready:
        self.context.beat("load", 0, limit=self.settings.run.ddp_timeout)
        source, self.settings = self._source()
        coords = build(self.settings.parallel, seed=self.settings.run.seed, timeout=self.settings.run.ddp_timeout)
        self.loaded = load_model(source, self.settings, coords, trained=False)
        self._offload = offload_of(self.loaded)
        return self._ready()
