"""Compute logits, loss and gradients by Hugging Face name with the engine, in a layout. Runs on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.shard_files import save_gradients
from megatune.config.settings import ParallelSettings
from megatune.data.batches import Batch, Collator, MediaShard
from megatune.data.media import MediaSource
from megatune.data.media.processor import MediaShape
from megatune.data.media_table import DocumentMedia, packed
from megatune.data.rows import Document
from megatune.encoders import Vision
from megatune.engine import groups, step
from megatune.engine.groups import RankCoordinates, replica_group, tensor_parallel_group
from megatune.engine.model import Chunk
from megatune.engine.optimizer import load_scalars, main_shards, scalars
from megatune.engine.sequences import LocalBatch, Sequences, whole_rows
from megatune.engine.step import ObjectiveOutput
from megatune.families.weights import Role
from megatune.launch.context import RankContext
from megatune.objectives.choose import CrossEntropy
from megatune.verify.localize import engine_places
from megatune.verify.results import write_logits, write_loss, write_trace
from megatune.verify.samples import FP16_LOSS_SCALE, Sample, SampleMedia, sample_rows


def shard_samples(
    samples: Sequence[Sample],
    coords: RankCoordinates,
    parallel: ParallelSettings,
    *,
    micro_batch_size: int = 1,
    packed: bool = False,
    vision: Vision | None = None,
) -> list[Batch]:
    """Return this data-parallel rank's micro-batches, all of the same length.

    Row j has slot j = (m · dp + rank) · b + i, in micro-batch m at index i; empty slots become untrained padding.

    Args:
        packed: pack several samples into a row.
        vision: for vision-language models.
    """
    rows = sample_rows(samples, packed=packed)
    batches = _batches(samples, rows, coords, parallel, vision, packed, micro_batch_size, coords.dp_size)
    return batches[coords.dp_rank :: coords.dp_size]


def _batches(
    samples: Sequence[Sample],
    rows: Sequence[Sequence[int]],
    coords: RankCoordinates,
    parallel: ParallelSettings,
    vision: Vision | None,
    packed: bool,
    micro_batch_size: int = 1,
    dp_size: int = 1,
) -> list[Batch]:
    """Return the micro-batches of all data-parallel ranks: the first of each, then the second of each."""
    inputs: Any = None if vision is None else SimpleNamespace(vision=vision, processor=_RandomPixels(vision))
    multiples = parallel.sequence_multiple, parallel.document_multiple
    collator = Collator(micro_batch_size, packed, *multiples, 0, inputs)
    shard = MediaShard(coords.cp_rank * coords.tp_size + coords.tp_rank, coords.cp_size * coords.tp_size)
    # With virtual stages the number of micro-batches is a multiple of the pipeline stages.
    round_size = dp_size * (parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1)
    num_batches = math.ceil(len(rows) / (micro_batch_size * round_size)) * round_size
    documents = [
        [_document(samples[number]) for row in rows[index * micro_batch_size :][:micro_batch_size] for number in row]
        for index in range(num_batches)
    ]
    length = max(collator.length([len(document.input_ids) for document in of_batch]) for of_batch in documents)
    return [collator(of_batch, length, shard=shard if coords.pp_rank == 0 else None) for of_batch in documents]


def _document(sample: Sample) -> Document:
    input_ids, labels = (np.asarray(each, np.int32) for each in (sample.input_ids, sample.labels))
    return Document(input_ids, labels, tuple(map(_document_media, sample.media)))


def _document_media(item: SampleMedia) -> DocumentMedia:
    # The data is the seed of its pixels.
    source = MediaSource(item.kind, data=str(item.seed).encode())
    measured = MediaShape(item.grid, item.seconds_per_grid, (), (), (0, 0))
    content = packed(source, measured)
    return DocumentMedia(0, 0, item.grid, item.seconds_per_grid, item.kind == "video", content)


class _RandomPixels:
    """A MediaProcessor that returns the random pixels of a SampleMedia."""

    def __init__(self, vision: Vision) -> None:
        self.vision = vision

    def pixels(self, source: MediaSource, measured: MediaShape) -> np.ndarray:
        """Return fp32 [patches, channels of a patch]."""
        return SampleMedia(source.kind, measured.grid, int(source.data or b"")).pixel_values(self.vision)


def measure(
    assembly: Assembly,
    samples: Sequence[Sample],
    parallel: ParallelSettings,
    folder: Path,
    *,
    micro_batch_size: int = 1,
    packed: bool = False,
) -> None:
    """Compute all results and traces, and write them into an existing folder in the format of `results`; collective.

    In fp16 the loss is multiplied by FP16_LOSS_SCALE, and gradients are divided by it before they are written.

    Args:
        packed: pack several samples into a row.
    """
    state = scalars(assembly.optimizer)
    if "loss_scale" in state:
        load_scalars(assembly.optimizer, {**state, "loss_scale": FP16_LOSS_SCALE})
    _measure_outputs(assembly, samples, parallel, folder, packed=packed)
    batches = shard_samples(
        samples,
        assembly.coords,
        parallel,
        micro_batch_size=micro_batch_size,
        packed=packed,
        vision=assembly.architecture.vision,
    )
    loss = measure_loss(assembly, batches)
    if assembly.coords.rank == 0:
        write_loss(folder, loss)
    shards = main_shards(assembly.optimizer)
    if "loss_scale" in state:
        for shard in shards.values():
            shard.grad.div_(FP16_LOSS_SCALE)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()


def measure_loss(assembly: Assembly, batches: Sequence[Batch]) -> float:
    """Return the mean loss over all trained tokens of all ranks; gradients are in the parameters afterwards."""
    objective = _SquaredScores() if assembly.architecture.num_labels else CrossEntropy()
    return step.forward_backward(assembly.model, batches, objective).loss


class _SquaredScores(CrossEntropy):
    """The mean of squared scores over trained tokens, for samples that have no labels and are not pairs."""

    def __call__(self, scores: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        squares = scores.square()
        return super().__call__(squares if squares.dim() == 2 else squares.sum(-1), batch)


def _measure_outputs(
    assembly: Assembly, samples: Sequence[Sample], parallel: ParallelSettings, folder: Path, *, packed: bool
) -> None:
    """Write the logits of each sample, and the outputs of every place of the model. Every replica computes all samples;
    the stages of the first one write their own outputs, and its last stage the logits."""
    coords = assembly.coords
    rows = sample_rows(samples, packed=packed)
    batches = _batches(samples, rows, assembly.coords, parallel, assembly.architecture.vision, packed)
    with _tracing(assembly.model) as found:
        logits = step.logits(assembly.model, batches)
    traced = {
        (number, name): outputs[index][0, tokens]
        for name, outputs in found.items()
        for number, index, tokens in _samples_in(rows, batches)
    }
    if traced:
        write_trace(folder, coords.pp_rank, traced)
    whole = {
        number: _whole_vocabulary(assembly, logits[index][0, tokens])
        for number, index, tokens in _samples_in(rows, batches)
        if logits  # empty before the last stage
    }
    if coords.is_last_stage and (coords.tp_rank, coords.replica_rank) == (0, 0):
        write_logits(folder, [whole[number] for number in range(len(samples))])


def _whole_vocabulary(assembly: Assembly, mine: Tensor) -> Tensor:
    """Gather the tensor-parallel ranks' parts [T, padded vocabulary / tp], without padding, on the CPU. Scores, [T] or
    [T, labels], are not split, and returned as [T, labels]."""
    if assembly.architecture.num_labels:
        return mine.view(len(mine), -1).cpu()
    parts = [torch.empty_like(mine) for _ in range(assembly.coords.tp_size)]
    torch.distributed.all_gather(parts, mine.contiguous(), group=groups.tensor_parallel_group())
    return torch.cat(parts, -1)[:, : assembly.architecture.vocab_size].cpu()


def _samples_in(rows: Sequence[Sequence[int]], batches: Sequence[Batch]) -> Iterator[tuple[int, int, slice]]:
    """Yield each sample's index, the index of its micro-batch, and the slice of its tokens in the micro-batch's row."""
    for index, (row, batch) in enumerate(zip(rows, batches, strict=False)):
        starts = [0] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        for number, start, length in zip(row, starts, batch.lengths, strict=False):
            yield number, index, slice(start, start + length)


def run_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """Entry point of a layout's ranks: load the checkpoint, compute, and write into `payload["folder"]`. Weights except
    adapters are first rounded to `payload["weights_dtype"]`."""
    settings, samples = payload["settings"], payload["samples"]
    groups.join(
        context.rank,
        context.world_size,
        context.local_rank,
        context.master_addr,
        context.master_port,
        timeout=settings.run.ddp_timeout,
    )
    context.beat("load", 0)
    assembly = assemble(payload["model_dir"], settings)
    with torch.no_grad():
        for local in assembly.parameters:
            # Buffers and adapters are always in fp32.
            if isinstance(local.parameter, torch.nn.Parameter) and local.weight.role is not Role.ADAPTER:
                local.parameter.copy_(local.parameter.to(getattr(torch, payload["weights_dtype"])))
    context.beat("measure", 0)
    measure(assembly, samples, settings.parallel, Path(payload["folder"]), packed=settings.packing)
    groups.leave()


@contextmanager
def _tracing(model: Sequence[Chunk]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the outputs of every place during forward passes; collective if the tokens of a row are split over ranks.

    Yields:
        Place -> a tensor [b, s, ...] for each micro-batch, on the CPU, in the order of the micro-batches. It is filled
        on the first tensor-parallel rank of the first replica of each stage, and empty on all other ranks.
    """
    found: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for chunk in model:
            for handle in _watch(chunk.module, found):
                hooks.callback(handle.remove)
        yield found


