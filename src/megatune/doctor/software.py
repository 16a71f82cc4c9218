"""Checks of versions: Python, the dependencies, and compiled packages that must match torch's version."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from megatune.doctor.check import Check, Verdict, check

_IMPORT_SECONDS = 120.0
# Compiled for one version of torch. megatune does not need them, but Transformers and vLLM import them if installed.
_COMPILED = {"transformer_engine": "transformer-engine", "flash_attn": "flash-attn", "apex": "apex", "vllm": "vllm"}


def software() -> Iterator[Check]:
    """Check Python, the declared packages, and compiled packages."""
    yield _python()
    yield from _declared()
    yield from _compiled()


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines, by name."""
    names = ("megatune", "torch", "megatron-core", "transformers", "safetensors", "tokenizers", "numpy")
    return {"python": platform.python_version()} | {name: _version(name) or "none" for name in names}


def _python() -> Check:
    wanted = metadata.metadata("megatune")["Requires-Python"] if _version("megatune") else None
    found = f"{platform.python_version()}, {platform.system()} {platform.release()}"
    fits = wanted is None or Requirement(f"python{wanted}").specifier.contains(platform.python_version())
    return check("software", "Python", found, fits, f"megatune is tested with {wanted}", f"Python {wanted}")


def _declared() -> Iterator[Check]:
    """Check all packages that megatune declares, including installed extras."""
    if _version("megatune") is None:
        yield Check("software", "packages", Verdict.SKIP, "megatune runs from source and is not installed")
        return
    wrong = False
    for text in metadata.requires("megatune") or ():
        requirement = Requirement(text)
        version = _version(requirement.name)
        if version is None and requirement.marker is not None:
            continue  # an extra that is not installed
        if version is None:
            found, why = "not installed", f"megatune needs {requirement.name}{requirement.specifier}"
        elif not requirement.specifier.contains(version, prereleases=True):
            found, why = version, f"megatune is tested with {requirement.name}{requirement.specifier}"
        else:
            continue
        wrong = True
        fix = f"pip install '{requirement.name}{requirement.specifier}' -c constraints.txt"
        yield Check("software", requirement.name, Verdict.FAIL, found, why, fix)
    if not wrong:
        shown = ", ".join(f"{name} {version}" for name, version in list(versions().items())[1:5])
        yield check("software", "packages", shown)


def _compiled() -> Iterator[Check]:
    """Import each compiled package in a subprocess, since one built for another torch may crash."""
    for module, package in _COMPILED.items():
        if (version := _version(package)) is None:
            continue
        command = [sys.executable, "-c", f"import {module}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            why = f"the import takes more than {_IMPORT_SECONDS:.0f} s"
        else:
            if done.returncode == 0:
                yield check("software", package, version)
                continue
            why = (done.stderr.strip().splitlines() or [f"the import failed with exit code {done.returncode}"])[-1]
        if "undefined symbol" in why:
            why = f"it was not built for torch {_version('torch')}: {why}"
        fix = f"reinstall {package} for torch {_version('torch')}, or remove it: megatune does not need it"
        yield Check("software", package, Verdict.WARN, version, why, fix)


def _version(package: str) -> str | None:
    try:
        return str(Version(metadata.version(package)))
    except metadata.PackageNotFoundError:
        return None
