"""Writes the tables of docs/devices.md from the catalogue: `python docs/generate_devices.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatune.plan.catalogue.devices import catalogue
from megatune.plan.catalogue.models import published_names
from megatune.plan.machine import Device
from megatune.plan.time.efficiency import EFFICIENCIES

DOCUMENT = Path(__file__).with_name("devices.md")


def render(page: str) -> str:
    """The page with its tables as the catalogue has them."""
    for table in (
        _device_table(), _link_table(between_machines=False), _link_table(between_machines=True), _model_table(),
    ):  # fmt: skip
        head = re.escape(table.partition("\n")[0])
        page = re.sub(rf"^{head}\n(\|.*\n)*", f"{table}\n", page, flags=re.MULTILINE)
    return page


def _device_table() -> str:
    """Every device: memory, peaks and bandwidth as the planner counts with them, and what is assumed around it."""
    head = (
        "device", "also", "generation", "GiB", "bf16", "fp16", "fp32", "GB/s", "SMs", "W", "reaches", "link", "network",
    )  # fmt: skip
    rows = (
        (
            f"`{name}`",
            ", ".join(f"`{alias}`" for alias in entry.aliases),
            device.generation,
            f"{device.memory / 2**30:.2f}",
            *(f"{peak / 1e12:g}" for peak in device.flops.values()),
            f"{device.bandwidth / 1e9:g}",
            f"{device.multiprocessors}",
            f"{device.watts:g}",
            f"{_reached(device):.0%}",
            device.link,
            entry.network,
        )
        for name, entry in catalogue().devices.items()
        for device in [entry.device(name)]
    )
    return _markdown(head, rows)


def _reached(device: Device) -> float:
    """The share of its 16-bit peak that large products are planned with."""
    assert device.watts is not None
    return EFFICIENCIES[device.generation].dense(max(device.flops.values()) / 1e12, device.watts)


def _link_table(*, between_machines: bool) -> str:
    """Links inside a machine, or networks."""
    head = ("network" if between_machines else "link", "GB/s each way", "latency, µs", "")
    rows = (
        (f"`{name}`", f"{entry.bandwidth_gb_per_s:g}", f"{entry.latency_us:g}", entry.what)
        for name, entry in catalogue().links.items()
        if entry.network == between_machines
    )
    return _markdown(head, rows)


def _model_table() -> str:
    """Well-known models and their other names."""
    rows = ((f"`{name}`", ", ".join(f"`{alias}`" for alias in aliases)) for name, aliases in published_names())
    return _markdown(("model", "also"), rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
