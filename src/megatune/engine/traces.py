"""What the modules of a model compute, taken from the outside: hooks that are there only while someone asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatune.engine.groups import tensor_parallel_group
from megatune.engine.model import Chunk
from megatune.engine.sequences import Sequences, whole_rows

# A name, a module, and what to take of its output: [s / cp (/ tp), b, ...], or [s / cp (/ tp) · b, ...].
TracePoint = tuple[str, torch.nn.Module, Callable[[Any], Tensor]]


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
            watch = _Watch(chunk.module, found)
            hooks.callback(chunk.module.register_forward_pre_hook(watch.begin, with_kwargs=True).remove)
            for name, module, take in points(chunk.module):
                hooks.callback(module.register_forward_hook(watch.collect(name, take)).remove)
        yield found


class _Watch:
    """Hooks of one chunk. It computes one micro-batch after the other, and so remembers which one it is at."""

    def __init__(self, decoder: Any, found: dict[str, list[Tensor]]) -> None:
        self._sequence_parallel = decoder.config.sequence_parallel
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._keeps = (parallel_state.get_tensor_model_parallel_rank(), replica) == (0, 0)
        self._found = found
        self._sequences: Sequences | None = None

    def begin(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the micro-batch that the decoder is called with."""
        self._sequences = kwargs["sequences"]

    def collect(self, name: str, take: Callable[[Any], Tensor]) -> Callable[[torch.nn.Module, Any, Any], None]:
        """Return a hook that keeps the whole rows of the module's output."""

        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            rows = self._whole_rows(take(output))
            if self._keeps:
                self._found.setdefault(name, []).append(rows.cpu())

        return hook

    @torch.no_grad()
    def _whole_rows(self, output: Tensor) -> Tensor:
        assert self._sequences is not None
        sb = output.detach().contiguous()
        if sb.dim() == 2:
            sb = sb.view(-1, len(self._sequences.is_padding), sb.shape[-1])
        if self._sequence_parallel:
            parts = [torch.empty_like(sb) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
            torch.distributed.all_gather(parts, sb, group=tensor_parallel_group())
            sb = torch.cat(parts)
        return whole_rows(sb.transpose(0, 1), self._sequences.boundaries)
