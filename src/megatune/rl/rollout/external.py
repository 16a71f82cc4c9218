"""What engines of other projects share: their version, their arguments, and the parts of their memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.rl.rollout.engine import Memory

# What vLLM and SGLang call dtypes, and the parts of an engine's memory.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
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
