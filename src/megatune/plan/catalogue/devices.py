"""Devices and links in the format of a file: the catalogue `devices.yaml`, or a user's own file."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import Field

from megatune.config.setting import Count, Group, Positive
from megatune.plan.machine import Device, Link

Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cpu"]
# Required keys of a link, and of a device without `like`.
LINK_NEEDS = ("bandwidth_gb_per_s", "latency_us")
DEVICE_NEEDS = ("generation", "memory_gib", "tflops", "bandwidth_gb_per_s", "link")


class LinkFields(Group):
    """Keys of a link. `bandwidth_gb_per_s` is that of one port in one direction. `ports` is the number of ports of a
    machine, shared by its devices; without it each device has its own port, or its own ports inside a machine."""

    bandwidth_gb_per_s: Positive | None = None
    latency_us: Positive | None = None
    network: bool = False
    ports: Count | None = None
    what: str = ""

    def link(self, name: str) -> Link:
        """Return the link, which has all of `LINK_NEEDS`."""
        assert self.bandwidth_gb_per_s is not None
        assert self.latency_us is not None
        return Link(name=name, bandwidth=self.bandwidth_gb_per_s * 1e9, latency=self.latency_us / 1e6)


class PeakFields(Group):
    """TFLOP/s of dense matrix products, by torch name of the dtype."""

    bfloat16: Positive | None = None
    float16: Positive | None = None
    float32: Positive | None = None


class DeviceFields(Group):
    """Keys of a device; missing ones are those of the device in `like`."""

    like: str | None = None
    generation: Generation | None = None
    memory_gib: Positive | None = None
    tflops: PeakFields | None = None
    bandwidth_gb_per_s: Positive | None = None
    watts: Positive | None = None
    multiprocessors: Count | None = None
    link: str | None = None
    network: str = "ethernet-25g"
    gpus_per_node: Count = 8
    aliases: list[str] = Field(default=[])
    driver_names: list[str] = Field(default=[])

    def device(self, name: str) -> Device:
        """Return the device, which has all of `DEVICE_NEEDS`, with a peak for each dtype."""
        numbers: dict[str, Any] = dict(self)
        return Device(
            name=name,
            memory=int(numbers["memory_gib"] * 2**30),
            flops={dtype: peak * 1e12 for dtype, peak in numbers["tflops"]},
            bandwidth=numbers["bandwidth_gb_per_s"] * 1e9,
            **{key: numbers[key] for key in ("generation", "link", "watts", "multiprocessors")},
        )


DTYPES = tuple(PeakFields.model_fields)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Devices and links by name, each with all of `DEVICE_NEEDS` or `LINK_NEEDS`."""

    devices: dict[str, DeviceFields] = field(default_factory=dict)
    links: dict[str, LinkFields] = field(default_factory=dict)


@cache
def catalogue() -> Catalogue:
    """Return the catalogue that ships with megatune."""
    text = files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Catalogue(
        {
            name: DeviceFields(**{**each, "tflops": PeakFields(**each["tflops"])})
            for name, each in content["devices"].items()
        },
        {name: LinkFields(**each) for name, each in content["links"].items()},
    )


def split_ports(name: str, known: Container[str]) -> tuple[str, int | None]:
    """Split a link's name from its ports per machine: "ib-200x4" -> "ib-200", 4; but not a known name."""
    match = re.fullmatch(r"(.+?)x([1-9]\d*)", name)
    return (match[1], int(match[2])) if match and name not in known else (name, None)
