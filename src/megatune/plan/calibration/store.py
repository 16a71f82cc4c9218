"""A calibration as a small YAML file, one a device."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue.own import user_folder
from megatune.plan.machine import Calibration

_HEAD = "# Written by megatune plan --calibrate; docs/trouble.md says what the numbers are.\n"
_NAMES = tuple(field.name for field in fields(Calibration))


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


def read(path: str | Path) -> Calibration:
    """Read the factors of a file.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with it.
    """
    return _factors(_content(Path(path)), path)


def calibration_for(device: str, path: str | Path | None = None) -> Calibration:
    """Read the calibration of a device: of the file, or of the default one where that is there; the neutral one else.

    Raises:
        MegatuneError: INPUT; a file that was asked for and is of another device, too.
    """
    if path is None:
        default = default_path(device)
        return read(default) if default.is_file() else Calibration()
    content = _content(Path(path))
    if content.get("device", device) != device:
        fix = "leave --calibration out, or give the file of this device"
        finding = Finding(f"was fitted to {content['device']}", str(path), f"this plan is for {device}", fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    return _factors(content, path)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        finding = Finding("there is no such file", str(path), fix="megatune plan --calibrate RUN writes one")
        raise MegatuneError(finding, ExitCode.INPUT) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark, why = getattr(error, "problem_mark", None), str(getattr(error, "problem", error))
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        fix = "megatune plan --calibrate RUN writes it again"
        raise MegatuneError(Finding("cannot be read", where, why, fix), ExitCode.INPUT) from None
    if not isinstance(content, dict):
        raise MegatuneError(Finding("is not a mapping of factors", str(path)), ExitCode.INPUT)
    return content


def _factors(content: Mapping[str, Any], path: str | Path) -> Calibration:
    findings = [
        Finding(f"unknown key {key!r}", str(path), fix=f"it has {', '.join(('device', *_NAMES))}")
        for key in content
        if key not in (*_NAMES, "device")
    ]
    for name in _NAMES:
        value, whole = content.get(name, 1), name in ("framework", "num_runs")
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or (value <= 0 and not whole):
            what = "a whole number" if whole else "a number above 0"
            findings.append(Finding(f"{name} is {value!r}", str(path), f"expected {what}"))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return Calibration(**{name: content[name] for name in _NAMES if name in content})
