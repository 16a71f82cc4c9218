"""A calibration as a small YAML file, one a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue.own import user_folder
from megatune.plan.machine import Calibration

_HEAD = "# Written by megatune plan --calibrate, or by a first run; docs/trouble.md says what the numbers are.\n"
_Factor = Annotated[float, Field(gt=0)]


class _File(BaseModel):
    """What a file has: the fields of `Calibration`, and the device that they were fitted to."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    device: str | None = None
    compute: _Factor = 1.0
    communication: _Factor = 1.0
    activations: _Factor = 1.0
    framework: int = 0
    num_runs: int = 0


def default_path(device: str, env: Mapping[str, str] = os.environ) -> Path:
    """Return where the planner looks for the calibration of a device."""
    return user_folder(env) / "calibration" / f"{device}.yaml"


def write(calibration: Calibration, path: str | Path, device: str) -> None:
    """Write the factors fitted to a device, whole or not at all.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    path = Path(path)
    content = {"device": device, **asdict(calibration)}
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(_HEAD + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise MegatuneError(Finding(f"cannot write: {error}", str(path)), ExitCode.CANNOT_WRITE) from None


def calibration_for(device: str, path: str | Path | None = None) -> Calibration:
    """Read the calibration of a device: of the file, or of the default one where that is there; the neutral one else.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with the file; also where it is of another device.
    """
    if path is None and not default_path(device).is_file():
        return Calibration()
    return read(path or default_path(device), device)


def read(path: str | Path, device: str | None = None) -> Calibration:
    """Read the factors of a file, of a device where that is known; see `calibration_for`."""
    try:
        content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        found = _File.model_validate(content)
    except FileNotFoundError:
        finding = Finding("there is no such file", str(path), fix="megatune plan --calibrate RUN writes one")
        raise MegatuneError(finding, ExitCode.INPUT) from None
    except ValidationError as error:
        raise MegatuneError([_finding(each, path) for each in error.errors()], ExitCode.INPUT) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark, why = getattr(error, "problem_mark", None), str(getattr(error, "problem", error))
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        fix = "megatune plan --calibrate RUN writes it again"
        raise MegatuneError(Finding("cannot be read", where, why, fix), ExitCode.INPUT) from None
    if None not in (found.device, device) and found.device != device:
        fix = "leave --calibration out, or give the file of this device"
        finding = Finding(f"was fitted to {found.device}", str(path), f"this plan is for {device}", fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    return Calibration(**found.model_dump(exclude={"device"}))


def _finding(error: Mapping[str, Any], path: str | Path) -> Finding:
    """Say what pydantic has against a file: which key, with which value, and what was expected."""
    name, known = ".".join(map(str, error["loc"])), f"it has {', '.join(_File.model_fields)}"
    if error["type"] == "extra_forbidden":
        return Finding(f"unknown key {name!r}", str(path), fix=known)
    what = f"{name} is {error['input']!r}" if name else "is not a mapping of factors"
    return Finding(what, str(path), error["msg"], known)
