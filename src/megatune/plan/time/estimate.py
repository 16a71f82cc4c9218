"""Seconds of a step, by part of the slowest pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

from megatune.config.settings import Settings, with_settings
from megatune.plan.case import Case
from megatune.plan.flops import model_flops
from megatune.plan.machine import Calibration
from megatune.plan.memory.parameters import StageParameters, StateConfig, elements_of
from megatune.plan.memory.tensors import ChunkContent, LayerContent, whole_model
from megatune.plan.operators.decoder import Recompute, embedding, head, mtp_inputs, recompute_of
from megatune.plan.operators.shapes import Shapes, layer_shapes, shapes_of, without_experts
from megatune.plan.operators.vision import Images, images_of
from megatune.plan.schedule import ChunkSeconds, bubble_seconds, exchange_seconds
from megatune.plan.time.communication import (
    Exchange,
    Groups,
    Reduction,
    encoder_gradients,
    end_exchange,
    exposed_seconds,
    group_of,
    groups_of,
    layer_exchange,
    reduction,
    send,
    vision_exchange,
)
from megatune.plan.time.efficiency import (
    Rates,
    Seconds,
    layer_seconds,
    optimizer_seconds,
    seconds_of,
    vision_seconds,
)
from megatune.plan.uncertainty import time_uncertainty


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on the slowest pipeline stage; communication counts if it is not overlapped.

    Attributes:
        compute: forward and backward passes; in preference training also passes without gradients, with communication.
        recompute: recomputation in the backward passes.
        tensor_parallel, context_parallel, expert_parallel: communication in a layer.
        host: waiting for the host, if it takes longer to launch a pass than the device to compute it.
        pipeline: waiting for the other stages, and communication with them.
        data_parallel: reducing gradients and gathering weights.
        optimizer: the update, and all passes over gradients.
        overhead: work of the host between steps.
        tokens: of a step; with padding if the lengths of rows are unknown.
        model_flops: FLOP of a step, see `megatune.plan.flops.train_flops`.
        num_gpus: devices of the run.
        peak_flops: FLOP/s of one device in the model's dtype.
        forward: seconds of a pass without gradients over the rows of a step.
        chunks: seconds of a micro-batch, by stage and virtual stage.
        uncertainty: relative, 0.25 for ±25 %; see `plan.uncertainty`.
    """

    compute: float
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    host: float
    pipeline: float
    data_parallel: float
    optimizer: float
    overhead: float
    tokens: int
    model_flops: float
    num_gpus: int
    peak_flops: float
    forward: float
    chunks: tuple[tuple[ChunkSeconds, ...], ...]
    uncertainty: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(_parts_of(self))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole run."""
        return self.tokens / self.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_second / self.num_gpus

    @property
    def model_tflops(self) -> float:
        """Model TFLOP/s of one device."""
        return self.model_flops / self.total / self.num_gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilization (arXiv:2204.02311): the share of the peak."""
        return self.model_tflops * 1e12 / self.peak_flops


_OTHERS = ("tokens", "model_flops", "num_gpus", "peak_flops", "forward", "chunks", "uncertainty")
TIME_PARTS = tuple(field.name for field in fields(StepTime) if field.name not in _OTHERS)
_parts_of = attrgetter(*TIME_PARTS)

# Between steps the host reads rows, fetches the loss and the norm (which synchronizes the device), and logs.
_OVERHEAD = 0.02
# A call of a collective (torch.distributed, autograd, NCCL) takes the host as long as so many operators.
_OF_A_CALL = 5


