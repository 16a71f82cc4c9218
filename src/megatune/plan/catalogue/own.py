"""Reads the user's own devices and links (docs/devices.md), and stores factors fitted to runs on a device."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatune.config.entry import Builder, SettingEntry, Written, yaml_finding
from megatune.config.setting import Group, describe
from megatune.config.values import coerce, compose, construct, value_of
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean, nearest_names
from megatune.plan.catalogue.devices import (
    DEVICE_NEEDS,
    LINK_NEEDS,
    Catalogue,
    DeviceFields,
    LinkFields,
    PeakFields,
    catalogue,
    split_ports,
)
from megatune.plan.machine import Calibration

_HEAD = "# Written by megatune plan --calibrate, or by a first run; docs/trouble.md says what the numbers are.\n"
_Factor = Annotated[float, Field(gt=0)]
G = TypeVar("G", bound=Group)
VARIABLE = "MEGATUNE_DEVICES"
_EXAMPLE = "docs/devices.md has an example"


def user_folder() -> Path:
    """Return the folder megatune in XDG_CONFIG_HOME, by default ~/.config."""
    env = os.environ
    return Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "~").expanduser() / ".config") / "megatune"


def own_catalogue(path: str | Path | None = None) -> Catalogue:
    """Read the user's devices and links from this file, from that of MEGATUNE_DEVICES, or from devices.yaml in the
    user's folder if it exists.

    Raises:
        MegatuneError: INPUT if the given file cannot be read; SETTINGS, with everything that is wrong in it.
    """
    named = path or os.environ.get(VARIABLE)
    file = Path(named) if named else user_folder() / "devices.yaml"
    if not named and not file.is_file():
        return Catalogue()
    try:
        node = compose(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = "" if path or not named else f"environment, {VARIABLE}"
        raise MegatuneError(Finding(f"cannot read {file}", where, reason), ExitCode.INPUT) from None
    except yaml.YAMLError as error:
        raise MegatuneError(yaml_finding(error, str(file)), ExitCode.SETTINGS) from None
    reader = _Reader(file=str(file))
    own = Catalogue() if node is None else reader.catalogue(node)
    if reader.findings:
        raise MegatuneError(reader.findings, ExitCode.SETTINGS)
    return own


@dataclass(slots=True)
class _Reader(Builder):
    """Reads a file and collects its findings."""

    file: str = ""

    def catalogue(self, node: yaml.Node) -> Catalogue:
        """Return the valid devices and links of the file."""
        parts, own = self._pairs(node, "the file", ("devices", "links")), Catalogue({}, {})
        links, devices = dict(catalogue().links), dict(catalogue().devices)
        for name, each in self._pairs(parts.get("links"), "links").items():
            before = len(self.findings)
            link, nodes = self._read(each, f"links: {name}", LinkFields)
            self._require(each, name, nodes, LINK_NEEDS)
            if len(self.findings) == before:
                own.links[name] = links[name] = link
        for name, each in self._pairs(parts.get("devices"), "devices").items():
            before = len(self.findings)
            device = self._device(each, name, devices, links)
            if len(self.findings) == before:
                own.devices[name] = devices[name] = device
        return own

    def _device(
        self, node: yaml.Node, name: str, devices: Mapping[str, DeviceFields], links: Mapping[str, LinkFields]
    ) -> DeviceFields:
        """Return the keys of a device, with those of the device in `like`."""
        device, nodes = self._read(node, f"devices: {name}", DeviceFields)
        inside, between = ([each for each in links if links[each].network == kind] for kind in (False, True))
        for key, known in (("like", list(devices)), ("link", inside), ("network", between)):
            value = getattr(device, key)
            base = split_ports(value, known)[0] if key == "network" else value
            if key in device.model_fields_set and base not in known:
                near = nearest_names(value, known, cutoff=0.4) or known
                self._refuse(nodes[key], f"{name}: there is no {key} {value!r}", fix=f"one of {', '.join(near)}")
        written = {key: getattr(device, key) for key in device.model_fields_set}
        if device.like is None:
            self._require(node, name, nodes, DEVICE_NEEDS)
        elif (like := devices.get(device.like)) is not None:
            device = like.model_copy(update={"aliases": [], "driver_names": [], **written})
            if like.tflops is not None and device.tflops is not None:
                given = {dtype: peak for dtype, peak in device.tflops if peak is not None}
                device = device.model_copy(update={"tflops": like.tflops.model_copy(update=given)})
        missing = [dtype for dtype, peak in device.tflops or () if peak is None]
        if missing and "tflops" in nodes:
            self._refuse(nodes["tflops"], f"{name}: tflops has no {', '.join(missing)}", fix=_EXAMPLE)
        return device

    def _read(self, node: yaml.Node, what: str, group: type[G]) -> tuple[G, dict[str, yaml.Node]]:
        """Return the valid keys of a mapping, and the node of each key."""
        infos = {info.name: replace(info, optional=False) for info in describe("", group)}
        nodes, written = self._pairs(node, what, infos), dict[str, Written]()
        for key, each in nodes.items():
            label, info = f"{what.partition(': ')[2]}: {key}", infos[key]
            try:
                entry = SettingEntry(label, value_of(each), self._where(each), "")
                is_peaks = info.kinds == {PeakFields}
                value = self._read(each, f"{what}: {key}", PeakFields)[0] if is_peaks else coerce(entry.value, info)
                written[key] = Written(entry, value, info, label)
            except yaml.YAMLError as error:
                self.findings.append(yaml_finding(error, self.file))
        return self.group(group, written), nodes

    def _pairs(self, node: yaml.Node | None, what: str, known: Collection[str] | None = None) -> dict[str, yaml.Node]:
        """Return the nodes of a mapping by key; with `known`, other keys are refused."""
        found: dict[str, yaml.Node] = {}
        if node is not None and not isinstance(node, yaml.MappingNode):
            self._refuse(node, f"{what} holds no `key: value` lines", fix=_EXAMPLE)
            return found
        for key_node, value_node in node.value if node is not None else ():
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self._refuse(key_node, "a key must be text", fix="write `key: value`")
            elif key in found:
                self._refuse(key_node, f"{key} appears twice", fix="keep one of the two")
            elif known is not None and key not in known:
                fix = did_you_mean(key, known, f"one of {', '.join(known)}")
                self._refuse(key_node, f"unknown key {key!r} in {what}", fix=fix)
            else:
                found[key] = value_node
        return found

    def _where(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"

    def _refuse(self, node: yaml.Node, what: str, fix: str) -> None:
        self.findings.append(Finding(what, self._where(node), fix=fix))

    def _require(self, node: yaml.Node, name: str, written: Collection[str], keys: Collection[str]) -> None:
        if missing := [key for key in keys if key not in written]:
            self._refuse(node, f"{name} has no {', '.join(missing)}", fix=_EXAMPLE)


# --- calibrations: a YAML file per device -----------------------------------------------------------------------------


class _File(BaseModel):
    """The content of a file: the fields of `Calibration`, and the device that they were fitted to."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    device: str | None = None
    compute: _Factor = 1.0
    communication: _Factor = 1.0
    activations: _Factor = 1.0
    framework: int = 0
    num_runs: int = 0


