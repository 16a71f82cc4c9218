"""The catalogue as tables in Markdown, for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatune.plan.catalogue.devices import CATALOGUE_DEVICES
from megatune.plan.catalogue.links import CATALOGUE_LINKS
from megatune.plan.catalogue.models import published_names


def device_table() -> str:
    """Every device: memory, peaks and bandwidth as the planner counts with them, and what is assumed around it."""
    head = ("device", "also", "generation", "GiB", "bf16", "fp16", "fp32", "GB/s", "link", "network")
    rows = (
        (
            f"`{entry.device.name}`",
            ", ".join(f"`{alias}`" for alias in entry.aliases),
            entry.device.generation,
            f"{entry.device.memory / 2**30:.2f}",
            *(f"{peak / 1e12:g}" for peak in entry.device.flops.values()),
            f"{entry.device.bandwidth / 1e9:g}",
            entry.device.link,
            entry.network,
        )
        for entry in CATALOGUE_DEVICES.values()
    )
    return _markdown(head, rows)


def link_table(*, between_machines: bool) -> str:
    """Links inside a machine, or networks."""
    head = ("network" if between_machines else "link", "GB/s each way", "latency, µs", "")
    rows = (
        (f"`{name}`", f"{entry.link.bandwidth / 1e9:g}", f"{entry.link.latency * 1e6:g}", entry.what)
        for name, entry in CATALOGUE_LINKS.items()
        if entry.between_machines == between_machines
    )
    return _markdown(head, rows)


def model_table() -> str:
    """Well-known models and their other names."""
    rows = ((f"`{name}`", ", ".join(f"`{alias}`" for alias in aliases)) for name, aliases in published_names())
    return _markdown(("model", "also"), rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
