"""What engines of other projects share: their version, their arguments, and what came for a request."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import numpy as np
from pydantic import ValidationError

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.samples import Request, Response


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
        why = f"weights are updated as {tested} takes them, and another version may take them wrongly and say nothing"
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
            nearest = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {nearest[0]}?" if nearest else "leave it out"
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

    def response(self, finish: Literal["stop", "length", "abort"], *, known: bool) -> Response:
        """Return it with the part that it goes on from; log-probabilities are NaN where they are not `known`."""
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
        )
