"""Bytes of tensors on a CPU: those that stay between steps, and those that a step makes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def kept_bytes() -> int:
    """Storages that tensors in Python hold now: weights, gradients, the optimizer's state."""
    gc.unfreeze()  # what is frozen is not listed
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.layout is torch.strided and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def step_bytes(step: Callable[[], object]) -> int:
    """What the allocator gave beyond what was there before, at most at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
