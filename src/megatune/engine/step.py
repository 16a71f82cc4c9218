"""Passes over micro-batches through Megatron-Core's pipeline schedules: training, evaluation, logits, log-probs.

An objective makes a sum, its normalizer and metrics of token losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatune.engine.collectives import BusyTime
from megatune.engine.layers.cross_entropy import PLAIN, Head, VocabularyShard
from megatune.engine.layers.divergence import TeacherOutputs, aligned
from megatune.engine.layers.moe.router import router_metrics
from megatune.engine.model import Chunk, gather_parameters
from megatune.engine.sequences import LocalBatch, MicroBatch, local_batch, whole_rows

# An extra of a micro-batch, `TeacherOutputs`: an objective gets the divergence from it in place of losses.
TEACHER_OUTPUTS = "teaching"
# A metric: the mean cross-entropy of tokens that are predicted one token further than labels are.
MTP_LOSS = "mtp_loss"


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """What an objective computes of one micro-batch on one rank of the last pipeline stage.

    Attributes:
        loss: fp32 [], with gradient: a sum, which the step divides once by the global normalizer.
        metrics: name -> (sum, count), scalars without gradient; what is reported is Σ sums / Σ counts over all
            micro-batches and ranks.
        replicated: whether every context-parallel rank computes the same numbers, of whole documents (True), or each
            the part of its own tokens (False). Replicated numbers count once; gradients are right either way, as each
            rank passes them to its own tokens only.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    replicated: bool = False


