"""Compares kinds of GPUs for one run: where it fits, how long it takes, and what it costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.pages import Item, Page, Table
from megatune.plan.answer import Question
from megatune.plan.catalogue import device_names, find_machine
from megatune.plan.estimate import Estimate
from megatune.plan.pages.words import amount, bytes_unit, describe_layout, duration, seconds
from megatune.plan.search import search

ANY = "any"


def kinds_of(gpu: str | None, devices_file: str | None) -> list[str]:
    """Return the kinds of GPUs if --gpu has several; [] for one or none.

    Raises:
        MegatuneError: INPUT, with every unknown kind; SETTINGS, see `own_catalogue`.
    """
    if gpu is None or (gpu != ANY and "," not in gpu):
        return []
    requested = device_names(devices_file) if gpu == ANY else [name.strip() for name in gpu.split(",") if name.strip()]
    names: list[str] = []
    findings: list[Finding] = []
    for name in requested:
        try:
            names.append(find_machine(name, devices_file=devices_file).device.name)
        except MegatuneError as error:
            findings += error.findings
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return list(dict.fromkeys(names))


def prices_of(texts: Sequence[str], kinds: Sequence[str], devices_file: str | None) -> dict[str, float]:
    """Read KIND=PRICE: the price of one GPU for an hour, in any currency.

    Raises:
        MegatuneError: SETTINGS, with everything that is not a price of one of the kinds.
    """
    prices: dict[str, float] = {}
    findings: list[Finding] = []
    for text in (part for each in texts for part in each.split(",") if part):
        kind, _, price = text.partition("=")
        try:
            name = find_machine(kind, devices_file=devices_file).device.name
            prices[name] = float(price)
            valid = 0 <= prices[name] < math.inf and name in kinds
        except (MegatuneError, ValueError):
            valid = False
        if not valid:
            fix = f"KIND=PRICE of a GPU for an hour, such as {kinds[0]}=2.5"
            findings.append(Finding(f"{text!r} is not a price of one of these kinds", "--price", fix=fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return prices


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The best layout of a run on one kind of GPU.

    Attributes:
        found: the best layout; None if none fits.
        price: of one GPU for an hour; None if not given.
    """

    question: Question
    found: Estimate | None
    price: float | None = None

    @property
    def kind(self) -> str:
        return self.question.case.machine.device.name

    @property
    def hours(self) -> float | None:
        """Hours of the whole run; None if its length is unknown."""
        whole = None if self.found is None else self.question.run_seconds(self.found)
        return None if whole is None else whole[0] / 3600

    @property
    def cost(self) -> float | None:
        hours = self.hours
        return None if hours is None or self.price is None else hours * self.price * self.question.case.world_size

    @property
    def order(self) -> tuple[bool, float, float]:
        """A sort key: kinds that fit first, by cost, or by time without prices."""
        if self.found is None:
            return True, 0.0, -self.question.case.machine.device.memory
        return False, math.inf if self.cost is None else self.cost, self.found.time.total


def offers(kinds: Sequence[str], ask: Callable[[str], Question], prices: Mapping[str, float]) -> list[Offer]:
    """Search the best layout on each kind, and sort the kinds."""
    found = []
    for kind in kinds:
        question = ask(kind)
        best = search(question.request).recommended
        found.append(Offer(question=question, found=best, price=prices.get(kind)))
    return sorted(found, key=lambda offer: offer.order)


def pages(found: Sequence[Offer]) -> Iterator[Page]:
    """Yield the run, the table, and the assumptions about the model and the data."""
    question = found[0].question
    yield Page("", _head(question))
    yield Page("", _table(found))
    if (missing := [offer.kind for offer in found if offer.found is None]) and len(missing) < len(found):
        yield Page("", [f"No layout fits: {', '.join(missing)}."])
    notes = [note for note in question.notes if all(note in offer.question.notes for offer in found)]
    notes.append("the price of a run is that of its GPUs only")
    notes.append("machines and networks are those usual for a kind; plan one kind alone to see its assumptions")
    yield Page("Assumed", (f"  - {note}" for note in notes))


def _head(question: Question) -> Iterator[str]:
    rows = f"{counted(question.global_batch_size, 'row')} a step"
    yield f"{question.case.model.name} on {counted(question.case.world_size, 'GPU')} of each kind, {rows}"
    if question.dataset_tokens is not None:
        yield f"{amount(question.dataset_tokens)} tokens"
    elif question.case.settings.optimizer.max_steps > 0:
        yield f"{question.case.settings.optimizer.max_steps:,} steps"
    else:
        yield "add --dataset_tokens N, such as 40M, for the duration and the cost of the run"


def _table(found: Sequence[Offer]) -> Iterator[Item]:
    fitting = [(offer, offer.found) for offer in found if offer.found is not None]
    if not fitting:
        yield "NO LAYOUT FITS on any of these."
        return
    unit = bytes_unit(max(best.fullest.total for _, best in fitting))
    rows = [["gpu", "layout", unit.name, "step", "tokens/s", "time", "price"]]
    for offer, best in fitting:
        hours, cost = offer.hours, offer.cost
        held = unit.of(best.fullest.total) + "!" * best.is_tight
        took = "" if hours is None else duration(3600 * hours)
        speed = [seconds(best.time.total), f"{best.time.tokens_per_second:,.0f}", took]
        rows.append([offer.kind, describe_layout(best.case), held, *speed, "" if cost is None else f"{cost:,.2f}"])
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    yield Table(rows, (0, 1))
    if any(best.is_tight for _, best in fitting):
        yield "! is tight: a run may hold more than planned"


def document(found: Sequence[Offer]) -> str:
    """Return the table as JSON, in bytes, seconds and hours."""
    rows = [
        {
            "gpu": offer.kind,
            "fits": offer.found is not None,
            "layout": None if offer.found is None else describe_layout(offer.found.case),
            "fullest_bytes": None if offer.found is None else offer.found.fullest.total,
            "seconds": None if offer.found is None else offer.found.time.total,
            "tokens_per_second": None if offer.found is None else offer.found.time.tokens_per_second,
            "hours": offer.hours,
            "price": offer.cost,
        }
        for offer in found
    ]
    question = found[0].question
    head = {
        "model": question.case.model.name,
        "world_size": question.case.world_size,
        "tokens": question.dataset_tokens,
    }
    return json.dumps({**head, "gpus": rows}, indent=2, allow_nan=False, ensure_ascii=False)
