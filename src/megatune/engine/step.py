"""Run micro-batches through Megatron-Core's pipeline schedules: training, evaluation, logits and log-probabilities.

An objective turns token losses into a sum, its normalizer and metrics.
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

# Key in `extras` for `TeacherOutputs`: the objective then gets divergences from the teacher instead of losses.
TEACHER_OUTPUTS = "teaching"
# Metric: the mean cross-entropy of the multi-token prediction layer.
MTP_LOSS = "mtp_loss"


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """The result of an objective for one micro-batch on one rank of the last pipeline stage.

    Attributes:
        loss: fp32 [], with gradient: a sum, which the step divides once by the global normalizer.
        metrics: name -> (sum, count), scalars without gradient; the reported value is Σ sums / Σ counts over all
            micro-batches and ranks.
        replicated: whether every context-parallel rank computes the same numbers from whole sequences (True), or only
            the part of its own tokens (False). Replicated numbers count once. Gradients are right in both cases, since
            each rank passes them only to its own tokens.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    replicated: bool = False


class Objective(Protocol):
    """A loss computed from the output of the model: token losses, or scores.

    If it has an attribute `head`, the model computes what that `Head` selects.
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of all metrics that an output may have; ranks without the output layer need them, too."""
        ...

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Return what a whole micro-batch adds to the divisor of the step's sum (trained tokens, sequences, pairs):
        int64 [], on the host."""
        ...

    def __call__(self, output: Tensor, batch: LocalBatch, /) -> ObjectiveOutput:
        """Compute the loss.

        Args:
            output: of the model, fp32 [b, s / cp]: -log p(label), 0 where a token is not trained; for a model with a
                score its token scores, [b, s / cp, labels] for several labels; [b, s / cp, 2] with entropies, if
                `head` asks for them.
            batch: this rank's part of the micro-batch; `engine.sequences.sequence_sums` sums over sequences.
        """
        ...


class Votes(NamedTuple):
    """Requests of a rank to all ranks, sent along with a step's loss; in `StepTotals`, whether any rank made them.

    Attributes:
        stop: stop after the step.
        save: save after the step.
        settle: a checkpoint that was written in the background is complete, or has failed: handle it.
    """

    stop: bool = False
    save: bool = False
    settle: bool = False


NO_VOTES = Votes()


class StepTotals:
    """Sums over all micro-batches and ranks, equal on all ranks. They stay on the device until one is read.

    Args:
        totals: fp64 [6 + 2 · metrics (+ ranks)]: loss, normalizer, trained tokens, the number of ranks that made each
            of the `Votes`, then sum and count of each metric, and optionally the busy seconds of each rank.
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
        """The summed loss of the objective."""
        return self._values[0]

    @property
    def normalizer(self) -> float:
        """The divisor of the sum; for a language model the number of trained tokens."""
        return self._values[1]

    @property
    def num_tokens(self) -> int:
        """The number of trained tokens."""
        return int(self._values[2])

    @property
    def loss(self) -> float:
        """The loss of the step; 0 if the normalizer is 0."""
        return self.loss_sum / max(self.normalizer, 1)

    @property
    def votes(self) -> Votes:
        """The requests that any rank made."""
        return Votes(*(count > 0 for count in self._values[3:6]))

    @property
    def _num_before(self) -> int:
        return 6 + 2 * len(self._names)

    @property
    def busy_seconds(self) -> list[float]:
        """Seconds that each rank did not wait for others since the previous step (on a GPU: one step earlier, see
        `BusyTime`); empty if it was not measured."""
        return self._values[self._num_before :]

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the objective's metrics and of the routers' auxiliary losses, except those with a count of 0."""
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
        batches: this data-parallel rank's micro-batches; with pipeline parallelism all of the same shape.
        forward_only: evaluate, without gradients.
        votes: this rank's requests to all ranks.
        busy: this rank's timer; read after all work is launched, for `StepTotals`.
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
        model: pipeline chunks; their train/eval mode is restored at the end, also after an exception.
        steps: for each step this data-parallel rank's micro-batches.
    """
    with eval_mode(model):
        found = [forward_backward(model, batches, objective, forward_only=True) for batches in steps]
    return StepTotals.summed(found)


@contextmanager
def eval_mode(model: list[Chunk]) -> Iterator[None]:
    """Run the block with the newest weights, in eval mode and without gradients; collective at its start. The previous
    mode of the chunks is restored at the end."""
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
    """Return this rank's logits of each micro-batch, [b, s, padded vocabulary / tp], or a reward model's token scores,
    fp32 [b, s]; none before the last stage.

    Args:
        batches: all of the same shape; with virtual stages a multiple of the pipeline-parallel size.
    """
    return _collect(model, batches, None)


