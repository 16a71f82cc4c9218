"""What engines of other projects share: their version, their arguments, requests in flight and updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.rl.rollout.engine import Memory
from megatune.rl.rollout.updates import Update
from megatune.rl.samples import Request, Response

# What vLLM and SGLang call the parts of an engine's memory.
MEMORY_TAGS: Mapping[Memory, str] = {"weights": "weights", "cache": "kv_cache"}


def check_version(engine: str, packages: Sequence[str], tested: str, role: InferRole) -> None:
    """Refuse another version of an engine than the one that is known.

    Args:
        packages: that have the engine, as an index names them.
        tested: how the version begins: "0.32".

    Raises:
        MegatuneError: UNAVAILABLE.
    """
    fix = f"pip install '{packages[0]}~={tested}.0' into the environment that py_executable of {role.name} names"
    found = next((each for name in packages if (each := _version_of(name)) is not None), None)
    if found is None:
        what, why = f"{engine} is not installed", f"this environment has no package {' or '.join(packages)}"
        raise MegatuneError(Finding(what, role.name, why, fix), ExitCode.UNAVAILABLE)
    if found != tested and not found.startswith(f"{tested}."):
        what = f"{engine} {found} is installed"
        why = f"weights are updated as {tested} takes them, and another version may load them wrongly without an error"
        raise MegatuneError(Finding(what, role.name, why, fix), ExitCode.UNAVAILABLE)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_arguments(engine: str, given: Mapping[str, object], known: Collection[str], role: InferRole) -> None:
    """Refuse arguments that an engine does not have.

    Raises:
        MegatuneError: SETTINGS, with a finding for each.
    """
    findings = []
    for key in given:
        if key not in known:
            fix = did_you_mean(key, known, "leave it out")
            where = f"{role.name}.strategy_args.strategy_config"
            findings.append(Finding(f"{engine} has no argument {key}", where, "", fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


@contextmanager
def starting(engine: str, role: InferRole) -> Iterator[None]:
    """Turn what an engine refuses a model, or this machine, with into one line (UNAVAILABLE)."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        # pydantic's errors are ValueErrors, whose first line says how many there are.
        found = error.errors() if isinstance(error, ValidationError) else []
        why = "; ".join(each["msg"] for each in found) or str(error).strip().partition("\n")[0]
        fix = f"see the log of this actor; strategy_config of {role.name} has the engine's arguments"
        finding = Finding(f"{engine} cannot start with {role.model_name_or_path}", role.name, why, fix)
        raise MegatuneError(finding, ExitCode.UNAVAILABLE) from error


@dataclass(slots=True)
class Sampled:
    """What came for a request."""

    request: Request
    version: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def response(
        self, finish: Literal["stop", "length", "abort"], *, known: bool, experts: np.ndarray | None = None
    ) -> Response:
        """Return it with the part that it goes on from.

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


class ExternalEngine(ABC):
    """See `RolloutEngine`.

    Args:
        shapes: of the model's tensors, by their names in checkpoints.
        has_weights: whether the model's own were loaded.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, has_weights: bool) -> None:
        self._shapes = shapes
        self._version: int | None = 0 if has_weights else None
        self._update: Update | None = None
        self._sampled: dict[str, Sampled] = {}
        self._finished: list[Response] = []

    @property
    def version(self) -> int:
        """Of the weights; -1 where there are none, or an update was not whole."""
        return -1 if self._version is None else self._version

    @property
    def num_in_flight(self) -> int:
        """Of requests, those that wait included."""
        return len(self._sampled)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `RolloutEngine.submit`."""
        if self._version is None:
            why = "its weights have no version: no complete update has arrived"
            raise MegatuneError(Finding("the rollout engine cannot sample", "actor_infer", why), ExitCode.INTERNAL)
        for request in requests:
            sampled = Sampled(request, self._version)
            if len(request.response_ids) >= request.max_new_tokens:
                self._finished.append(sampled.response("length", known=True))
                continue
            self._sampled[request.id] = sampled
            self._begin(request, np.concatenate([request.prompt_ids, request.response_ids]).tolist())

    @abstractmethod
    def _begin(self, request: Request, tokens: list[int]) -> None:
        """Give a request to the engine, which goes on after `tokens`."""

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Expect weights; see `RolloutEngine.begin_update`."""
        assert not self.num_in_flight, "abort what is in flight first"
        self._update, self._version = Update(version, num_tensors, self._shapes), None

    def _accepted(self, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Note tensors, and return those that belong to the model."""
        assert self._update is not None, "begin_update comes first"
        return {name: tensor for name, tensor in bucket.items() if self._update.accept(name, tensor.shape)}

    def sleep(self, level: int) -> None:
        """Free memory; see `RolloutEngine.sleep`."""
        assert not self.num_in_flight, "abort what is in flight first"
        self._free(level)
        if level > 1:
            self._version = None

    @abstractmethod
    def _free(self, level: int) -> None:
        """Free what `sleep` frees."""