class Objective(Protocol):
    """A loss, from what the model puts out: losses of tokens, or scores.

    One that has an attribute `head` gets what that `Head` says of labels.
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What `metrics` of every output may hold; ranks without the output layer need to know."""
        ...

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Return what a whole micro-batch adds to the number that the step's sum is divided by (trained tokens,
        documents, pairs): int64 [], on the host."""
        ...

    def __call__(self, output: Tensor, batch: LocalBatch, /) -> ObjectiveOutput:
        """Compute the loss.

        Args:
            output: of the model, fp32 [b, s / cp]: -log p(label), 0 where a token is not trained; of a model with a
                score the scores of tokens, several of them [b, s / cp, labels]; [b, s / cp, 2] with entropies, where
                its `head` says so.
            batch: what this rank holds of the micro-batch; `engine.sequences.sequence_sums` adds up documents.
        """
        ...


class Votes(NamedTuple):
    """What a rank asks of all, sent along with a step's loss; of `StepTotals`, whether any rank does.

    Attributes:
        stop: stop after the step.
        save: save after the step.
        settle: a checkpoint that was written in the background is whole, or has failed: take note of it.
    """

    stop: bool = False
    save: bool = False
    settle: bool = False


NO_VOTES = Votes()


class StepTotals:
    """Sums over all micro-batches and ranks, equal on all ranks. They are on the device until one is asked for.

    Args:
        totals: fp64 [6 + 2 · metrics + ranks, or none]: loss, normalizer, trained tokens, the ranks with each of
            `Votes`, then sum and count of each metric, and what each rank was busy.
        names: of the metrics.
    """

    def __init__(self, totals: Tensor, names: Sequence[str]) -> None:
        self._totals, self._names = totals, names

    @cached_property
    def _values(self) -> list[float]:
        return self._totals.tolist()

    @classmethod
    def summed(cls, parts: Sequence[StepTotals]) -> StepTotals:
        """Add up the totals of several passes with the same objective."""
        return cls(torch.stack([part._totals for part in parts]).sum(0), parts[0]._names)

    @property
    def loss_sum(self) -> float:
        """Sum of the objective."""
        return self._values[0]

    @property
    def normalizer(self) -> float:
        """What the sum is divided by; trained tokens, of a language model."""
        return self._values[1]

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self._values[2])

    @property
    def loss(self) -> float:
        """The loss of the step; 0 where there is nothing to divide by."""
        return self.loss_sum / max(self.normalizer, 1)

    @property
    def votes(self) -> Votes:
        """What any rank asked for."""
        return Votes(*(count > 0 for count in self._values[3:6]))

    @property
    def _num_before(self) -> int:
        return 6 + 2 * len(self._names)

    @property
    def busy_seconds(self) -> list[float]:
        """How long each rank did not wait for others between two steps, of a GPU between the two before (`BusyTime`);
        empty where it was not measured."""
        return self._values[self._num_before :]

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the objective's metrics and of the routers' auxiliary losses; without those of which none came."""
        sums = self._values[6 : self._num_before]
        pairs = zip(self._names, sums[::2], sums[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}


def forward_backward(
    model: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    forward_only: bool = False,
    votes: Votes = NO_VOTES,
    busy: BusyTime | None = None,
) -> StepTotals:
    """Run all micro-batches and leave the gradient of the objective, divided by its global normalizer, in main_grad.

    Args:
        batches: this data-parallel rank's micro-batches; with pipeline parallelism all of one shape.
        forward_only: evaluate, without gradients.
        votes: what this rank asks of all.
        busy: of this rank; taken once all is launched, for `StepTotals`.
    """
    if not forward_only:
        for chunk in model:
            chunk.zero_grad_buffer()
    reports = _schedule(model, batches, partial(_train, objective), forward_only=forward_only)
    config: Any = model[0].config
    own = (*objective.metric_names, *([MTP_LOSS] if config.mtp_num_layers else []))
    routers = {} if forward_only else router_metrics(model)
    device = torch.cuda.current_device()
    num_values = 6 + 2 * (len(own) + len(routers))
    num_ranks = 0 if busy is None else torch.distributed.get_world_size()
    totals = torch.zeros(num_values + num_ranks, dtype=torch.float64, device=device)
    # Tensor-parallel ranks of the last stage all hold the loss; one of them reports it.
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
        report = torch.stack(reports).sum(0)
        totals[:3], totals[6 : 6 + 2 * len(own)] = report[:3], report[3:]
    for place, vote in enumerate(votes, 3):
        totals[place] = float(vote)
    for place, sums in enumerate(routers.values(), len(own)):
        totals[6 + 2 * place : 8 + 2 * place] = sums
    if busy is not None:
        totals[num_values + torch.distributed.get_rank()] = busy.take()
    torch.distributed.all_reduce(totals)
    return StepTotals(totals, (*own, *routers))


def evaluate(model: list[Chunk], steps: Iterable[Sequence[MicroBatch]], objective: Objective) -> StepTotals:
    """Compute the objective over all batches, in eval mode and without gradients; collective.

    Args:
        model: pipeline chunks; in the mode that they were in at the end, also where an exception ends the evaluation.
        steps: of each step this data-parallel rank's micro-batches.
    """
    with eval_mode(model):
        found = [forward_backward(model, batches, objective, forward_only=True) for batches in steps]
    return StepTotals.summed(found)


@contextmanager
def eval_mode(model: list[Chunk]) -> Iterator[None]:
    """Compute with the newest weights, in eval mode and without gradients; collective at its start. Chunks are in the
    mode that they were in at the end."""
    gather_parameters(model)
    modes = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, is_training in zip(model, modes, strict=True):
            chunk.train(is_training)


@torch.no_grad()
def logits(model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return logits of each micro-batch, [b, s, padded vocabulary / tp] of this rank; none before the last stage.

    Args:
        batches: of one shape; with virtual stages a multiple of the pipeline's size of them.
    """
    return _collect(model, batches, None)


@torch.no_grad()
def token_log_probs(
    model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch], temperature: float = 1.0
) -> list[Tensor]:
    """Return log-probabilities of the labels of each micro-batch, fp32 [b, s], 0 where a token has no label.

    The logits of all tokens are never in memory (with `cross_entropy_loss_fusion`). Empty before the last pipeline
    stage; every tensor- and context-parallel rank of it gets whole rows. `batches` are as for `logits`.
    """
    return [-losses for losses in _collect(model, batches, Head(temperature))]


@torch.no_grad()
def greedy_tokens(model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the token that the model holds for the likeliest at each label of each micro-batch, int64 [b, s], 0 where
    there is no label; see `token_log_probs`."""
    return [found.long() for found in _collect(model, batches, Head(only_greedy=True))]


@torch.no_grad()
def token_scores(model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return a reward model's scores of the tokens of each micro-batch, fp32 [b, s]; see `token_log_probs`."""
    return logits(model, batches)


@torch.no_grad()
def teacher_outputs(
    model: Sequence[DistributedDataParallel],
    teacher: list[Chunk],
    vocab_size: int,
    batches: Sequence[MicroBatch],
    beta: float,
    top_k: int | None,
) -> list[TeacherOutputs]:
    """Return what the teacher says of each micro-batch, to be its extra TEACHER_OUTPUTS; none before the last stage.

    Args:
        teacher: a model in the layout of the one that learns.
        vocab_size: tokens that the teacher knows.
        batches: as for `logits`.
        beta, top_k: see `divergence.TeacherOutputs`.
    """
    with eval_mode(teacher):
        found = _collect(teacher, batches, Head(hidden=True), whole=False)
    if not found:
        return []
    mine, other = model[-1].module, teacher[-1].module
    part: VocabularyShard = mine.output_layer.part
    weight = aligned(other.output_weight, mine.output_layer.output_size_per_partition, part)
    shared = max(0, min(part.num_rows, vocab_size - part.first))
    top_k = None if top_k is None or top_k >= vocab_size else top_k
    return [TeacherOutputs(each, weight, shared, other.logits_softcap, beta, top_k) for each in found]


def _collect(
    model: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    head: Head | None,
    *,
    whole: bool = True,
) -> list[Tensor]:
    """Return what the last stage puts out, in whole rows or as it is; without a head logits."""
    found: list[Tensor] = []

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor, bool], Tensor]]:
        mine = local_batch(next(iterator))

        def collect(output: Tensor, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            found.append(whole_rows(output, mine.sequences.boundaries) if whole else output)
            return output

        return _compute(chunk, mine, None if head is None else mine.labels, head or PLAIN), collect

    _schedule(model, batches, forward_step, forward_only=True, collect_non_loss_data=True)
    return found


def _schedule(
    model: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    forward_step: Callable[..., Any],
    **options: bool,
) -> list[Tensor]:
    """Run Megatron-Core's schedule of this layout."""
    b, s = batches[0].input_ids.shape
    reports: list[Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in model] if len(model) > 1 else iter(batches),
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(batches),
        seq_length=s,
        micro_batch_size=b,
        **options,
    )
    return reports


