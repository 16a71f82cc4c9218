"""What the pipeline asks of an engine that samples responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from megatune.rl.samples import Request, Response

INSTRUCTION_TOKENS = 512  # of a judge's prompt, without question and response

Memory: TypeAlias = Literal["weights", "cache"]


class RolloutEngine(Protocol):
    """One engine, in one process (or the first of several); requests of any number are in flight at once. One thread
    uses it, that of an `EngineServer`."""

    @property
    def version(self) -> int:
        """Of the weights: the last update that was committed, 0 before any."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; they are sampled by `step`."""
        ...

    def step(self) -> list[Response]:
        """Sample on, by a token or for a moment, and return what was finished."""
        ...

    def abort(self) -> list[Response]:
        """End all requests, and return what they have so far."""
        ...

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Expect the weights of a version; nothing is in flight, and weights are awake."""
        ...

    def update(self, bucket: Mapping[str, Tensor]) -> None:
        """Take some of the weights, whole tensors by their Hugging Face names."""
        ...

    def commit_update(self, version: int) -> None:
        """Use the new weights.

        Raises:
            MegatuneError: INTERNAL, where a tensor is missing, unknown or of another shape; the engine is of no version
                then, and refuses to sample.
        """
        ...

    def sleep(self, level: int) -> None:
        """Free the device's memory: the cache (1), or weights, too (2), which come with the next update."""
        ...

    def close(self) -> None:
        """End what it has started, and remove what it has left; nothing is called after it."""
        ...

    def wake(self, *parts: Memory) -> None:
        """Take parts of the memory again that are asleep; none stands for all. It samples once it has both."""
        ...
