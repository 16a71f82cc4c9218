"""Checks of the network: host names, ports and interfaces for the rendezvous, and hubs that a run needs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from megatune.doctor.check import Check, Verdict, check
from megatune.hub.repository import Hub
from megatune.hub.upload import endpoint

_CONNECT_SECONDS = 5.0
_check = partial(check, "network")


def network(address: str, port: int, *, first: bool, several: bool) -> Iterator[Check]:
    """Check what this machine needs for the rendezvous.

    Args:
        address, port: the address on which rank 0 listens.
        first: whether rank 0 is on this machine.
        several: whether there are other machines.
    """
    yield _own_name(several)
    if several:
        yield _resolves(address)
    if first:
        yield _port(port)
    yield from _interfaces(os.environ)
    yield from _infiniband()


def _own_name(several: bool) -> Check:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        why, verdict = f"{error}: gloo listens on the address of this name", Verdict.FAIL if several else Verdict.WARN
        return _check("host name", name, False, why, fix, verdict)
    why = "other machines would get a loopback address, which is their own"
    fix = f"write the machine's address for {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    return _check("host name", f"{name} is {address}", not (several and address.startswith("127.")), why, fix)


def _resolves(address: str) -> Check:
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(address, None)})
    except OSError as error:
        return _check("MASTER_ADDR", address, False, str(error), "set it to the address of the machine of rank 0")
    return _check("MASTER_ADDR", f"{address} is {', '.join(found)}")


def _port(port: int) -> Check:
    from megatune.errors import MegatuneError
    from megatune.launch.world import ensure_port_free

    try:
        ensure_port_free(port)
    except MegatuneError as error:
        finding = error.findings[0]
        return _check(f"port {port}", finding.what, False, finding.why, finding.fix)
    return _check(f"port {port}", "free")


def _interfaces(env: Mapping[str, str]) -> Iterator[Check]:
    """Check that interfaces named by variables exist; NCCL's may be prefixes, after ^ or =."""
    existing = psutil.net_if_addrs()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if value := env.get(name, ""):
            wanted = [part for part in value.lstrip("^=").split(",") if part]
            found = all(any(each.startswith(part) for each in existing) for part in wanted)
            why = f"this machine has {', '.join(sorted(existing))}"
            yield _check(name, value, found or value.startswith("^"), why, f"unset it, or {name}=one of them")


def _infiniband(root: Path = Path("/sys/class/infiniband")) -> Iterator[Check]:
    """Check the state of each InfiniBand port: "4: ACTIVE"."""
    why, fix = "NCCL does not use it: communication is slower", "check its cable, or the subnet manager"
    for state in sorted(root.glob("*/ports/*/state")):
        name, text = f"{state.parts[-4]} port {state.parts[-2]}", state.read_text().strip()
        yield _check(name, text, text.endswith("ACTIVE"), why, fix, Verdict.WARN)


def hub(kind: Hub, what: str) -> Check:
    """Check that a hub answers, from which `what` is downloaded."""
    host, _, port = endpoint(kind).partition(":")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return Check("network", host, Verdict.SKIP, f"HF_HUB_OFFLINE is set: {what} is read from the cache")
    if proxy := os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
        return Check("network", host, Verdict.SKIP, f"{what} is downloaded through a proxy: {urlsplit(proxy).hostname}")
    try:
        socket.create_connection((host, int(port or 443)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        fix = "set a proxy (https_proxy) or a mirror (HF_ENDPOINT), or use a local folder"
        return _check(host, "does not answer", False, f"{what} is downloaded from it: {error}", fix)
    return _check(host, f"answers, for {what}")
