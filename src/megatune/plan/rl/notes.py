"""What every plan of reinforcement learning takes for granted."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.memory.estimate import COMMUNICATOR, CONTEXT
from megatune.plan.pages.words import size
from megatune.plan.rl.answer import RLAnswer
from megatune.plan.rl.engine import GRAPHS
from megatune.plan.rl.held import OLD_PASS
from megatune.plan.rl.seconds import HOST_BANDWIDTH, STORE_BANDWIDTH, sync_bytes


def notes(found: RLAnswer) -> Iterator[str]:
    """List the user's own notes, then what is taken for granted, with the numbers behind it."""
    question, settings = found.question, found.question.settings
    device, on_cpu = question.machine.device, question.machine.device.generation == "cpu"
    yield from question.notes
    yield f"{device.name}: {size(device.memory)} can be used, {device.bandwidth / 1e9:,.4g} GB/s of memory bandwidth"
    yield "responses end with a constant chance at each token, and are cut at the longest length"
    yield "no group is filtered, and rewards are computed while others are sampled: neither takes time of its own"
    if on_cpu:
        yield "on a CPU offloaded weights stay in the same memory"
    else:
        yield (
            f"every role on a device is a process of its own: its context takes {CONTEXT >> 20:,} MiB, each group of "
            f"NCCL {COMMUNICATOR >> 20:,} MiB, an engine's captured graphs {GRAPHS >> 20:,} MiB; all of it stays while "
            "others have their turn, and none of it was measured"
        )
    rates = f"{STORE_BANDWIDTH / 1e9:g} GB/s to and from Ray's objects"
    rates += "" if on_cpu else f", {HOST_BANDWIDTH / 1e9:g} GB/s between a device and main memory"
    bucket = settings.run.model_update_buffer_size_mb
    yield f"sync: {size(sync_bytes(question))} of weights in buckets of {bucket:,} MB, {rates}"
    if OLD_PASS not in found.phases:
        yield "old log-probabilities are those of the rollouts: they are not computed again"
    yield (
        f"of published runs, whose lengths are known, two of three lie within ± {found.seconds.uncertainty:.0%}; all "
        "took longer than planned without sync (docs/plan-rl.md)"
    )
