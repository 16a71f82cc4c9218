"""A plan of reinforcement learning: in words and tables, and as one JSON document of bytes and seconds."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megatune.config.rl.settings import InferRole, ModelRole
from megatune.plan.case import Case
from megatune.plan.flops import num_parameters
from megatune.plan.memory.estimate import COMMUNICATOR, CONTEXT
from megatune.plan.pages.page import Page, show_pages, words_page
from megatune.plan.pages.tables import wrapped
from megatune.plan.pages.words import (
    Unit,
    amount,
    bytes_unit,
    columns,
    count,
    duration,
    layout_words,
    machine_words,
    recompute_words,
    seconds,
    seconds_unit,
    size,
)
from megatune.plan.rl.advice import advice
from megatune.plan.rl.answer import DeviceGroup, RLAnswer
from megatune.plan.rl.engine import GRAPHS
from megatune.plan.rl.held import OLD_PASS
from megatune.plan.rl.passes import forward_case, num_updates, training_case
from megatune.plan.rl.question import RLQuestion
from megatune.plan.rl.seconds import HOST_BANDWIDTH, STORE_BANDWIDTH, sync_bytes


def show(found: RLAnswer) -> None:
    """Print the plan."""
    show_pages(lambda width: pages(found, width))


def pages(found: RLAnswer, width: int = 80) -> Iterator[Page]:
    """Yield what is planned, memory by device and phase, seconds by phase, and what was assumed."""
    yield words_page("", _head(found, width))
    yield words_page("", _role_lines(found, width))
    yield words_page("", _memory(found, width))
    if not found.fits:
        yield words_page("What would make it fit", (line for text in advice(found) for line in wrapped(text, width)))
    yield words_page("", _time(found, width))
    yield words_page("Assumed", (line for note in notes(found) for line in wrapped(f"- {note}", width)))


def device_words(devices: Sequence[int]) -> str:
    """Write devices as runs: 0-15, 24."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _head(found: RLAnswer, width: int) -> Iterator[str]:
    question, settings, lengths = found.question, found.question.settings, found.question.lengths

    def entry(name: str, text: str) -> list[str]:
        return textwrap.wrap(text, width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)

    yield from entry("models", _models(question))
    yield from entry("devices", machine_words(question.machine, question.world_size))
    prompts, group = settings.rollout.rollout_batch_size, settings.rollout.num_return_sequences_in_group
    yield from entry("samples", f"{count(prompts, 'prompt')} × {count(group, 'response')} a step")
    longest = f"at most {lengths.prompt:,} + {lengths.response:,}, which memory is planned for"
    mean = f"on average {lengths.mean_prompt:,.0f} + {lengths.mean_response:,.0f}, which time is"
    yield from entry("tokens", f"of prompt and response {longest}; {mean}; {lengths.share_cut:.0%} are cut")


def _role_lines(found: RLAnswer, width: int) -> Iterator[str]:
    """A row for each role; where that is too wide, a paragraph."""
    question = found.question
    rows = [["role", "devices", "layout", "batch"]]
    rows += [[role.name, device_words(role.devices), *_layout(question, role)] for role in question.model_roles]
    rows += [[role.name, device_words(role.devices), *_engine(found, role)] for role in question.infer_roles]
    lines = list(columns(rows, left=(0, 1, 2, 3)))
    if max(map(len, lines)) > width:
        lines = [line for row in rows[1:] for line in wrapped(f"{row[0]}: {'; '.join(row[1:])}", width, "")]
    yield from lines


def _models(question: RLQuestion) -> str:
    """Write each model with its roles."""
    roles: dict[str, list[str]] = {}
    for name in question.devices:
        model = question.models.get(name)
        words = (
            f"{_short(model.name)}, {amount(num_parameters(model.architecture))} parameters" if model else "not known"
        )
        roles.setdefault(words, []).append(name)
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in roles.items())


def _short(name: str) -> str:
    return name.rstrip("/").split("/")[-1]


