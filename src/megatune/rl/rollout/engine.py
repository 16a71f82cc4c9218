"""The interface of rollout engines, and their common parts: requests in flight, and weight updates that are complete or
raise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from safetensors import safe_open

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.forms import find_form
from megatune.rl.broadcast import LostPeerError
from megatune.rl.samples import Request, Response
from megatune.rl.transport import PackedBucket, Route

Memory: TypeAlias = Literal["weights", "cache"]
# Names that vLLM and SGLang have for dtypes, and for the parts of an engine's memory.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MEMORY_TAGS: Mapping[Memory, str] = {"weights": "weights", "cache": "kv_cache"}
_SHOWN = 3  # problems of an update in a message


@dataclass(slots=True)
class SequenceState:
    """A request in flight, and the tokens sampled for it.

    Attributes:
        version: version of the weights that sample its tokens.
    """

    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def response(
        self, finish: Literal["stop", "length", "abort"], *, known: bool = True, experts: np.ndarray | None = None
    ) -> Response:
        """Return the response, including the part that it continues.

        Args:
            known: whether log-probabilities are at the request's temperature; NaN is stored otherwise.
            experts: of every token but the last, [tokens, layers, k] in any integer dtype.
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
            request.observed,
        )


class RolloutEngine(ABC):
    """A rollout engine with any number of requests in flight. Only one thread uses it, that of an `EngineServer`.

    Args:
        shapes: shapes of the tensors of an update, by name.
        has_weights: whether the engine has weights before the first update.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, has_weights: bool) -> None:
        self._shapes = shapes
        self._version: int | None = 0 if has_weights else None
        self._update: WeightUpdate | None = None
        self._sampled: dict[str, SequenceState] = {}  # in flight, by request id
        self._finished: list[Response] = []
        self._asleep: set[Memory] = set()

    @property
    def version(self) -> int:
        """Version of the weights: that of the last committed update, 0 before any; -1 without weights, or after an
        incomplete update."""
        return -1 if self._version is None else self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept requests, which `step` samples.

        Raises:
            MegatuneError: INTERNAL, if the engine sleeps or its weights have no version.
        """
        self._check_ready()
        for request in requests:
            if len(request.response_ids) >= request.max_new_tokens:
                self._finished.append(SequenceState(request, self.version).response("length"))
            else:
                self._sampled[request.id] = self._start(request)

    @abstractmethod
    def _start(self, request: Request) -> SequenceState:
        """Pass a request to the engine, which continues the prompt and the response so far."""

    def step(self) -> list[Response]:
        """Sample a token, or for a moment, and return the finished responses."""
        if self._sampled:
            self._advance()
        finished, self._finished = self._finished, []
        return finished

    @abstractmethod
    def _advance(self) -> None:
        """Sample for the requests in flight, and move finished ones from `_sampled` to `_finished`."""

    @abstractmethod
    def abort(self) -> list[Response]:
        """Abort all requests, and return their partial responses."""

    @abstractmethod
    def connect(self, route: Route, first: int) -> None:
        """Connect with the trainer, which sends weights.

        Args:
            first: index of this engine's first receiver.
        """

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Begin an update of the weights; nothing is in flight, and the weights are awake."""
        assert not self._sampled, "abort what is in flight first"
        self._update, self._version = WeightUpdate(version, num_tensors, self._shapes), None

    def update(self, bucket: PackedBucket) -> bool:
        """Receive some of the weights; return whether they arrived. If not, the update must be restarted."""
        assert self._update is not None, "begin_update comes first"
        accepted = [each.name for each in bucket.contents if self._update.accept(each.name, each.shape)]
        try:
            self._take(bucket, accepted)
        except LostPeerError:
            return False
        return True

    @abstractmethod
    def _take(self, bucket: PackedBucket, names: Sequence[str]) -> None:
        """Receive a bucket, and store its tensors with these names, which belong to the model.

        Raises:
            LostPeerError: the broadcast was aborted.
        """

    def commit_update(self, version: int) -> None:
        """Use the new weights.

        Raises:
            MegatuneError: INTERNAL, if a tensor is missing, unknown or has another shape; the engine then has no
                version, and refuses to sample.
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
        """Use the received weights, and drop cached values of older weights."""

    def sleep(self, level: int) -> None:
        """Free device memory: the cache (level 1), or also the weights (level 2), which the next update sends."""
        assert not self._sampled, "abort what is in flight first"
        self._free(level)
        self._asleep = {"weights", "cache"}
        if level > 1:
            self._version = None

    @abstractmethod
    def _free(self, level: int) -> None:
        """Free the memory; see `sleep`."""

    def wake(self, *parts: Memory) -> None:
        """Reallocate parts of the memory, by default all. The engine can sample once it has both."""
        if waking := self._asleep & set(parts or self._asleep):
            self._restore(waking)
            self._asleep -= waking

    @abstractmethod
    def _restore(self, parts: Collection[Memory]) -> None:
        """Reallocate sleeping parts; see `wake`."""

    def close(self) -> None:  # noqa: B027  (most have nothing to do)
        """End subprocesses and remove temporary files; no other method is called afterwards."""

    def _check_ready(self) -> None:
        why = "it sleeps" if self._asleep else "its weights have no version: no complete update has arrived"
        if self._asleep or self._version is None:
            raise MegatuneError(Finding("the rollout engine cannot sample", "actor_infer", why), ExitCode.INTERNAL)


@dataclass(slots=True)
class WeightUpdate:
    """The progress of a weight update.

    Attributes:
        num_tensors: expected number of tensors.
        expected: shapes by name.
    """

    version: int
    num_tensors: int
    expected: Mapping[str, tuple[int, ...]]
    _received: set[str] = field(default_factory=set)
    _problems: list[str] = field(default_factory=list)

    def accept(self, name: str, shape: Iterable[int]) -> bool:
        """Register a tensor; return whether it belongs to the model."""
        expected = self.expected.get(name)
        if expected is None:
            self._problems.append(f"{name} is not a tensor of this model")
        elif tuple(shape) != expected:
            self._problems.append(f"{name} has shape {list(shape)}, and {list(expected)} in this model")
        elif name in self._received:
            self._problems.append(f"{name} arrived twice")
        else:
            self._received.add(name)
            return True
        return False

    def problem(self, version: int) -> MegatuneError | None:
        """Return the error of an incomplete update (INTERNAL), None if it is complete."""
        problems = list(self._problems)
        if version != self.version:
            problems.append(f"version {version} was committed, and version {self.version} arrived")
        if missing := [name for name in self.expected if name not in self._received]:
            problems.append(f"{len(missing)} of {len(self.expected)} tensors did not arrive: {_named(missing)}")
        if len(self._received) != self.num_tensors:
            received = len(self._received)
            problems.append(f"{self.num_tensors} tensors were announced, and {received} of the model's arrived")
        if not problems:
            return None
        what = f"the update to version {self.version} of the weights is incomplete"
        why = "; ".join([*problems[:_SHOWN], *(["…"] if len(problems) > _SHOWN else [])])
        fix = "the engine's weights have no version now: resume the run from its last checkpoint"
        return MegatuneError(Finding(what, "actor_infer", why, fix), ExitCode.INTERNAL)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by name, as `bridge.export` streams them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    architecture = load_architecture(folder)
    family = FAMILIES[architecture.model_type]
    weights = family.weight_map(architecture)
    version = str(read_config(folder).get("transformers_version") or "")
    form = find_form(family.forms, weights, architecture, shapes.keys(), shapes.__getitem__, version)
    return form.all_shapes(weights, architecture)


def _named(names: list[str]) -> str:
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])
