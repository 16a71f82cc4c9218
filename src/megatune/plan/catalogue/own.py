"""A user's own devices and links: a YAML file with the catalogue's own words (docs/devices.md)."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatune.config.values import compose, value_of
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean, nearest_names
from megatune.plan.catalogue.devices import (
    CATALOGUE_DEVICES,
    CATALOGUE_LINKS,
    DTYPES,
    GENERATIONS,
    CatalogueDevice,
    CatalogueLink,
    Peaks,
    split_ports,
)
from megatune.plan.machine import Device, Link


def user_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder megatune below XDG_CONFIG_HOME, which is ~/.config where it is not set."""
    return Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "~").expanduser() / ".config") / "megatune"


VARIABLE = "MEGATUNE_DEVICES"
_DEVICE_KEYS = (
    "like", "generation", "memory_gib", "tflops", "bandwidth_gb_per_s", "watts", "multiprocessors", "link",
    "network", "gpus_per_node", "aliases",
)  # fmt: skip
_LINK_KEYS = ("bandwidth_gb_per_s", "latency_us", "ports", "network")
_EXAMPLE = "docs/devices.md has an example"


@dataclass(frozen=True, slots=True)
class OwnCatalogue:
    """What a file adds to the catalogue; a name that the catalogue has is replaced."""

    devices: Mapping[str, CatalogueDevice] = field(default_factory=dict)
    links: Mapping[str, CatalogueLink] = field(default_factory=dict)


def own_catalogue(path: str | Path | None = None, env: Mapping[str, str] = os.environ) -> OwnCatalogue:
    """Read the devices and links of one file: this one, or that of MEGATUNE_DEVICES, or devices.yaml in the user's
    folder where there is one.

    Raises:
        MegatuneError: INPUT, where the file named cannot be read; SETTINGS, with everything that is wrong in it.
    """
    named = path or env.get(VARIABLE)
    file = Path(named) if named else user_folder(env) / "devices.yaml"
    if not named and not file.is_file():
        return OwnCatalogue()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = "" if path or not named else f"environment, {VARIABLE}"
        raise MegatuneError(Finding(f"cannot read {file}", where, reason), ExitCode.INPUT) from None
    reader = _Reader(str(file))
    own = reader.catalogue(text)
    if reader.findings:
        raise MegatuneError(reader.findings, ExitCode.SETTINGS)
    return own


class _Fields(NamedTuple):
    """The keys of one device or link, each with its node, and its place in the file."""

    name: str
    where: str
    nodes: dict[str, yaml.Node]