def _layout(question: RLQuestion, role: ModelRole) -> tuple[str, str]:
    if role.training:
        case, updates = training_case(question, role, longest=False), num_updates(question, role)
        again = recompute_words(case.settings.recompute)
        layout = f"{layout_words(case)}{f', recompute {again}' if again != 'none' else ''}"
        return layout, f"{_batch(case)}, {updates:g} update{'s' * (updates != 1)}"
    case = forward_case(question, role, longest=False)
    return layout_words(case), _batch(case)


def _batch(case: Case) -> str:
    """Write rows of a micro-batch × micro-batches × data-parallel processes."""
    return f"{case.micro_batch_size}×{case.num_micro_batches}×{case.dp_size}"


def _engine(found: RLAnswer, role: InferRole) -> tuple[str, str]:
    engines = f"{role.engine}, {count(role.num_engines, 'engine')} of {role.devices_per_engine}"
    at_once = found.seconds.rollout.at_once if role.name == "actor_infer" else role.infer_batch_size
    return engines, f"{at_once:.0f} at once"


def _memory(found: RLAnswer, width: int) -> Iterator[str]:
    """A table for each kind of device: a row for each role, a column for each phase; then the verdict."""
    group, phase = found.fullest
    unit, limit = bytes_unit(group.total(phase)), found.question.machine.device.memory
    yield f"Memory of a device, {unit.name}, phase by phase"
    for each in found.groups:
        yield from (f"  {line}" for line in _group_lines(found, each, unit, width))
    held = group.total(phase)
    devices = f"device{'s' * (len(group.devices) > 1)} {device_words(group.devices)}"
    said = f"The fullest: {devices} in phase {phase}, {unit.of(held)} of {unit.with_name(limit)}, {held / limit:.0%}."
    verdict = f"It fits, with {unit.with_name(limit - held)} to spare."
    if held > limit:
        verdict = f"IT DOES NOT FIT: {unit.with_name(held - limit)} too much."
    elif not found.has_cache:
        verdict = f"IT DOES NOT FIT: {_no_cache(found)}"
    yield from wrapped(f"{said} {verdict}", width, "")
    for role in group.held:
        biggest = sorted(role.parts[phase].items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name.replace('_', ' ')} {unit.of(part)}" for name, part in biggest if part)
        yield from wrapped(f"{role.role}: {parts}", width, "  ")
    if host := found.host_bytes:
        yield from wrapped(f"Offloaded roles have {size(host)} in the main memory of a machine.", width, "")


def _group_lines(found: RLAnswer, group: DeviceGroup, unit: Unit, width: int) -> Iterator[str]:
    names = [*found.phases]
    rows = [[f"devices {device_words(group.devices)}", *names]]
    rows += [[f"  {role.role}", *(unit.of(role.total(phase)) for phase in names)] for role in group.held]
    if len(group.held) > 1:
        rows.append(["  total", *(unit.of(group.total(phase)) for phase in names)])
    lines = list(columns(rows))
    if max(map(len, lines)) + 2 > width:
        lines = list(columns([[cell.strip() for cell in row] for row in zip(*rows, strict=True)]))
    yield from lines


def _no_cache(found: RLAnswer) -> str:
    engine, longest = found.engine, found.question.lengths.longest
    if engine.cache <= 0:
        return (
            f"an engine's weights leave no room for keys and values ({size(-engine.cache)} are missing on each device)."
        )
    return f"an engine's cache holds {engine.cached_tokens:,} tokens, the longest sample has {longest:,}."


def _time(found: RLAnswer, width: int) -> Iterator[str]:
    """A row for each phase, tokens/s, and what the rollouts wait for."""
    time, question = found.seconds, found.question
    unit, factor = seconds_unit(time.total), 1 + time.uncertainty
    beside = "; rollouts of the next steps run concurrently" if time.overlaps else ""
    yield f"Time of a step, {unit.name}{beside}"
    whole = time.total
    rows = [[name, unit.of(each), f"{each / whole:.1%}", "█" * round(30 * each / whole)]
            for name, each in time.phases.items()]  # fmt: skip
    likely = f"likely {unit.of(whole / factor)} to {unit.of(whole * factor)}"
    yield from (f"  {line}" for line in columns([*rows, ["total", unit.of(whole), "", likely]], left=(0, 3)))
    rate = f"{time.tokens / whole:,.0f} tokens/s, {time.tokens_per_second_per_gpu:,.0f} a device"
    steps = question.settings.run.max_steps
    yield from wrapped(f"{rate}; {steps:,} steps take {duration(steps * whole)}", width, "")
    yield from wrapped(_rollout_words(found), width, "")
    if time.overlaps:
        rollout, trainer = 1 - time.rollout_side / whole, 1 - time.trainer_side / whole
        yield from wrapped(
            f"Waiting: devices of the rollouts {rollout:.0%} of a step, the others {trainer:.0%}.", width, ""
        )


