"""Seconds of a step: the slowest pipeline stage's, by part."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatune.plan.case import Case
from megatune.plan.memory.parameters import stage_parameters
from megatune.plan.memory.tensors import ChunkContent, stage_chunks
from megatune.plan.time.communication import group_of, send
from megatune.plan.time.compute import Seconds, embedding_seconds, layer_seconds, loss_seconds
from megatune.plan.time.exchange import (
    Exchange,
    Groups,
    embedding_exchange,
    groups_of,
    layer_exchange,
    loss_exchange,
)
from megatune.plan.time.model_flops import model_flops
from megatune.plan.time.optimizer import exposed_seconds, optimizer_seconds, reduction
from megatune.plan.time.pipeline import ChunkTime, bubble_seconds, exchange_seconds, slowest_stage
from megatune.plan.time.recompute import module_seconds, recomputed_layers
from megatune.plan.time.uncertainty import uncertainty
from megatune.plan.time.vision import vision_seconds
from megatune.plan.time.work import Work, work_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, as the slowest pipeline stage spends them; exchanges as far as nothing hides them.

    Attributes:
        compute: forward and backward passes.
        recompute: what the backward passes compute again.
        tensor_parallel, context_parallel, expert_parallel: what the ranks of a layer exchange.
        pipeline: waiting for the other stages, and exchanges with them.
        data_parallel: summing gradients and collecting weights.
        optimizer: the update, and all passes over gradients.
        overhead: what the host does between steps.
        tokens: of a step, padding included.
        model_flops: of a step, FLOP; see `megatune.plan.flops.train_flops`.
        num_gpus: devices of the run.
        peak_flops: of one device, FLOP/s, in the dtype of the model.
        chunks: seconds of a micro-batch, by stage and virtual stage.
        uncertainty: relative: 0.25 is ± 25 %; see `plan.time.uncertainty`.
    """

    compute: float
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline: float
    data_parallel: float
    optimizer: float
    overhead: float
    tokens: int
    model_flops: float
    num_gpus: int
    peak_flops: float
    chunks: tuple[tuple[ChunkTime, ...], ...]
    uncertainty: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, part) for part in TIME_PARTS)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run."""
        return self.tokens / self.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one device."""
        return self.tokens_per_second / self.num_gpus

    @property
    def model_tflops(self) -> float:
        """Model floating-point operations of one device in a second, in 1e12."""
        return self.model_flops / self.total / self.num_gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilization (arXiv:2204.02311): share of the peak."""
        return self.model_tflops * 1e12 / self.peak_flops


_OTHERS = ("tokens", "model_flops", "num_gpus", "peak_flops", "chunks", "uncertainty")
TIME_PARTS = tuple(field.name for field in fields(StepTime) if field.name not in _OTHERS)

# Between steps the host reads rows, asks for the loss and the norm (which waits for the device), and logs.
_OVERHEAD = 0.02


class _Parts(NamedTuple):
    """Seconds of one micro-batch in one chunk."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    exchange_forward: float = 0.0

    @property
    def time(self) -> ChunkTime:
        forward = self.forward + self.exchange_forward
        total = self.forward + self.backward + self.recompute + self.tensor + self.context + self.expert
        return ChunkTime(forward, total - forward)

    def plus(self, other: _Parts, times: int = 1) -> _Parts:
        # Written out: every plan adds up thousands of these.
        return _Parts(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.recompute + times * other.recompute,
            self.tensor + times * other.tensor,
            self.context + times * other.context,
            self.expert + times * other.expert,
            self.exchange_forward + times * other.exchange_forward,
        )


