"""Finds devices, links and machines by the names that users or drivers give, and well-known models."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megatune.errors import ExitCode, Finding, MegatuneError, nearest_names
from megatune.plan.catalogue.devices import DTYPES, DeviceFields, LinkFields, catalogue, split_ports
from megatune.plan.catalogue.models import MODELS, find_model
from megatune.plan.catalogue.own import own_catalogue
from megatune.plan.machine import Device, Link, Machine

T = TypeVar("T")

# Words around a device's name that are ignored.
_NOISE = re.compile(r"\b(?:nvidia|tesla|geforce|quadro)\b")
# FLOP/s of a core with AVX2: two multiply-adds of 256 bits per cycle at 3 GHz.
_CORE_FLOPS = 96e9
# Bytes/s of one memory channel, which is about the limit of one core.
_CORE_BANDWIDTH = 12e9
_FIX = "give one of these, or its numbers in a file: --devices FILE (docs/devices.md)"
__all__ = [
    "MODELS",
    "cpu_machine",
    "device_by_driver_name",
    "device_names",
    "find_machine",
    "find_model",
    "machine_assumptions",
]


def plain_name(name: str) -> str:
    """Normalize a device's name for comparison: "NVIDIA A100-SXM4-80GB" -> "a100sxm480g"."""
    words = re.sub(r"[^a-z0-9]+", " ", _NOISE.sub(" ", name.lower()))
    return re.sub(r"\b(\d+)gb\b", r"\1g", words).replace(" ", "")


def device_by_driver_name(name: str) -> Device | None:
    """Find a device by the name that its driver reports, "NVIDIA H100 80GB HBM3"; None if unknown."""
    wanted = plain_name(name)
    entries = catalogue().devices.items()
    return next((each.device(key) for key, each in entries if wanted in map(plain_name, each.driver_names)), None)


def device_names(devices_file: str | Path | None = None) -> list[str]:
    """Return the names of all devices, including the user's own, see `own_catalogue`."""
    return list({**catalogue().devices, **own_catalogue(devices_file).devices})


def find_machine(
    gpu: str,
    *,
    gpus_per_node: int | None = None,
    link: str | None = None,
    network: str | None = None,
    devices_file: str | Path | None = None,
) -> Machine:
    """Return machines with this device; None selects what is usual for the device (`machine_assumptions`).

    Args:
        gpu: a device's name in the catalogue, an alias ("a100", "4090"), or its driver's name.
        link: the interconnect inside a machine, by its name in the catalogue.
        network: the interconnect between machines: "ib-400" has one port per device, "ib-400x4" four ports per machine,
            shared by its devices, "ethernet-25g" one port per machine.
        devices_file: YAML with the user's own devices (`own_catalogue`).

    Raises:
        MegatuneError: INPUT, with all unknown names and the nearest ones; or the findings about the file.
    """
    own = own_catalogue(devices_file)
    findings: list[Finding] = []
    links = {**catalogue().links, **own.links}
    devices = {**catalogue().devices, **own.devices}
    entry = _collect(findings, lambda: _entry(gpu, devices, own.devices))
    fields = devices[entry] if entry else None
    if gpus_per_node is not None and gpus_per_node < 1:
        findings.append(
            Finding(f"gpus_per_node: {gpus_per_node} is not a valid number of GPUs", fix="gpus_per_node: 8")
        )
    size = gpus_per_node or (fields.gpus_per_node if fields else 1)
    # If the device is unknown, other names are still checked, with arbitrary defaults.
    inside = link or (fields.link if fields else None) or "pcie4"
    between = network or (fields.network if fields else "ib-400")
    found_link = _collect(findings, lambda: _link(inside, links, size, network=False))
    found_network = _collect(findings, lambda: _link(between, links, size, network=True))
    if entry is None or fields is None or found_link is None or found_network is None or findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return Machine(device=fields.device(entry), gpus_per_node=size, link=found_link, network=found_network)


def machine_assumptions(
    machine: Machine, *, gpus_per_node: int | None = None, link: str | None = None, network: str | None = None
) -> tuple[str, ...]:
    """List what `find_machine` assumed for None, with the flag that overrides it."""
    inside, between = (f"{each.name}, {each.bandwidth / 1e9:.3g} GB/s" for each in (machine.link, machine.network))
    lines = (
        (gpus_per_node, f"{machine.gpus_per_node} GPUs a machine (--gpus_per_node)"),
        (link, f"GPUs of a machine connected by {inside} each way (--link)"),
        (network, f"machines connected by {between} a GPU each way (--network)"),
    )
    return tuple(text for given, text in lines if given is None)


def cpu_machine(memory_bytes: int, cores: int, processes: int = 1) -> Machine:
    """Return this host as a machine whose processes share memory and cores evenly; speeds per core are rough."""
    share = cores / processes
    device = Device(
        name="cpu",
        generation="cpu",
        memory=memory_bytes // processes,
        flops=dict.fromkeys(DTYPES, _CORE_FLOPS * share),
        bandwidth=_CORE_BANDWIDTH * share,
        link="loopback",
    )
    loopback, ethernet = (catalogue().links[name].link(name) for name in ("loopback", "ethernet-10g"))
    network = replace(ethernet, bandwidth=ethernet.bandwidth / processes)
    return Machine(device=device, gpus_per_node=processes, link=loopback, network=network)


def _collect(findings: list[Finding], find: Callable[[], T]) -> T | None:
    try:
        return find()
    except MegatuneError as error:
        findings.extend(error.findings)
        return None


def _entry(name: str, entries: Mapping[str, DeviceFields], own: Collection[str]) -> str:
    """Return the device's name in the catalogue; names of the user's `own` devices take precedence."""
    by_name = {plain_name(each): key for key, one in entries.items() for each in (*one.driver_names, *one.aliases)}
    by_name |= {plain_name(key): key for key in entries}
    by_name |= {plain_name(each): key for key in own for each in entries[key].aliases}
    wanted = plain_name(name)
    if key := by_name.get(wanted):
        return key
    # The most similar names, those of the same chip first.
    chip = re.match(r"[a-z]+\d{1,3}", wanted)
    near = [each for each in by_name if chip and each.startswith(chip[0])][:4]
    near += nearest_names(wanted, by_name, cutoff=0.5)
    listed = ", ".join(dict.fromkeys(by_name[each] for each in near))
    why = f"nearest: {listed}" if near else f"it has {', '.join(entries)}"
    raise MegatuneError(Finding(f"gpu: there is no device {name!r} in the catalogue", "", why, _FIX), ExitCode.INPUT)


def _link(name: str, links: Mapping[str, LinkFields], gpus_per_node: int, *, network: bool) -> Link:
    """Return the link with the bandwidth of one device."""
    kind = "network" if network else "link"
    of_kind = [each for each, entry in links.items() if entry.network == network]
    base, ports = split_ports(name, links)
    if base not in of_kind or (ports and not network):
        near = nearest_names(base, of_kind, cutoff=0.4) or of_kind
        what, why = f"{kind}: there is no {kind} {name!r} in the catalogue", f"nearest: {', '.join(near)}"
        raise MegatuneError(Finding(what, "", why, _FIX), ExitCode.INPUT)
    of_port = links[base].link(base)
    ports = ports or links[base].ports
    if ports is None:
        return of_port
    return replace(of_port, name=name, bandwidth=of_port.bandwidth * ports / gpus_per_node)