def _watch(decoder: Any, found: dict[str, list[Tensor]]) -> Iterator[RemovableHandle]:
    """Register the hooks of a chunk; they store the sequences of the current micro-batch, as there is one at a time."""
    sequences: list[Sequences] = []
    tp_group, replicas = tensor_parallel_group(), replica_group()

    def begin(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sequences[:] = [kwargs["sequences"]]

    @torch.no_grad()
    def collect(name: str, take: Callable[[Any, Any], Tensor], module: torch.nn.Module, args: Any, output: Any) -> None:
        sb = take(args, output).detach().contiguous()  # [s / cp (/ tp), b, ...] or [s / cp (/ tp) · b, ...]
        if sb.dim() == 2:
            sb = sb.view(-1, len(sequences[0].is_padding), sb.shape[-1])
        if decoder.config.sequence_parallel:
            parts = [torch.empty_like(sb) for _ in range(tp_group.size())]
            torch.distributed.all_gather(parts, sb, group=tp_group)
            sb = torch.cat(parts)
        rows = whole_rows(sb.transpose(0, 1), sequences[0].boundaries)
        if (tp_group.rank(), replicas.rank()) == (0, 0):
            found.setdefault(name, []).append(rows.cpu())

    yield decoder.register_forward_pre_hook(begin, with_kwargs=True)
    for name, module, take in engine_places(decoder):
        yield module.register_forward_hook(partial(collect, name, take))
