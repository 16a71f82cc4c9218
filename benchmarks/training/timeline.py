"""Where the time of a step goes: by events in the GPU's queue, by the clock on a CPU."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
PHASES = ("forward", "backward", "reduce", "optimizer")
# Parts of a model by the names that either side gives its modules.
PARTS = {
    "pictures": re.compile(r".*\.(vision_model|visual)"),
    "attention": re.compile(r".*\.(self_attention|self_attn)"),
    "feed-forward": re.compile(r".*layers\.\d+\.mlp"),
    "experts": re.compile(r".*\.mlp\.experts"),
}


def synchronize() -> None:
    """Wait until the device has done all that is queued."""
    if ON_GPU:
        torch.cuda.synchronize()


def _now() -> Any:
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    """Seconds; the device must be done."""
    return start.elapsed_time(stop) / 1e3 if ON_GPU else stop - start


class Timeline:
    """Phases of a step, each from its mark to the next."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self._marks.append((phase, _now()))

    def seconds(self) -> dict[str, float]:
        """Of each phase since the last call; ends what was the last one. The device must be done."""
        self.mark("")
        synchronize()
        total: dict[str, float] = defaultdict(float)
        for (phase, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            total[phase] += _between(start, stop)
        self._marks.clear()
        return dict(total)


@contextmanager
def forward_parts(model: torch.nn.Module) -> Iterator[Callable[[], dict[str, float]]]:
    """While it lasts, time the parts of the model's forward passes.

    Yields:
        What gives the seconds of each part so far; the device must be done.
    """
    spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    handles = []

    def watch(part: str, module: torch.nn.Module) -> None:
        begun: list[Any] = []
        handles.append(module.register_forward_pre_hook(lambda *_: begun.append(_now())))
        handles.append(module.register_forward_hook(lambda *_: spans[part].append((begun.pop(), _now()))))

    for name, module in model.named_modules():
        for part, pattern in PARTS.items():
            if pattern.fullmatch(name):
                watch(part, module)
    try:
        yield lambda: {part: sum(_between(*span) for span in of) for part, of in spans.items()}
    finally:
        for handle in handles:
            handle.remove()
