"""The layouts that LLaMA-Factory's Megatron path publishes: planned, and held against the best that a search finds.

Writes docs/published-layouts.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reporting import markdown_table

from megatune.config.load import load
from megatune.config.settings import Settings
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.layouts import SearchRequest
from megatune.plan.memory.stage import MEMORY_PARTS
from megatune.plan.pages.words import MEMORY_NAMES, TIME_NAMES, describe_layout, describe_recompute
from megatune.plan.search import search
from megatune.plan.time.estimate import TIME_PARTS
from megatune.plan.uncertainty import SPREADS

ROOT = Path(__file__).parents[1]
PAGE, EXAMPLES_FOLDER = ROOT / "docs" / "published-layouts.md", ROOT / "examples" / "vision"
GPU = "a100-80g"
_GIB = 2**30
# What an example's layout gains or loses is told part by part from this share of its step on.
_WORTH_TELLING = 0.01

_KINDS = SPREADS["dense"], SPREADS["experts"]
_FACTORS = [f"{1 + each:.2f}" for each in (*(kind.time for kind in _KINDS), *(kind.time_bound for kind in _KINDS))]

_HEAD = f"""# Published layouts, planned

LLaMA-Factory's Megatron examples, and the run of Qwen3-VL-8B that its users publish, planned by `megatune plan` on
{GPU} with 8 devices a machine, and compared with the layout that its search recommends for the same model, devices,
rows of a step and row length. Every row is assumed to have the full length. Nothing here was measured: of published
runs two of three lie within a factor of {_FACTORS[0]} of the planned time, and of mixtures of experts within
{_FACTORS[1]}; nine of ten within {_FACTORS[2]} and {_FACTORS[3]}. Differences between layouts of one
model are more certain than that.

Written by `python benchmarks/published_layouts.py --output`.
"""

_WHY = {
    "compute": "the slowest stage has less to compute, or computes it in larger pieces",
    "recompute": "less is computed again in the backward pass",
    "tensor_parallel": "less communication inside layers",
    "context_parallel": "fewer exchanges between parts of a row",
    "expert_parallel": "less waiting for tokens on their way to experts",
    "host": "the device waits less for the host to launch its kernels",
    "pipeline": "stages wait less for each other",
    "data_parallel": "less of the gradient communication is not overlapped",
    "optimizer": "each process updates fewer parameters",
    "overhead": "less work of the host",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One published run.

    Attributes:
        layouts: by what they are called, keys of a file or the file itself; the first one is the example itself and the
            others are its alternatives.
        told: what its source does not say, and is assumed here.
    """

    name: str
    model: str
    num_gpus: int
    layouts: Mapping[str, Mapping[str, Any] | Path]
    told: str


_COMMON = {"cutoff_len": 4096, "bf16": True, "bias_activation_fusion": True, "apply_rope_fusion": True,
           "per_device_train_batch_size": 1}  # fmt: skip
_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}

EXAMPLES = (
    Example(
        name="Qwen3-30B-A3B on 8 GPUs",
        model="Qwen3-30B-A3B",
        num_gpus=8,
        layouts={
            "published": {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2,
                          "gradient_accumulation_steps": 8, "recompute_granularity": "full", **_OVERLAPS},
        },
        told="Its comment says that a step has 8 rows; it has 16: expert parallelism takes no rows away.",
    ),
    Example(
        name="Qwen2-VL-7B on 8 GPUs",
        model="Qwen2-VL-7B",
        num_gpus=8,
        layouts={"published": EXAMPLES_FOLDER / "qwen2_vl_full.yaml"},
        told="`examples/vision/qwen2_vl_full.yaml`. Every row is assumed to have one image of 262,144 pixels, 334\n"
        "tokens; vision tower and projector are frozen, as by LLaMA-Factory's defaults.",
    ),
    Example(
        name="Qwen3-VL-8B on 32 GPUs",
        model="Qwen3-VL-8B",
        num_gpus=32,
        layouts={
            "published": EXAMPLES_FOLDER / "qwen3_vl_8b_32gpu.yaml",
            "alternative 1": EXAMPLES_FOLDER / "qwen3_vl_8b_32gpu_tp8.yaml",
            "alternative 2": EXAMPLES_FOLDER / "qwen3_vl_8b_32gpu_pp2.yaml",
        },
        told="`examples/vision/qwen3_vl_8b_32gpu.yaml` and the two next to it. Every row is assumed to have one\n"
        "image of 451,584 pixels, 441 tokens; everything is trained, including the vision tower.",
    ),
)  # fmt: skip


