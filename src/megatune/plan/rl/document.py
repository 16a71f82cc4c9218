"""A plan of reinforcement learning as one JSON document: bytes and seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatune.plan.rl.advice import advice
from megatune.plan.rl.answer import RLAnswer
from megatune.plan.rl.notes import notes


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
