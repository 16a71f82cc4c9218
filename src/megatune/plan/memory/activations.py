"""Activations of a stage at the fullest moment of a step: what passes keep, what they add, how many are under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from megatune.config.settings import Settings
from megatune.plan.case import Case
from megatune.plan.memory.layer import decoder_layer
from megatune.plan.memory.linear import norm
from megatune.plan.memory.loss import head, vocabulary_rows
from megatune.plan.memory.operators import Operator, chain, recomputed, repeat
from megatune.plan.memory.shapes import Shapes, shapes_of
from megatune.plan.memory.tensors import ChunkContent, stage_chunks
from megatune.plan.memory.vision import vision_tower
from megatune.plan.routing import expert_imbalance
from megatune.plan.schedule import in_flight

T = TypeVar("T")

_ALL_LAYERS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """Bytes of the fullest rank of a stage; see `plan.memory.estimate.StageMemory`."""

    activations: int
    logits_and_loss: int
    expert_imbalance: int


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Where a stage stands in the pipeline."""

    pp: int
    stage: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class _Recompute:
    """Full recomputation: of all layers in groups of `count`, or ("block") of the first `count` of each chunk."""

    uniform: bool
    count: int


def activation_bytes(case: Case, stage: int) -> StageActivations:
    """As `stage_activations`, of one stage."""
    return stage_activations(case, (stage,))[0].parts


def stage_activations(case: Case, stages: Iterable[int]) -> list[ActivationBytes]:
    """Activations of each of these stages at its fullest moment.

    That is, with 1F1B, when so many micro-batches are held as the schedule ever holds, and one of them is at the
    fullest moment of its forward or backward pass. Every token is taken to be trained, and every row to be as long as
    the longest.

    Returns:
        In `parts` `logits_and_loss` is what the output layer and the loss add to the stage's fullest moment,
        `expert_imbalance` what the fullest expert rank has beyond an even share; `activations` is all the rest. Times
        the machine's calibrated factor.
    """
    architecture, parallel = case.model.architecture, case.settings.parallel
    contents, recompute = stage_chunks(parallel, architecture), _recompute(case.settings)
    even, uneven = shapes_of(case), None
    if architecture.moe is not None and parallel.expert_model_parallel_size > 1:
        uneven = replace(even, imbalance=expert_imbalance(case.settings, architecture.moe))
    found = []
    for stage in stages:
        schedule = _Schedule(parallel.pipeline_model_parallel_size, stage, case.num_micro_batches)
        vision = vision_tower(case) if case.image_tokens and stage == 0 else None
        rest = (contents[stage], schedule, recompute, vision)
        found.append(ActivationBytes(case.machine.calibration.activations, even, uneven, rest))
    return found


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Of a stage at its fullest moment, before and after the machine's calibrated factor."""

    factor: float
    even: Shapes
    uneven: Shapes | None
    rest: tuple[tuple[ChunkContent, ...], _Schedule, _Recompute | None, Operator | None]

    @property
    def total(self) -> int:
        return round(sum(_stage(self.uneven or self.even, *self.rest)) * self.factor)

    @property
    def parts(self) -> StageActivations:
        """They add up to `total`."""
        bare, loss = _stage(self.even, *self.rest)
        activations, both = round(bare * self.factor), round((bare + loss) * self.factor)
        return StageActivations(
            activations=activations, logits_and_loss=both - activations, expert_imbalance=self.total - both
        )


def _recompute(settings: Settings) -> _Recompute | None:
    recompute = settings.recompute
    if recompute.recompute_granularity != "full":
        return None
    uniform = recompute.recompute_method != "block"
    return _Recompute(uniform, recompute.recompute_num_layers or (1 if uniform else _ALL_LAYERS))


@lru_cache(16384)
def _stage(
    shapes: Shapes,
    chunks: tuple[ChunkContent, ...],
    schedule: _Schedule,
    recompute: _Recompute | None,
    vision: Operator | None,
) -> tuple[int, int]:
    """Bytes at the fullest moment, of all but output layer and loss, and what these add."""
    passes = [_pass(shapes, chunk, recompute, vision, with_head=False) for chunk in chunks]
    bare = _fullest(shapes, chunks, schedule, passes)
    if not chunks[-1].loss:
        return bare, 0
    passes[-1] = _pass(shapes, chunks[-1], recompute, vision, with_head=True)
    return bare, max(_fullest(shapes, chunks, schedule, passes) - bare, 0)