def step_time(case: Case) -> StepTime:
    """Time of a step.

    Raises:
        MegatuneError: nothing is known of the device's generation, or it has no rate for the model's dtype.
    """
    work, groups = work_of(case), groups_of(case)
    contents = stage_chunks(case.settings.parallel, case.model.architecture)
    chunks = {content: _chunk(case, work, groups, content) for content in set(itertools.chain(*contents))}
    seconds = {content: chunk.time for content, chunk in chunks.items()}
    times = tuple(tuple(seconds[content] for content in stage) for stage in contents)
    slowest = slowest_stage(times)
    total = _Parts()
    for content in contents[slowest]:
        total = total.plus(chunks[content])
    count, calibration = case.num_micro_batches, case.machine.calibration
    forward = sum(chunk.forward for chunk in times[slowest])
    backward = sum(chunk.backward for chunk in times[slowest])
    settings = case.settings
    # Of the stages that may hold most parameters.
    ends = [stage_parameters(case, stage) for stage in sorted({0, len(times) // 2, len(times) - 1})]
    return StepTime(
        compute=count * (total.forward + total.backward),
        recompute=count * total.recompute,
        tensor_parallel=count * total.tensor,
        context_parallel=count * total.context,
        expert_parallel=count * total.expert,
        pipeline=bubble_seconds(times) + _hops(case, work, len(times[0]), count * (forward + backward)),
        data_parallel=calibration.communication
        * max(exposed_seconds(case, reduction(case, elements), forward, backward) for elements in ends),
        optimizer=calibration.compute * max(optimizer_seconds(case, work, elements) for elements in ends),
        overhead=_OVERHEAD,
        tokens=case.global_batch_size * case.sequence_length,
        model_flops=model_flops(case),
        num_gpus=case.world_size,
        peak_flops=case.machine.device.flops[settings.precision.params_dtype],
        chunks=times,
        uncertainty=uncertainty(case),
    )


def micro_batch_seconds(case: Case) -> float:
    """Of one micro-batch in all stages together, forward and backward; however many stages there are.

    The slowest of p stages has 1 / p of it or more, and a step the slowest one's of all micro-batches.
    """
    architecture = case.model.architecture
    layers = tuple(map(architecture.is_moe_layer, range(architecture.num_layers)))
    whole = ChunkContent(embedding=True, layers=layers, loss=True)
    return _chunk(case, work_of(case), groups_of(case), whole).time.total


def _chunk(case: Case, work: Work, groups: Groups, content: ChunkContent) -> _Parts:
    """All layers of a chunk, with the word embedding and the output layer where it has them."""
    parts = _Parts()
    layers, num_sparse = len(content.layers), sum(content.layers)
    # Layers of both kinds are recomputed in proportion: which of them come first matters to few settings.
    again = recomputed_layers(case.settings, layers) / layers if layers else 0.0
    for count, sparse in ((layers - num_sparse, False), (num_sparse, True)):
        if count:
            parts = parts.plus(_layer(case, work, groups, sparse, again), count)
    sequence_parallel = case.settings.parallel.sequence_parallel
    if content.embedding:
        exchanged = embedding_exchange(work, groups.tensor, sequence_parallel)
        parts = parts.plus(_unrepeated(case, embedding_seconds(work), exchanged))
        if images := vision_seconds(case, work):
            parts = parts.plus(_unrepeated(case, images, (0.0, 0.0)))
    if content.loss:
        parts = parts.plus(_unrepeated(case, loss_seconds(work), loss_exchange(work, groups.tensor)))
    return parts


def _unrepeated(case: Case, computed: Seconds, exchanged: tuple[float, float]) -> _Parts:
    """What is not recomputed."""
    calibration = case.machine.calibration
    return _Parts(
        forward=calibration.compute * computed.forward,
        backward=calibration.compute * computed.backward,
        tensor=calibration.communication * sum(exchanged),
        exchange_forward=calibration.communication * exchanged[0],
    )


def _layer(case: Case, work: Work, groups: Groups, sparse: bool, again: float) -> _Parts:
    """One layer, of which `again` is recomputed whole (the mean over layers of a chunk)."""
    seconds = layer_seconds(work, sparse)
    exchange = layer_exchange(case, work, groups, seconds, sparse)
    modules = case.settings.recompute.selective_modules
    computing, exchanging = module_seconds(modules, seconds, exchange, sparse)
    whole = exchange if again else Exchange()
    calibration = case.machine.calibration
    compute, communication = calibration.compute, calibration.communication
    return _Parts(
        forward=compute * seconds.forward,
        backward=compute * seconds.backward,
        recompute=compute * (again * seconds.forward + computing) + communication * exchanging,
        tensor=communication * (sum(exchange.tensor) + again * whole.tensor[0]),
        context=communication * (sum(exchange.context) + again * whole.context[0]),
        expert=communication * (sum(exchange.expert) + again * whole.expert[0]),
        exchange_forward=communication * exchange.forward,
    )


def _hops(case: Case, work: Work, virtual: int, busy: float) -> float:
    """Exchanges between stages that nothing hides."""
    parallel = case.settings.parallel
    stages = parallel.pipeline_model_parallel_size
    group = group_of(case, stages, case.world_size // stages)
    hop = send(group, work.outer_tokens * work.architecture.hidden_size * work.itemsize)
    hop *= case.machine.calibration.communication
    return exchange_seconds(stages, virtual, case.num_micro_batches, parallel.overlap_p2p_comm, hop, busy)
