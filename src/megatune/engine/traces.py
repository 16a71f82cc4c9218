"""What the modules of a model compute, taken from the outside: hooks that are there only while someone asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatune.engine.groups import replica_group, tensor_parallel_group
from megatune.engine.model import Chunk
from megatune.engine.sequences import Sequences, whole_rows

# A name, a module, and what to take of its arguments and output: [s / cp (/ tp), b, ...], or [s / cp (/ tp) · b, ...].
TracePoint = tuple[str, torch.nn.Module, Callable[[Any, Any], Tensor]]


@contextmanager
def tracing(model: Sequence[Chunk], points: Callable[[Any], Iterable[TracePoint]]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what modules put out in the forward passes that run meanwhile; collective where the tokens of a row are
    spread over ranks.

    Args:
        points: of a chunk's DecoderModel.

    Yields:
        Name -> a tensor [b, s, ...] for each micro-batch, on the CPU, in the order of the micro-batches. It is filled
        on the first tensor-parallel rank of the first replica of each stage, and empty on all others.
    """
    found: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for chunk in model:
            for handle in _watch(chunk.module, points, found):
                hooks.callback(handle.remove)
        yield found


def _watch(
    decoder: Any, points: Callable[[Any], Iterable[TracePoint]], found: dict[str, list[Tensor]]
) -> Iterator[RemovableHandle]:
    """Hook a chunk. It computes one micro-batch after the other, and so the hooks remember which one it is at."""
    sequences: list[Sequences] = []
    tp_group, replicas = tensor_parallel_group(), replica_group()

    def begin(decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sequences[:] = [kwargs["sequences"]]

    @torch.no_grad()
    def collect(name: str, take: Callable[[Any, Any], Tensor], module: torch.nn.Module, args: Any, output: Any) -> None:
        sb = take(args, output).detach().contiguous()
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
    for name, module, take in points(decoder):
        yield module.register_forward_hook(partial(collect, name, take))