def _rollout_words(found: RLAnswer) -> str:
    rollout, infer, engine = found.seconds.rollout, found.question.settings.actor_infer, found.engine
    text = f"Rollouts: each of {count(infer.num_engines, 'engine')} samples {rollout.at_once:.0f} sequences at once"
    text += f" (its cache holds {engine.cached_tokens:,} tokens), {seconds(rollout.busy_step)} for a token of each"
    if found.seconds.overlaps:
        return f"{text}."
    last = f"{seconds(rollout.last_step)} where one is left"
    if not rollout.full:
        return f"{text}, {last}; none waits for a place."
    return f"{text}, {last}; for {rollout.full / rollout.decode:.0%} of the time others wait for a place."


def notes(found: RLAnswer) -> Iterator[str]:
    """List the user's own notes, then what is taken for granted, with the numbers behind it."""
    question, settings = found.question, found.question.settings
    device, on_cpu = question.machine.device, question.machine.device.generation == "cpu"
    yield from question.notes
    yield f"{device.name}: {size(device.memory)} can be used, {device.bandwidth / 1e9:,.4g} GB/s of memory bandwidth"
    yield "responses end with a constant chance at each token, and are cut at the longest length"
    yield "no group is filtered, and rewards are computed while others are sampled: neither takes time of its own"
    if on_cpu:
        yield "on a CPU offloaded weights stay in the same memory"
    else:
        yield (
            f"every role on a device is a process of its own: its context takes {CONTEXT >> 20:,} MiB, each group of "
            f"NCCL {COMMUNICATOR >> 20:,} MiB, an engine's captured graphs {GRAPHS >> 20:,} MiB; all of it stays while "
            "others have their turn, and none of it was measured"
        )
    rates = f"{STORE_BANDWIDTH / 1e9:g} GB/s to and from Ray's objects"
    rates += "" if on_cpu else f", {HOST_BANDWIDTH / 1e9:g} GB/s between a device and main memory"
    bucket = settings.run.model_update_buffer_size_mb
    yield f"sync: {size(sync_bytes(question))} of weights in buckets of {bucket:,} MB, {rates}"
    if OLD_PASS not in found.phases:
        yield "old log-probabilities are those of the rollouts: they are not computed again"
    yield (
        f"of published runs, whose lengths are known, two of three lie within ± {found.seconds.uncertainty:.0%}; all "
        "took longer than planned without sync (docs/plan-rl.md)"
    )


def document(found: RLAnswer) -> dict[str, Any]:
    """Return the whole answer."""
    question, time = found.question, found.seconds
    group, phase = found.fullest
    return {
        "file": question.file,
        "machine": {
            "device": question.machine.device.name,
            "memory": question.machine.device.memory,
            "gpus_per_node": question.machine.gpus_per_node,
        },
        "world_size": question.world_size,
        "samples": question.settings.samples_per_step,
        "lengths": dataclasses.asdict(question.lengths),
        "fits": found.fits,
        "fullest": {"devices": list(group.devices), "phase": phase, "bytes": group.total(phase)},
        "devices": [
            {
                "devices": list(each.devices),
                "roles": {held.role: {"phases": held.parts, "offloaded": held.offloaded} for held in each.held},
                "total": {name: each.total(name) for name in found.phases},
            }
            for each in found.groups
        ],
        "host_bytes_of_a_machine": found.host_bytes,
        "engine": dataclasses.asdict(found.engine),
        "rollout": dataclasses.asdict(time.rollout),
        "seconds": {**time.phases, "total": time.total},
        "rollouts_run_ahead": time.overlaps,
        "uncertainty": time.uncertainty,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "advice": [] if found.fits else advice(found),
        "assumptions": list(notes(found)),
    }