def settings_of(layout: Mapping[str, Any] | Path) -> Settings:
    """Settings as a file with these keys has them."""
    if isinstance(layout, Path):
        loaded = load(layout)
    else:
        loaded = load(overrides=[f"{key}={str(value).lower()}" for key, value in {**_COMMON, **layout}.items()])
    assert not loaded.findings, loaded.findings
    return loaded.settings


def request_of(example: Example, layout: Mapping[str, Any] | Path) -> SearchRequest:
    case = Case(
        model=find_model(example.model),
        settings=settings_of(layout),
        world_size=example.num_gpus,
        machine=find_machine(GPU),
    )
    return SearchRequest(case=case, global_batch_size=case.global_batch_size)


def planned(example: Example) -> dict[str, Estimate]:
    """Every layout of the example, then the one that a search recommends."""
    found: dict[str, Estimate] = {}
    for name, layout in example.layouts.items():
        request = request_of(example, layout)
        found[name] = estimate(request.case)
    first = next(iter(found.values()))
    request = replace(request_of(example, next(iter(example.layouts.values()))),
                      global_batch_size=first.case.global_batch_size)  # fmt: skip
    recommended = search(request).recommended
    assert recommended is not None
    return {**found, "recommended": recommended}


def table(plans: Mapping[str, Estimate]) -> str:
    """A line a layout."""
    rows = []
    for name, plan in plans.items():
        memory = f"{plan.fullest.total / _GIB:.1f}" + ("" if plan.fits else " (too large)")
        case = plan.case
        batch, time = f"{case.micro_batch_size} × {case.num_micro_batches}", plan.time
        speed = f"{time.total:.2f}", f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}"
        how = describe_recompute(case.settings.recompute)
        rows.append((name, describe_layout(case), batch, str(case.global_batch_size), how, memory, *speed))
    header = ("", "layout", "batch", "rows", "recompute", "GiB", "s", "tokens/s", "MFU")
    return markdown_table(header, rows)


def parts(plans: Mapping[str, Estimate]) -> str:
    """Memory and time of each layout, part by part."""
    rows = []
    for part in MEMORY_PARTS:
        values = [getattr(plan.fullest, part) / _GIB for plan in plans.values()]
        if max(values) >= 0.01:
            rows.append((f"{MEMORY_NAMES[part]}, GiB", *(f"{value:.2f}" for value in values)))
    for part in TIME_PARTS:
        values = [getattr(plan.time, part) for plan in plans.values()]
        if max(values) >= 0.001:
            rows.append((f"{TIME_NAMES[part]}, s", *(f"{value:.3f}" for value in values)))
    return markdown_table(("of the fullest rank, of the slowest stage", *plans), rows)


def reasons(published: Estimate, found: Estimate) -> Iterator[str]:
    """Where the found layout gains, the largest part first, and where it loses."""
    gains = {part: getattr(published.time, part) - getattr(found.time, part) for part in TIME_PARTS}
    least = _WORTH_TELLING * published.time.total
    for part, gain in sorted(gains.items(), key=lambda item: -item[1]):
        if gain > least:
            yield f"- {TIME_NAMES[part]}: {gain:.2f} s less; {_WHY[part]}"
    for part, gain in sorted(gains.items(), key=lambda item: item[1]):
        if gain < -least:
            yield f"- {TIME_NAMES[part]}: {-gain:.2f} s more, the price of the other changes"


def section(example: Example) -> Iterator[str]:
    plans = planned(example)
    published, found = plans["published"], plans["recommended"]
    yield f"\n## {example.name}\n"
    yield f"{example.told}\n"
    yield table(plans)
    gain = published.time.total / found.time.total
    room = published.case.machine.device.memory / _GIB
    fits = "fits" if published.fits else "does not fit"
    tight = ", but not at the upper end of the uncertainty" if published.fits and published.is_tight else ""
    yield (f"\nThe published layout {fits} the {room:.1f} GiB that a process can use{tight}. "
           + (f"{describe_layout(found.case)} is {gain:.2f} times as fast:" if gain > 1.02 else "Nothing found is "
              "worth a change."))  # fmt: skip
    if gain > 1.02:
        yield "\n" + "\n".join(reasons(published, found))
    yield "\n" + parts(plans)


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD.rstrip("\n"), *(line for example in EXAMPLES for line in section(example))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", action="store_true", help="also write it to docs/published-layouts.md")
    arguments = parser.parse_args()
    text = page()
    print(text)
    if arguments.output:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
