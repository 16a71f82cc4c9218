"""What the pipeline calls of an engine that samples responses, and what all engines share: requests in flight, and
updates of their weights that are complete or an error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar, cast

import numpy as np

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rollout.updates import Update
from megatune.rl.samples import Request, Response
from megatune.rl.transport import LostPeerError, Parcel, Route

INSTRUCTION_TOKENS = 512  # of a judge's prompt, without question and response

Memory: TypeAlias = Literal["weights", "cache"]


@dataclass(slots=True)
class Sampled:
    """A request in flight, and what was sampled for it.

    Attributes:
        version: of the weights that its tokens are sampled from.
    """

    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def response(
        self, finish: Literal["stop", "length", "abort"], *, known: bool = True, experts: np.ndarray | None = None
    ) -> Response:
        """Return it with the part that it continues.

        Args:
            known: whether log-probabilities are those asked for; they are NaN otherwise.
            experts: those of every token but the last, [tokens, layers, k] in any integer dtype.
        """
        request, versions = self.request, self.request.versions
        if self.tokens and (not versions or versions[-1][1] != self.version):
            versions = (*versions, (len(request.response_ids), self.version))
        log_probs = np.array(self.log_probs, np.float32) if known else np.full(len(self.tokens), np.nan, np.float32)
        return Response(
            request.id,
            np.concatenate([request.response_ids, np.array(self.tokens, np.int64)]),
            np.concatenate([request.log_probs, log_probs]),
            finish,
            versions,
            None if experts is None else experts.astype(np.int16),
        )


T = TypeVar("T", bound=Sampled)


class RolloutEngine(ABC, Generic[T]):
    """One engine, in one process (or the first of several); any number of requests is in flight at once. One thread
    uses it, that of an `EngineServer`.

    Args:
        shapes: of the tensors that an update brings, by their names.
        has_weights: whether the engine has weights before the first update.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, has_weights: bool) -> None:
        self._shapes = shapes
        self._version: int | None = 0 if has_weights else None
        self._update: Update | None = None
        self._sampled: dict[str, T] = {}  # by request in flight
        self._finished: list[Response] = []

    @property
    def version(self) -> int:
        """Version of the weights: the last update that was committed, 0 before any; -1 where there are no weights, or
        an update was not complete."""
        return -1 if self._version is None else self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; they are sampled by `step`.

        Raises:
            MegatuneError: INTERNAL, where the engine sleeps or its weights have no version.
        """
        self._check_ready()
        for request in requests:
            sampled = self._begin(request)
            if len(request.response_ids) >= request.max_new_tokens:
                self._finished.append(sampled.response("length"))
            else:
                self._sampled[request.id] = sampled
                self._start(sampled)

    def _begin(self, request: Request) -> T:
        """Return what holds a request in flight: of engines that need no more than all of them, this."""
        return cast(T, Sampled(request, self.version))

    @abstractmethod
    def _start(self, sampled: T) -> None:
        """Hand a request to the engine, which continues after the prompt and what the response has."""

    def step(self) -> list[Response]:
        """Sample, by a token or for a moment, and return what was finished."""
        if self._sampled:
            self._advance()
        finished, self._finished = self._finished, []
        return finished

    @abstractmethod
    def _advance(self) -> None:
        """Sample for the requests in flight, and move what ends from `_sampled` to `_finished`."""

    @abstractmethod
    def abort(self) -> list[Response]:
        """End all requests, and return what they have so far."""

    @abstractmethod
    def connect(self, route: Route, first: int) -> None:
        """Meet the trainer, which weights come from.

        Args:
            first: number of this engine's first receiver.
        """

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Expect the weights of a version; nothing is in flight, and weights are awake."""
        assert not self._sampled, "abort what is in flight first"
        self._update, self._version = Update(version, num_tensors, self._shapes), None

    def update(self, parcel: Parcel) -> bool:
        """Take some of the weights; return whether they came. The update begins anew where they did not."""
        assert self._update is not None, "begin_update comes first"
        accepted = [each.name for each in parcel.contents if self._update.accept(each.name, each.shape)]
        try:
            self._take(parcel, accepted)
        except LostPeerError:
            return False
        return True

    @abstractmethod
    def _take(self, parcel: Parcel, names: Sequence[str]) -> None:
        """Receive a bucket, and take these of its tensors: those that belong to the model.

        Raises:
            LostPeerError: the broadcast broke off.
        """

    def commit_update(self, version: int) -> None:
        """Use the new weights.

        Raises:
            MegatuneError: INTERNAL, where a tensor is missing, unknown or of another shape; the engine is of no version
                then, and refuses to sample.
        """
        assert self._update is not None, "begin_update comes first"
        update, self._update = self._update, None
        problem = update.problem(version)
        self._finish(version, whole=problem is None)
        if problem is not None:
            raise problem
        self._version = version

    @abstractmethod
    def _finish(self, version: int, *, whole: bool) -> None:
        """Use what has arrived, and forget what was computed with older weights."""

    def sleep(self, level: int) -> None:
        """Free the device's memory: the cache (1), or weights, too (2), which come with the next update."""
        assert not self._sampled, "abort what is in flight first"
        self._free(level)
        if level > 1:
            self._version = None

    @abstractmethod
    def _free(self, level: int) -> None:
        """Free what `sleep` frees."""

    @abstractmethod
    def wake(self, *parts: Memory) -> None:
        """Take parts of the memory again that are asleep; none means all. It samples once it has both."""

    def close(self) -> None:
        """End what it has started, and remove what it has left; nothing is called after it."""

    def _check_ready(self) -> None:
        if self._version is None:
            raise cannot_sample("its weights have no version: no complete update has arrived")


def cannot_sample(why: str) -> MegatuneError:
    """Return the refusal of an engine that is not ready."""
    return MegatuneError(Finding("the rollout engine cannot sample", "actor_infer", why), ExitCode.INTERNAL)