@torch.no_grad()
def token_log_probs(
    model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch], temperature: float = 1.0
) -> list[Tensor]:
    """Return log-probabilities of the labels of each micro-batch, fp32 [b, s], 0 where a token has no label.

    With `cross_entropy_loss_fusion` the logits of all tokens are never in memory. The list is empty before the last
    pipeline stage, of which every tensor- and context-parallel rank gets whole rows. For `batches` see `logits`.
    """
    return [-losses for losses in _collect(model, batches, Head(temperature))]


@torch.no_grad()
def greedy_tokens(model: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the token ID with the largest logit at each label of each micro-batch, int64 [b, s], 0 where there is no
    label; see `token_log_probs`."""
    return [found.long() for found in _collect(model, batches, Head(only_greedy=True))]


@torch.no_grad()
def teacher_outputs(
    model: Sequence[DistributedDataParallel],
    teacher: list[Chunk],
    vocab_size: int,
    batches: Sequence[MicroBatch],
    beta: float,
    top_k: int | None,
) -> list[TeacherOutputs]:
    """Return the teacher's outputs of each micro-batch, for its extra TEACHER_OUTPUTS; empty before the last stage.

    Args:
        teacher: a model in the same parallel layout as the student.
        vocab_size: number of tokens in the teacher's vocabulary.
        batches: see `logits`.
        beta, top_k: see `divergence.TeacherOutputs`.
    """
    with eval_mode(teacher):
        found = _collect(teacher, batches, Head(hidden=True), whole=False)
    if not found:
        return []
    student, source = model[-1].module, teacher[-1].module
    part: VocabularyShard = student.output_layer.part
    weight = aligned(source.output_weight, student.output_layer.output_size_per_partition, part)
    shared = max(0, min(part.num_rows, vocab_size - part.first))
    top_k = None if top_k is None or top_k >= vocab_size else top_k
    return [TeacherOutputs(each, weight, shared, source.logits_softcap, beta, top_k) for each in found]


def _collect(
    model: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    head: Head | None,
    *,
    whole: bool = True,
) -> list[Tensor]:
    """Return the last stage's output, gathered to whole rows if `whole`; logits if there is no head."""
    found: list[Tensor] = []

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor, bool], Tensor]]:
        local = local_batch(next(iterator))

        def collect(output: Tensor, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            found.append(whole_rows(output, local.sequences.boundaries) if whole else output)
            return output

        return _compute(chunk, local, None if head is None else local.labels, head or PLAIN), collect

    _schedule(model, batches, forward_step, forward_only=True, collect_non_loss_data=True)
    return found


def _schedule(
    model: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    forward_step: Callable[..., Any],
    **options: bool,
) -> list[Tensor]:
    """Run Megatron-Core's pipeline schedule for this layout."""
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
    local = local_batch(batch, objective.normalizer(batch), with_mtp=bool(config.mtp_num_layers))
    head = getattr(objective, "head", PLAIN)
    if TEACHER_OUTPUTS in local.extras:
        head = replace(head, divergences=local.extras[TEACHER_OUTPUTS].divergences)
    return _compute(chunk, local, local.labels, head), partial(_loss, objective, local, config.mtp_loss_scaling_factor)


def _compute(chunk: torch.nn.Module, local: LocalBatch, labels: Tensor | None, head: Head) -> Tensor:
    """Run one pipeline chunk; see `DecoderModel.forward`."""
    output: Tensor = chunk(
        input_ids=local.input_ids,
        sequences=local.sequences,
        labels=labels,
        media=local.media,
        head=head,
        mtp_targets=local.mtp_targets,
    )
    return output


def _loss(objective: Objective, local: LocalBatch, factor: float, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, this rank's part of the normalizer, and the values to report: fp64 [3 + 2 · metrics].

    Args:
        factor: weight of the MTP losses, which are added to the trained loss, but not to the reported one.
    """
    further = None
    if local.mtp_targets is not None:
        output, further = output[..., :-1].squeeze(-1), output[..., -1]
    found = objective(output, local)
    # Context-parallel ranks hold the same micro-batch: only the first one counts what belongs to all of it.
    first = parallel_state.get_context_parallel_rank() == 0
    normalizer = local.sequences.normalizer if first else torch.zeros_like(local.sequences.normalizer)
    nothing = torch.zeros((), device=found.loss.device)
    metrics = [value for name in objective.metric_names for value in found.metrics.get(name, (nothing, nothing))]
    counts = [normalizer, torch.full_like(nothing, len(local.sequences.trained))]
    values = [found.loss, *counts, *metrics]
    if found.replicated and not first:
        values = [nothing, *counts, *[nothing] * len(metrics)]
    # The schedule scales the loss in place for fp16, so the reported value must be a copy.
    report = torch.stack([value.detach().double() for value in values])
    if further is None or local.mtp_targets is None:
        return found.loss, normalizer.int(), report
    total, count = further.sum(), torch.full_like(nothing, len(local.mtp_targets.trained))
    report = torch.cat((report, torch.stack((total.detach(), count)).double()))
    return found.loss + factor * total, normalizer.int(), report
