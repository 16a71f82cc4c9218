"""What the engine computes in a layout: logits, loss and gradients under Hugging Face's names. Runs on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.bridge.assemble import Assembly
from megatune.bridge.save import save_gradients
from megatune.data.batches import Batch
from megatune.engine import step
from megatune.engine.groups import tensor_parallel_group
from megatune.engine.optimizer import main_shards
from megatune.objectives.language_model import IGNORED, token_sum
from megatune.verify.reference import Sample


def random_samples(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """Rows of random tokens; about a third of each row's tokens, its first part, is not trained."""
    generator = random.Random(seed)
    samples = []
    for length in lengths:
        tokens = tuple(generator.randrange(vocab_size) for _ in range(length))
        untrained = generator.randrange(length // 2 + 1)
        samples.append(Sample(tokens, (IGNORED,) * untrained + tokens[untrained:]))
    return samples


def deal(samples: Sequence[Sample], assembly: Assembly, settings_micro_batch: int, pad_multiple: int) -> list[Batch]:
    """This data-parallel rank's micro-batches, all of one length: sample j goes to slot (m · dp + rank) · b + i."""
    place = assembly.place
    per_step = settings_micro_batch * place.dp_size
    longest = max(len(sample.input_ids) for sample in samples)
    length = -(-longest // pad_multiple) * pad_multiple
    batches = []
    for first in range(0, len(samples), per_step):
        start = first + place.dp_rank * settings_micro_batch
        batches.append(_batch(samples[start : start + settings_micro_batch], settings_micro_batch, length))
    return batches


def _batch(samples: Sequence[Sample], rows: int, length: int) -> Batch:
    input_ids = torch.zeros(rows, length, dtype=torch.int64)
    labels = torch.full((rows, length), IGNORED, dtype=torch.int64)
    for row, sample in enumerate(samples):
        size = len(sample.input_ids)
        input_ids[row, :size] = torch.tensor(sample.input_ids)
        labels[row, : size - 1] = torch.tensor(sample.labels[1:])
    return Batch(input_ids, labels, torch.arange(length).expand(rows, length).contiguous())


def measure_loss(assembly: Assembly, batches: Sequence[Batch]) -> float:
    """Mean loss over all trained tokens of all ranks; its gradient is left in the parameters."""
    loss_sum, num_tokens, _ = step.forward_backward(assembly.model, batches, token_sum).tolist()
    return loss_sum / num_tokens


def measure_logits(assembly: Assembly, samples: Sequence[Sample], pad_multiple: int) -> list[Tensor] | None:
    """Logits of each sample, [s, vocabulary] on the CPU, on rank 0; None elsewhere. Every replica computes all samples.

    Args:
        samples: with virtual stages a multiple of the pipeline's size of them.
    """
    longest = max(len(sample.input_ids) for sample in samples)
    length = -(-longest // pad_multiple) * pad_multiple
    whole = []
    for sample, mine in zip(samples, step.logits(assembly.model, [_batch([s], 1, length) for s in samples]), strict=False):
        parts = [torch.empty_like(mine) for _ in range(assembly.place.tp_size)]
        torch.distributed.all_gather(parts, mine.contiguous(), group=tensor_parallel_group())
        whole.append(torch.cat(parts, -1)[0, : len(sample.input_ids), : assembly.architecture.vocab_size].cpu())
    # The last stage of a pipeline holds them; rank 0 is on the first.
    gathered: list[list[Tensor]] = [[]] * assembly.place.world_size
    sends = (assembly.place.tp_rank, assembly.place.dp_rank) == (0, 0)
    torch.distributed.all_gather_object(gathered, whole if sends else [])
    return next(part for part in gathered if part) if assembly.place.rank == 0 else None


def write_gradients(assembly: Assembly, folder: Path) -> None:
    """Write every parameter's gradient under its Hugging Face name, as `grad/NAME` in safetensors files."""
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.place)
    torch.distributed.barrier()