class _Parts(NamedTuple):
    """Seconds of one micro-batch in one chunk by part; host_* are those to launch the passes."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    exchange_forward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    def plus(self, other: _Parts, times: int = 1) -> _Parts:
        # Written out for speed: every plan adds up thousands of these.
        return _Parts(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.recompute + times * other.recompute,
            self.tensor + times * other.tensor,
            self.context + times * other.context,
            self.expert + times * other.expert,
            self.exchange_forward + times * other.exchange_forward,
            self.host_forward + times * other.host_forward,
            self.host_backward + times * other.host_backward,
        )


class _Chunk:
    """Seconds of one micro-batch in one chunk.

    Attributes:
        time: the longer of the device's computation with communication, and the host's launches; summed in `total`.
        waiting: seconds of `total` in which the device is idle.
    """

    def __init__(self, parts: _Parts) -> None:
        self.parts, forward = parts, parts.forward + parts.exchange_forward
        device = parts.forward + parts.backward + parts.recompute + parts.tensor + parts.context + parts.expert
        backward = device - forward
        self.time = ChunkSeconds(max(forward, parts.host_forward), max(backward, parts.host_backward))
        self.total = self.time.total
        self.waiting = self.total - (forward + backward)


class _Stage:
    """The chunks of a stage, and the seconds of a micro-batch in all of them."""

    def __init__(self, chunks: list[_Chunk]) -> None:
        self.chunks, self.times = chunks, tuple([chunk.time for chunk in chunks])
        self.total = sum([chunk.total for chunk in chunks])
        self.forward = sum([forward for forward, _ in self.times])
        self.backward = sum([backward for _, backward in self.times])


def step_time(case: Case, fixed: FixedTime | None = None) -> StepTime:
    """Return the time of a step.

    Args:
        fixed: of the same case with any recomputation.

    Raises:
        MegatuneError: the device's generation is unknown, or it has no rate for the model's dtype.
    """
    case, fixed = case.with_mean_rows, fixed or FixedTime(case)
    settings, contents, images, recompute = case.settings, fixed.contents, images_of(case), recompute_of(case.settings)
    rank = fixed.rank(images)
    kinds = dict.fromkeys(contents)
    of_each = {each: rank.chunk(each, recompute) for each in {each for chunks in kinds for each in chunks}}
    stages = {chunks: _Stage([of_each[each] for each in chunks]) for chunks in kinds}
    slowest = max(stages.values(), key=attrgetter("total"))
    total, waiting = _Parts(), 0.0
    for chunk in slowest.chunks:
        total, waiting = total.plus(chunk.parts), waiting + chunk.waiting
    count, calibration = case.num_micro_batches, case.machine.calibration
    # Communication between stages that is not overlapped.
    pp, virtual, overlap = len(contents), len(contents[0]), settings.parallel.overlap_p2p_comm
    hops = exchange_seconds(pp, virtual, count, overlap, fixed.hop, count * (slowest.forward + slowest.backward))
    totals, forwards = ([getattr(stages[chunks], part) for chunks in contents] for part in ("total", "forward"))
    without_gradients = count * max(forwards) + bubble_seconds(forwards, virtual)
    return StepTime(
        compute=count * (total.forward + total.backward) + num_forward_passes(settings) * without_gradients,
        recompute=count * total.recompute,
        tensor_parallel=count * total.tensor + calibration.communication * encoder_gradients(case, rank.groups, images),
        context_parallel=count * total.context,
        expert_parallel=count * total.expert,
        host=count * waiting,
        pipeline=bubble_seconds(totals, virtual) + hops,
        data_parallel=calibration.communication
        * max(exposed_seconds(case, exchange, slowest.forward, slowest.backward) for exchange in fixed.reductions),
        optimizer=fixed.optimizer,
        overhead=_OVERHEAD,
        tokens=case.tokens,
        model_flops=fixed.model_flops,
        num_gpus=case.world_size,
        peak_flops=case.machine.device.flops[settings.precision.params_dtype],
        forward=without_gradients,
        chunks=tuple(stages[chunks].times for chunks in contents),
        uncertainty=time_uncertainty(case),
    )


class FixedTime:
    """The parts of a case's time that recomputation does not change, each computed on first access.

    Attributes:
        hop: seconds of a message to the next stage.
        reductions: of the stages that may have the most parameters.
    """

    def __init__(self, case: Case) -> None:
        self._case = case = case.with_mean_rows
        precision = case.settings.precision
        self.rates = Rates.of(
            case.machine, precision.params_dtype, fp8=precision.fp8 is not None, host=case.engine.host
        )
        self.shapes, self.calibration = shapes_of(case), case.machine.calibration
        self._ranks: dict[Images | None, RankTime] = {}

    @cached_property
    def contents(self) -> tuple[tuple[ChunkContent, ...], ...]:
        """The chunks by stage and virtual stage."""
        return StateConfig.of(self._case).contents

    def rank(self, images: Images | None) -> RankTime:
        """Return the time of one rank's passes; `images` may depend on recomputation."""
        if images not in self._ranks:
            groups = groups_of(self._case.machine, self.shapes)
            self._ranks[images] = rank_time(self.shapes, groups, self.rates, self.calibration, images)
        return self._ranks[images]

    @property
    def micro_batch(self) -> float:
        """Seconds of a micro-batch in all stages together, forward and backward, for any number of stages.

        The slowest of p stages takes at least 1 / p of it for each micro-batch.
        """
        settings = self._case.settings
        content = whole_model(self._case.model.architecture, settings.finetuning)
        return self.rank(images_of(self._case)).chunk(content, recompute_of(settings)).total

    @cached_property
    def hop(self) -> float:
        pp = len(self.contents)
        group = group_of(self._case.machine, pp, self._case.world_size // pp)
        return self.calibration.communication * send(group, self.shapes.hidden)

    @cached_property
    def _ends(self) -> list[StageParameters]:
        pp, rules = len(self.contents), StateConfig.of(self._case)
        return [elements_of(rules, stage) for stage in sorted({0, pp // 2, pp - 1})]

    @cached_property
    def reductions(self) -> list[Reduction]:
        return [reduction(self._case, elements) for elements in self._ends]

    @cached_property
    def optimizer(self) -> float:
        seconds = (optimizer_seconds(self._case, self.rates, elements) for elements in self._ends)
        return self.calibration.compute * max(seconds)

    @cached_property
    def model_flops(self) -> float:
        return model_flops(self._case)


class RankTime:
    """Seconds of one rank's passes over a micro-batch in layers and ends, for any number of stages."""

    def __init__(
        self, shapes: Shapes, groups: Groups, rates: Rates, calibration: Calibration, images: Images | None
    ) -> None:
        self.shapes, self.groups, self.rates, self.calibration, self.images = shapes, groups, rates, calibration, images
        self._parts: dict[tuple[LayerContent, tuple[str, ...], float], _Parts] = {}
        self._chunks: dict[tuple[ChunkContent, Recompute], _Chunk] = {}

    def chunk(self, content: ChunkContent, recompute: Recompute) -> _Chunk:
        """Return the seconds of a chunk, from a cache."""
        if (found := self._chunks.get((content, recompute))) is None:
            self._chunks[content, recompute] = found = _Chunk(self._sum(content, recompute))
        return found

    def _sum(self, content: ChunkContent, recompute: Recompute) -> _Parts:
        """Return the seconds of a chunk's layers, word embedding and output layer."""
        parts = _Parts()
        layers = len(content.layers)
        # An approximation: the same share of each kind of layer is recomputed.
        again = min(recompute.num_layers, layers) / layers if layers else 0.0
        for layer, count in content.counts:
            key = layer, recompute.modules, again
            if key not in self._parts:
                self._parts[key] = self._layer(*key)
            parts = parts.plus(self._parts[key], count)
        if content.embedding:
            parts = parts.plus(self._begin)
        if content.has_mtp:
            parts = parts.plus(self._mtp).plus(self._end)
        return parts.plus(self._end) if content.loss else parts

    @cached_property
    def _mtp(self) -> _Parts:
        """The inputs of an MTP layer."""
        computed = seconds_of(self.rates, mtp_inputs(without_experts(self.shapes)))
        return self._once(computed, end_exchange(self.shapes, self.groups.tensor, False))

    @cached_property
    def _end(self) -> _Parts:
        computed = seconds_of(self.rates, head(without_experts(self.shapes)))
        return self._once(computed, end_exchange(self.shapes, self.groups.tensor, True))

    @cached_property
    def _begin(self) -> _Parts:
        """The word embedding, with the vision encoder if there is one."""
        if self.images is None:
            computed = seconds_of(self.rates, [embedding(without_experts(self.shapes))])
            return self._once(computed, end_exchange(self.shapes, self.groups.tensor, False))
        computed = vision_seconds(self.shapes, self.rates, self.images)
        parts = self._once(computed, vision_exchange(self.shapes, self.groups, self.images))
        if not self.images.recomputed:
            return parts
        again, host = computed.recompute["vision"], self._launching(computed.recompute_launches["vision"])
        return parts._replace(recompute=self.calibration.compute * again, host_backward=parts.host_backward + host)

    def _launching(self, launches: float) -> float:
        """Return the seconds of the host to launch this many operators."""
        return self.calibration.compute * self.rates.efficiency.launch * launches

    def _once(self, computed: Seconds, exchanged: tuple[float, float]) -> _Parts:
        """Return the seconds of operators that are not recomputed."""
        compute, communication = self.calibration.compute, self.calibration.communication
        return _Parts(
            forward=compute * computed.forward,
            backward=compute * computed.backward,
            tensor=communication * sum(exchanged),
            exchange_forward=communication * exchanged[0],
            host_forward=self._launching(computed.launches[0]),
            host_backward=self._launching(computed.launches[1]),
        )

    def _layer(self, layer: LayerContent, modules: tuple[str, ...], again: float) -> _Parts:
        """Return the seconds of one layer with recomputed modules; `again` is the share of layers in the chunk that is
        recomputed whole."""
        shapes = layer_shapes(self.shapes, layer.kind, layer.gradient == "weights")
        seconds = layer_seconds(shapes, self.rates, layer.kind.sparse)
        exchange = layer_exchange(shapes, self.groups, seconds, layer.kind.sparse)
        computing, exchanging = module_seconds(modules, seconds, exchange, layer.kind.sparse)
        relaunched = again * seconds.launches[0]
        relaunched += (1 - again) * sum(seconds.recompute_launches.get(module, 0) for module in modules)
        called = exchange.calls[1] + again * exchange.calls[0]
        if layer.gradient == "none":
            seconds, again, computing, exchanging = seconds._replace(backward=0.0), 0.0, 0.0, 0.0
            tensor, context, expert, calls = exchange
            exchange = Exchange((tensor[0], 0.0), (context[0], 0.0), (expert[0], 0.0), (calls[0], 0))
            relaunched, called = -seconds.launches[1], 0
        compute, communication = self.calibration.compute, self.calibration.communication
        return _Parts(
            forward=compute * seconds.forward,
            backward=compute * seconds.backward,
            recompute=compute * (again * seconds.forward + (1 - again) * computing)
            + communication * (1 - again) * exchanging,
            tensor=communication * (sum(exchange.tensor) + again * exchange.tensor[0]),
            context=communication * (sum(exchange.context) + again * exchange.context[0]),
            expert=communication * (sum(exchange.expert) + again * exchange.expert[0]),
            exchange_forward=communication * exchange.forward,
            host_forward=self._launching(seconds.launches[0] + _OF_A_CALL * exchange.calls[0]),
            host_backward=self._launching(seconds.launches[1] + relaunched + _OF_A_CALL * called),
        )


rank_time = lru_cache(maxsize=8192)(RankTime)  # layouts with different numbers of stages share it


def module_seconds(modules: tuple[str, ...], seconds: Seconds, exchange: Exchange, sparse: bool) -> tuple[float, float]:
    """Return the seconds of recomputation and of repeated communication in one layer with these modules."""
    computing = exchanging = 0.0
    for module in modules:
        computing += seconds.recompute.get(module, 0.0)
        if module == "moe" and sparse:
            computing += sum(
                seconds.recompute.get(part, 0.0) for part in ("shared_experts", "moe_act") if part not in modules
            )
            exchanging += exchange.expert[0]
        if module == "mlp" and not sparse:
            exchanging += exchange.tensor[0] / 2
    return computing, exchanging


def num_forward_passes(settings: Settings) -> int:
    """Count forward passes in each step: for KTO's mismatched answers, and for the reference with streamed rows."""
    if settings.run.stage == "kto":
        return num_reference_passes(settings) - 1
    if settings.run.stage != "dpo":
        return 0
    return int(settings.preference.has_reference and settings.data.streaming)


def num_reference_passes(settings: Settings) -> int:
    """Count the reference's passes over all rows before the first step; KTO has a second one for mismatched answers."""
    if settings.run.stage == "kto":
        return 2 if settings.preference.kto_loss == "kto" else 1
    return int(settings.run.stage == "dpo" and settings.preference.has_reference and not settings.data.streaming)


class Answers(NamedTuple):
    """The time to generate answers during training.

    Attributes:
        seconds: each time, with the most tokens per answer, for prompts as long as the rows.
        every: steps in between, a share of all steps if below 1; None if answers are generated after each epoch.
    """

    seconds: float
    every: float | None


def answers(case: Case) -> Answers | None:
    """Return the time of `training.answers`, with a forward pass over whole rows for every token; None without answers.

    The prompts are distributed over the data-parallel ranks, and each pass has as many micro-batches as stages.
    """
    settings, evaluation = case.settings, case.settings.evaluation
    if not settings.generates:
        return None
    stages, size = settings.parallel.pipeline_model_parallel_size, settings.batch.per_device_eval_batch_size
    passes = -(-evaluation.eval_generate_samples // (size * stages * case.dp_size))
    batch = {"batch.per_device_train_batch_size": size, "batch.gradient_accumulation_steps": stages}
    of_pass = with_settings(settings, {**batch, "run.stage": "sft", "data.packing": False})
    once = step_time(replace(case, settings=of_pass)).forward
    every: float | None = evaluation.eval_generate_steps
    if every is None and evaluation.eval_strategy == "steps":
        every = settings.eval_interval
    return Answers(evaluation.eval_generate_tokens * passes * once, every)
