"""What the engine computes in a layout: logits, loss and gradients under Hugging Face's names. Runs on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.save import save_gradients
from megatune.config.settings import ParallelSettings
from megatune.data.batches import Batch
from megatune.engine import groups, step
from megatune.engine.groups import Place
from megatune.engine.optimizer import load_scalars, main_shards, scalars
from megatune.launch.context import RankContext
from megatune.objectives.language_model import IGNORED, token_sum
from megatune.verify.numbers import write_logits, write_loss
from megatune.verify.samples import FP16_LOSS_SCALE, Sample


def num_micro_batches(num_samples: int, micro_batch_size: int, dp_size: int, parallel: ParallelSettings) -> int:
    """Micro-batches of each data-parallel rank: with virtual stages they come in rounds of one a pipeline stage."""
    needed = math.ceil(num_samples / (micro_batch_size * dp_size))
    round_size = parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1
    return math.ceil(needed / round_size) * round_size


def deal(
    samples: Sequence[Sample], place: Place, parallel: ParallelSettings, *, micro_batch_size: int = 1
) -> list[Batch]:
    """This data-parallel rank's micro-batches, all of one length.

    Sample j takes slot j = (m · dp + rank) · b + i, for micro-batch m and its row i; slots beyond the samples hold
    padding, which trains nothing.
    """
    length = _padded_length(samples, parallel)
    batches = []
    for m in range(num_micro_batches(len(samples), micro_batch_size, place.dp_size, parallel)):
        start = (m * place.dp_size + place.dp_rank) * micro_batch_size
        batches.append(_batch(samples[start : start + micro_batch_size], micro_batch_size, length))
    return batches


def _padded_length(samples: Sequence[Sample], parallel: ParallelSettings) -> int:
    multiple = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return math.ceil(max(len(sample.input_ids) for sample in samples) / multiple) * multiple


def _batch(samples: Sequence[Sample], rows: int, length: int) -> Batch:
    input_ids = torch.zeros(rows, length, dtype=torch.int64)
    labels = torch.full((rows, length), IGNORED, dtype=torch.int64)
    for row, sample in enumerate(samples):
        size = len(sample.input_ids)
        input_ids[row, :size] = torch.tensor(sample.input_ids)
        labels[row, : size - 1] = torch.tensor(sample.labels[1:])
    lengths = tuple(len(sample.input_ids) for sample in samples) + (0,) * (rows - len(samples))
    return Batch(input_ids, labels, torch.arange(length).expand(rows, length).contiguous(), lengths)


def measure(
    assembly: Assembly,
    samples: Sequence[Sample],
    parallel: ParallelSettings,
    folder: Path,
    *,
    micro_batch_size: int = 1,
) -> None:
    """Compute all numbers and write them into a folder that exists, as `numbers` says; collective.

    Where gradients are computed in fp16 they are written as they are there, multiplied by FP16_LOSS_SCALE.
    """
    state = scalars(assembly.optimizer)
    if "loss_scale" in state:
        load_scalars(assembly.optimizer, {**state, "loss_scale": FP16_LOSS_SCALE})
    measure_logits(assembly, samples, parallel, folder)
    loss = measure_loss(assembly, deal(samples, assembly.place, parallel, micro_batch_size=micro_batch_size))
    if assembly.place.rank == 0:
        write_loss(folder, loss)
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.place)
    groups.barrier()


def measure_loss(assembly: Assembly, batches: Sequence[Batch]) -> float:
    """Mean loss over all trained tokens of all ranks; its gradient is left in the parameters."""
    loss_sum, num_tokens, _ = step.forward_backward(assembly.model, batches, token_sum).tolist()
    return loss_sum / num_tokens


def measure_logits(assembly: Assembly, samples: Sequence[Sample], parallel: ParallelSettings, folder: Path) -> None:
    """Write the logits of each sample. Every replica computes all samples; the last stage of the first writes them."""
    place = assembly.place
    count = num_micro_batches(len(samples), 1, 1, parallel)
    batches = [_batch(samples[index : index + 1], 1, _padded_length(samples, parallel)) for index in range(count)]
    found = list(_whole_logits(assembly, samples, step.logits(assembly.model, batches)))
    if place.is_last_stage and (place.tp_rank, place.dp_rank) == (0, 0):
        write_logits(folder, found)


def _whole_logits(assembly: Assembly, samples: Sequence[Sample], slices: Sequence[Tensor]) -> Iterator[Tensor]:
    """Put the tensor-parallel ranks' parts of the vocabulary together, and leave out padding of both kinds."""
    for sample, mine in zip(samples, slices, strict=False):  # `slices` is empty before the last stage
        parts = [torch.empty_like(mine) for _ in range(assembly.place.tp_size)]
        torch.distributed.all_gather(parts, mine.contiguous(), group=groups.tensor_parallel_group())
        yield torch.cat(parts, -1)[0, : len(sample.input_ids), : assembly.architecture.vocab_size].cpu()


def run_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """What every rank of a layout does: load the checkpoint, compute, write into `payload["folder"]`."""
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
    context.beat("measure", 0)
    measure(assembly, samples, settings.parallel, Path(payload["folder"]))
    groups.leave()