class _Reader:
    """Reads a file and keeps what is wrong with it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.findings: list[Finding] = []

    def catalogue(self, text: str) -> OwnCatalogue:
        try:
            node = compose(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.file}:{mark.line + 1}" if mark else self.file
            self.findings.append(Finding("not readable as YAML", where, getattr(error, "problem", None) or str(error)))
            return OwnCatalogue()
        if node is None:
            return OwnCatalogue()
        parts = self._mapping(node, "the file", ("devices", "links"))
        links = {each.name: self._link(each) for each in self._entries(parts, "links", _LINK_KEYS)}
        known_links = {**CATALOGUE_LINKS, **{name: link for name, link in links.items() if link}}
        devices: dict[str, CatalogueDevice] = {}
        for each in self._entries(parts, "devices", _DEVICE_KEYS):
            if device := self._device(each, {**CATALOGUE_DEVICES, **devices}, known_links):
                devices[device.device.name] = device
        return OwnCatalogue(devices, {name: link for name, link in links.items() if link})

    def _where(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"

    def _refuse(self, node: yaml.Node, what: str, why: str = "", fix: str = "") -> None:
        self.findings.append(Finding(what, self._where(node), why, fix))

    def _mapping(self, node: yaml.Node, what: str, known: tuple[str, ...] | None = None) -> dict[str, yaml.Node]:
        """Return the nodes of a mapping by key; with `known`, other keys are refused."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, f"{what} holds no `key: value` lines", fix=_EXAMPLE)
            return {}
        found: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
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

    def _entries(self, parts: dict[str, yaml.Node], part: str, keys: tuple[str, ...]) -> list[_Fields]:
        nodes = self._mapping(parts[part], part) if part in parts else {}
        return [
            _Fields(name, self._where(node), self._mapping(node, f"{part}: {name}", keys))
            for name, node in nodes.items()
        ]

    def _number(self, fields: _Fields, key: str) -> float | None:
        return self._positive(fields.nodes.get(key), f"{fields.name}: {key}")

    def _positive(self, node: yaml.Node | None, what: str) -> float | None:
        """Return a number above 0; None where it is absent or refused."""
        if node is None:
            return None
        data = self._data(node)
        if isinstance(data, bool) or not isinstance(data, int | float) or not (0 < data < math.inf):
            self._refuse(node, f"{what}: {data!r} is not a number above 0")
            return None
        return float(data)

    def _count(self, fields: _Fields, key: str) -> int | None:
        value = self._number(fields, key)
        if value is not None and not value.is_integer():
            self._refuse(fields.nodes[key], f"{fields.name}: {key}: {value} is not a whole number")
            return None
        return None if value is None else int(value)

    def _choice(self, fields: _Fields, key: str, known: Collection[str]) -> str | None:
        if (node := fields.nodes.get(key)) is None:
            return None
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        if (split_ports(text, known)[0] if key == "network" else text) not in known:
            near = nearest_names(text, known, cutoff=0.4) or list(known)
            self._refuse(node, f"{fields.name}: there is no {key} {text!r}", fix=f"one of {', '.join(near)}")
            return None
        return text

    def _data(self, node: yaml.Node) -> object:
        try:
            return value_of(node).data
        except yaml.YAMLError as error:
            return getattr(error, "problem", None) or str(error)

    def _link(self, fields: _Fields) -> CatalogueLink | None:
        before = len(self.findings)
        bandwidth = self._number(fields, "bandwidth_gb_per_s")
        latency = self._number(fields, "latency_us")
        ports = self._count(fields, "ports")
        network = self._data(fields.nodes["network"]) if "network" in fields.nodes else False
        if not isinstance(network, bool):
            self._refuse(fields.nodes["network"], f"{fields.name}: network: {network!r} is neither true nor false")
        self._require(fields, ("bandwidth_gb_per_s", "latency_us"))
        if bandwidth is None or latency is None or len(self.findings) > before:
            return None
        link = Link(name=fields.name, bandwidth=bandwidth * 1e9, latency=latency * 1e-6)
        return CatalogueLink(link, self.file, ports, between_machines=bool(network))

    def _device(
        self, fields: _Fields, devices: Mapping[str, CatalogueDevice], links: Mapping[str, CatalogueLink]
    ) -> CatalogueDevice | None:
        before = len(self.findings)
        like = self._choice(fields, "like", devices)
        base = devices[like] if like else None
        inside, between = ([name for name in links if links[name].between_machines == kind] for kind in (False, True))
        memory, bandwidth = self._number(fields, "memory_gib"), self._number(fields, "bandwidth_gb_per_s")
        numbers: dict[str, Any] = {
            "generation": self._choice(fields, "generation", GENERATIONS),
            "memory": None if memory is None else int(memory * 2**30),
            "flops": self._peaks(fields, base),
            "bandwidth": None if bandwidth is None else bandwidth * 1e9,
            "link": self._choice(fields, "link", inside),
            "watts": self._number(fields, "watts"),
            "multiprocessors": self._count(fields, "multiprocessors"),
        }
        machine: dict[str, Any] = {
            "network": self._choice(fields, "network", between),
            "gpus_per_node": self._count(fields, "gpus_per_node"),
        }
        aliases = self._texts(fields, "aliases")
        if "like" not in fields.nodes:
            self._require(fields, ("generation", "memory_gib", "tflops", "bandwidth_gb_per_s", "link"))
        if len(self.findings) > before:
            return None
        numbers, machine = ({key: each[key] for key in each if each[key] is not None} for each in (numbers, machine))
        if base is None:
            device = Device(name=fields.name, **numbers)
            return CatalogueDevice(device=device, aliases=aliases, **{"network": "ethernet-25g", **machine})
        device = replace(base.device, name=fields.name, **numbers)
        return replace(base, device=device, aliases=aliases, driver_names=(), **machine)

    def _peaks(self, fields: _Fields, base: CatalogueDevice | None) -> Peaks | None:
        if (node := fields.nodes.get("tflops")) is None:
            return None
        nodes = self._mapping(node, f"{fields.name}: tflops", DTYPES)
        read = {dtype: self._positive(each, f"{fields.name}: tflops: {dtype}") for dtype, each in nodes.items()}
        peaks = {**(base.device.flops if base else {}), **{key: value * 1e12 for key, value in read.items() if value}}
        if missing := [dtype for dtype in DTYPES if dtype not in peaks and dtype not in read]:
            self._refuse(node, f"{fields.name}: tflops has no {', '.join(missing)}", fix=f"give {', '.join(DTYPES)}")
        return Peaks(peaks)

    def _texts(self, fields: _Fields, key: str) -> tuple[str, ...]:
        if (node := fields.nodes.get(key)) is None:
            return ()
        if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return tuple(item.value for item in node.value)
        self._refuse(node, f"{fields.name}: {key} is not a list of names", fix=f"{key}: [name, another]")
        return ()

    def _require(self, fields: _Fields, keys: tuple[str, ...]) -> None:
        if missing := [key for key in keys if key not in fields.nodes]:
            self.findings.append(Finding(f"{fields.name} has no {', '.join(missing)}", fields.where, fix=_EXAMPLE))
