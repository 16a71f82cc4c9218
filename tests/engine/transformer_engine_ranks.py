"""Prints, as JSON, how far gradients of models of the stand-in's layers are from those of the engine's own layers, and
which layers they are. A process of its own: Megatron-Core must find the package when it is first imported."""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pool


def measured(model: Path, settings: Any) -> tuple[float, dict[str, Any], list[str]]:
    """On a rank: the loss, its gradients, and classes of Megatron-Core's wrappers that were built for them."""
    import settings_gradients as measuring

    from megatune.engine.layers import linear

    linear.why_unavailable = lambda: ""  # of a stand-in the CPU is no obstacle
    built, assemble = set[str](), measuring.assemble

    def assemble_and_look(*args: Any) -> Any:
        assembly = assemble(*args)
        for chunk in assembly.model:
            built.update(name for each in chunk.modules() if (name := type(each).__name__).startswith("TE"))
        return assembly

    measuring.assemble = assemble_and_look
    try:
        loss, gradients, _ = measuring.measure_gradients(model, settings, measuring.cross_entropy.CHUNK_BYTES)
    finally:
        measuring.assemble = assemble
    return loss, gradients, sorted(built)


def main(cases: list[tuple[str, str]]) -> None:
    import transformer_engine_stand_in  # noqa: F401  (before Megatron-Core)
    from layouts import LAYOUTS
    from settings_gradients import worst_error

    ranks = pool.RankPool(2)
    ranks._context = multiprocessing.get_context("fork")  # all that ranks need is imported here

    for model, layout in cases:
        found, truth = (
            ranks.run(
                LAYOUTS[layout].world_size,
                measured,
                Path(model),
                replace(LAYOUTS[layout], performance={"transformer_impl": impl}).settings(),
            )
            for impl in ("transformer_engine", "native")
        )
        # Of the norms inside of projections Megatron-Core's name, the map has the engine's.
        renamed = [(loss, {engine_name(name): each for name, each in one.items()}, used) for loss, one, used in found]
        print(
            json.dumps(
                [
                    worst_error(renamed, truth),
                    [one[0] for one in found],
                    [one[0] for one in truth],
                    found[0][2],
                    truth[0][2],
                ]
            )
        )
    ranks.close()


def engine_name(name: str) -> str:
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


if __name__ == "__main__":
    main([tuple(each.split("=")) for each in sys.argv[1:]])