def _train(
    objective: Objective, iterator: Iterator[MicroBatch], chunk: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    batch = next(iterator)
    config: Any = chunk.config
    mine = local_batch(batch, objective.normalizer(batch), with_mtp=bool(config.mtp_num_layers))
    head = getattr(objective, "head", PLAIN)
    if TEACHER_OUTPUTS in mine.extras:
        head = replace(head, divergences=mine.extras[TEACHER_OUTPUTS].divergences)
    return _compute(chunk, mine, mine.labels, head), partial(_loss, objective, mine, config.mtp_loss_scaling_factor)


def _compute(chunk: torch.nn.Module, mine: LocalBatch, labels: Tensor | None, head: Head) -> Tensor:
    """Run one pipeline chunk; see `DecoderModel.forward`."""
    output: Tensor = chunk(
        input_ids=mine.input_ids,
        sequences=mine.sequences,
        labels=labels,
        pictures=mine.pictures,
        head=head,
        mtp_targets=mine.mtp_targets,
    )
    return output


def _loss(objective: Objective, mine: LocalBatch, factor: float, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, this rank's part of the normalizer, and what is reported: fp64 [3 + 2 · metrics].

    Args:
        factor: of losses of further tokens, which are added to the loss that is trained, not to the one reported.
    """
    further = None
    if mine.mtp_targets is not None:
        output, further = output[..., :-1].squeeze(-1), output[..., -1]
    found = objective(output, mine)
    # Context-parallel ranks hold the same micro-batch: the first one counts what belongs to all of it.
    first = parallel_state.get_context_parallel_rank() == 0
    normalizer = mine.sequences.normalizer if first else torch.zeros_like(mine.sequences.normalizer)
    nothing = torch.zeros((), device=found.loss.device)
    metrics = [value for name in objective.metric_names for value in found.metrics.get(name, (nothing, nothing))]
    counts = [normalizer, torch.full_like(nothing, len(mine.sequences.trained))]
    values = [found.loss, *counts, *metrics]
    if found.replicated and not first:
        values = [nothing, *counts, *[nothing] * len(metrics)]
    # The schedule scales the loss in place for fp16; what is reported must be a copy.
    report = torch.stack([value.detach().double() for value in values])
    if further is None or mine.mtp_targets is None:
        return found.loss, normalizer.int(), report
    total, count = further.sum(), torch.full_like(nothing, len(mine.mtp_targets.trained))
    report = torch.cat((report, torch.stack((total.detach(), count)).double()))
    return found.loss + factor * total, normalizer.int(), report
