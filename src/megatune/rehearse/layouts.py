"""Which processes a rehearsal starts, and another layout to resume in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from megatune.architecture import Architecture
from megatune.config.rules import check
from megatune.config.settings import ParallelSettings, Settings, with_settings

MOST_PROCESSES = 32
_MOST_OTHER = 8


def rehearsed_world(parallel: ParallelSettings, world_size: int) -> int:
    """Return the fewest processes with two data-parallel copies where the real run has some, of dense layers and of
    experts.

    Args:
        world_size: of the real run, which the layout fits.
    """
    smallest = parallel.smallest_world

    def has_copies(world: int) -> tuple[bool, bool]:
        return world > parallel.model_parallel_size, world > parallel.expert_parallel_size

    wanted = has_copies(world_size)
    for times in (1, 2):
        world = smallest * times
        if world_size % world == 0 and world <= MOST_PROCESSES and has_copies(world) == wanted:
            return world
    return smallest


def layout_words(parallel: ParallelSettings, world_size: int) -> str:
    """Name every size above 1, as every plan does, and sequence parallelism: tp2 pp4 vpp2 ep8 dp4 sp."""
    words = parallel.words(world_size, has_experts=parallel.expert_model_parallel_size > 1)
    return f"{words} sp" if parallel.sequence_parallel else words or "one process"


def other_layout(settings: Settings, world_size: int, architecture: Architecture) -> tuple[Settings, int] | None:
    """Return settings with another layout that trains the same rows a step, and its processes; None where there is
    none.

    The one that differs in most sizes is taken, of those the one with the fewest processes above one.
    """
    rows = settings.batch.gradient_accumulation_steps * (world_size // settings.parallel.model_parallel_size)
    before = settings.parallel.sizes(world_size)
    best: tuple[tuple[int, int], Settings, int] | None = None
    for changes, world in _others(settings.parallel, architecture):
        changed = with_settings(settings, {f"parallel.{name}": value for name, value in changes.items()})
        replicas = world // changed.parallel.model_parallel_size
        if rows % replicas:
            continue
        changed = with_settings(changed, {"batch.gradient_accumulation_steps": rows // replicas})
        now = changed.parallel.sizes(world)
        if now == before or check(changed, architecture, world):
            continue
        score = sum(now[name] != before[name] for name in now), -world if world > 1 else -_MOST_OTHER
        if best is None or score > best[0]:
            best = score, changed, world
    return None if best is None else best[1:]


def _others(parallel: ParallelSettings, architecture: Architecture) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield layouts of a few processes, whatever rules say to them."""
    plain: dict[str, Any] = {
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "expert_tensor_parallel_size": 1 if architecture.moe is not None else None,
    }
    sizes = (1, 2)
    experts = (1, 2) if architecture.moe is not None else (1,)
    for tp, pp, cp, ep, dp in product(
        sizes, sizes, (1, 2) if parallel.context_parallel_size == 1 else (1,), experts, sizes
    ):
        changes = {
            **plain,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "sequence_parallel": tp > 1,
        }
        world = tp * pp * cp * dp
        if world <= _MOST_OTHER and world % (ep * pp) == 0:
            yield changes, world