def calibration_path(device: str) -> Path:
    """Return the default file of a device's calibration."""
    return user_folder() / "calibration" / f"{device}.yaml"


def write_calibration(calibration: Calibration, path: str | Path, device: str) -> None:
    """Write the factors of a device atomically.

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
    """Read the calibration of a device from this file, or from the default one; neutral if that does not exist.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with the file, or if it is for another device.
    """
    if path is None and not calibration_path(device).is_file():
        return Calibration()
    path = path or calibration_path(device)
    try:
        content: Any = construct(Path(path).read_text(encoding="utf-8"))
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
    if found.device not in (None, device):
        fix = "leave --calibration out, or give the file of this device"
        finding = Finding(f"was fitted to {found.device}", str(path), f"this plan is for {device}", fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    return Calibration(**found.model_dump(exclude={"device"}))


def _finding(error: Mapping[str, Any], path: str | Path) -> Finding:
    """Convert an error of pydantic: the key, its value, and what was expected."""
    name, known = ".".join(map(str, error["loc"])), f"it has {', '.join(_File.model_fields)}"
    if error["type"] == "extra_forbidden":
        return Finding(f"unknown key {name!r}", str(path), fix=known)
    what = f"{name} is {error['input']!r}" if name else "is not a mapping of factors"
    return Finding(what, str(path), error["msg"], known)