def _fullest(shapes: Shapes, chunks: Sequence[ChunkContent], schedule: _Schedule, passes: Sequence[Operator]) -> int:
    """1F1B: so many micro-batches are held, while the last of them goes forward or the first of them backward."""
    # A GPU frees what was sent to the next stage; a CPU's communication may still have to read it.
    sent = [shapes.hidden if schedule.pp > 1 and shapes.on_cpu and not chunk.loss else 0 for chunk in chunks]
    kept = tuple(operator.kept + size for operator, size in zip(passes, sent, strict=True))
    sizes = kept if len(kept) > 1 else None
    held = in_flight(schedule.pp, len(passes), schedule.stage, schedule.num_micro_batches, sizes)
    total = sum(count * size for count, size in zip(held, kept, strict=True))
    return total + max(max(operator.forward, operator.backward) for operator in passes)


@lru_cache(16384)
def _pass(
    shapes: Shapes, chunk: ChunkContent, recompute: _Recompute | None, vision: Operator | None, *, with_head: bool
) -> Operator:
    """A micro-batch through one virtual stage."""
    operators = [_inputs(shapes)]
    if chunk.embedding and vision is not None:
        operators.append(vision)
    if chunk.embedding:
        operators.append(_embedding(shapes))
    operators += _decoder(shapes, chunk.layers, recompute)
    if chunk.loss:
        operators.append(norm(shapes, shapes.part, shapes.architecture.hidden_size, shapes.hidden))
        operators.append(head(shapes) if with_head else Operator(0, shapes.hidden, shapes.hidden))
    return chain(operators)


def _inputs(shapes: Shapes) -> Operator:
    """Cosine and sine of the positions, in the model's dtype; tokens, labels, positions and places of trained tokens
    where they are copied: to a GPU, or to a context-parallel rank."""
    tables = 2 * shapes.length * shapes.architecture.kv_channels * shapes.size
    return Operator(tables + (0 if shapes.on_cpu and shapes.cp == 1 else 33 * shapes.tokens))


def _embedding(shapes: Shapes) -> Operator:
    """Looked up; its backward pass makes a gradient as large as the weight."""
    _, rows = vocabulary_rows(shapes)
    weight = rows * shapes.architecture.hidden_size * shapes.size if shapes.weights_trained else 0
    return Operator(8 * shapes.tokens if shapes.tp > 1 else 0, shapes.whole_hidden, shapes.whole_hidden + weight)


def _decoder(shapes: Shapes, sparse: tuple[bool, ...], recompute: _Recompute | None) -> list[Operator]:
    """The layers of a chunk, in runs of one kind."""
    groups, rest = _groups(sparse, recompute)
    again = [
        repeat(recomputed(chain(_runs(shapes, group)), shapes.hidden, shapes.hidden), times) for group, times in groups
    ]
    return again + _runs(shapes, rest)


def _runs(shapes: Shapes, runs: _Runs) -> list[Operator]:
    return [repeat(_layer(shapes, kind), times) for kind, times in runs]


_Runs = tuple[tuple[bool, int], ...]  # kinds of layers, and how many there are one after the other


@lru_cache(4096)
def _groups(sparse: tuple[bool, ...], recompute: _Recompute | None) -> tuple[tuple[tuple[_Runs, int], ...], _Runs]:
    """Groups of layers that are recomputed together, equal ones counted, and the layers that are not."""
    if recompute is None:
        return (), _run_lengths(sparse)
    size, last = (recompute.count, len(sparse)) if recompute.uniform else (1, recompute.count)
    groups = [sparse[first : min(first + size, last)] for first in range(0, min(last, len(sparse)), size)]
    again = tuple((_run_lengths(group), times) for group, times in _run_lengths(groups))
    return again, _run_lengths(sparse[last:])


def _run_lengths(values: Iterable[T]) -> tuple[tuple[T, int], ...]:
    return tuple((value, len(list(same))) for value, same in groupby(values))


@lru_cache(4096)
def _layer(shapes: Shapes, sparse: bool) -> Operator:
    return decoder_layer(shapes, sparse)
