"""The layouts that a search recommends, beside those of published recipes for the same model, devices and rows.

Writes docs/published-recipes.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_layouts import parts, reasons, table

from megatune.config.load import load
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.layouts import SearchRequest
from megatune.plan.pages.words import describe_layout
from megatune.plan.search import equal_within, num_kinds, search
from megatune.plan.uncertainty import memory_bound

PAGE = Path(__file__).parents[1] / "docs" / "published-recipes.md"
_GIB = 2**30
_BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df/src/megatron/bridge/recipes"
_SWIFT = "https://github.com/modelscope/ms-swift/blob/3602360a5/examples/megatron"

_HEAD = """# Recommended layouts compared with published recipes

This page compares what `megatune plan` recommends with what others publish for the same model, devices, rows of a step
and row length. Both are planned with fused kernels and with the recipe's precision of gradients and Adam's averages, so
that only their layouts differ; every row has the full length. **Nothing on this page was measured**: how far plans are
from measured runs is in [planner-memory.md](planner-memory.md) and `benchmarks/planner_accuracy.py`. A recommended
layout fits at the upper end of the uncertainty for its class of models, if any layout does; of layouts that are about
equally fast, the one with the fewest kinds of parallelism is recommended. Recipes are made to run on many machines, not
to be the fastest on one.

Written by `python benchmarks/published_recipes.py --output`.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published recipe.

    Attributes:
        rows, length: of a step, and tokens of a row.
        layout: its settings beyond one row a micro-batch, bf16 and fused kernels.
        source: where it is published.
        told: what is otherwise here than there.
    """

    model: str
    gpu: str
    num_gpus: int
    rows: int
    length: int
    layout: Mapping[str, Any]
    source: str
    told: str = ""


_FUSIONS = {"bias_activation_fusion": True, "apply_rope_fusion": True, "gradient_accumulation_fusion": True}
_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_BF16_GRADIENTS = {"accumulate_allreduce_grads_in_fp32": False}
_BF16_AVERAGES = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
_BALANCED = {"moe_aux_loss_coeff": 1e-3}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


def _sizes(tp: int = 1, pp: int = 1, ep: int = 1, *, sequence_parallel: bool = True, **more: Any) -> dict[str, Any]:
    experts = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1, **_BALANCED} if ep > 1 else {}
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "sequence_parallel": sequence_parallel and tp > 1, **experts, **more}  # fmt: skip


RECIPES = (
    Recipe(
        model="Qwen3-8B", gpu="h100-80g", num_gpus=4, rows=32, length=2048,
        layout=_sizes(4, sequence_parallel=False),
        source=f"{_BRIDGE}/qwen/h100/qwen3.py (qwen3_8b_sft_4gpu)",
    ),
    Recipe(
        model="Qwen3-32B", gpu="h100-80g", num_gpus=32, rows=128, length=4096,
        layout=_sizes(8, 2, sequence_parallel=False, **_BF16_GRADIENTS, **_FULL),
        source=f"{_BRIDGE}/qwen/h100/qwen3.py (qwen3_32b_sft_16gpu)",
        told="It is for 16 devices and 8 rows of 2,048 tokens; here for twice the devices, with rows to fill them.",
    ),
    Recipe(
        model="Llama-3.1-70B", gpu="h100-80g", num_gpus=32, rows=8, length=4096,
        layout=_sizes(8, 4, sequence_parallel=False, **_BF16_GRADIENTS),
        source=f"{_BRIDGE}/llama/h100/llama3.py (llama31_70b_sft_32gpu)",
    ),
    Recipe(
        model="Qwen3-30B-A3B", gpu="h100-80g", num_gpus=8, rows=32, length=2048,
        layout=_sizes(4, 2, 4, **_OVERLAPS),
        source=f"{_BRIDGE}/qwen/h100/qwen3_moe.py (qwen3_30b_a3b_sft_8gpu)",
    ),
    Recipe(
        model="Qwen3-30B-A3B", gpu="a800-80g", num_gpus=16, rows=16, length=8192,
        layout=_sizes(1, 2, 8, **_FULL),
        source=f"{_SWIFT}/moe/qwen3_moe.sh",
        told="It reports 60 GiB and 9.6 s a step, but not on which devices.",
    ),
    Recipe(
        model="Qwen3-235B-A22B", gpu="h100-80g", num_gpus=64, rows=32, length=2048,
        layout=_sizes(4, 16, 4, **_ENDS, **_OVERLAPS),
        source=f"{_BRIDGE}/qwen/h100/qwen3_moe.py (qwen3_235b_a22b_sft_64gpu)",
    ),
    Recipe(
        model="DeepSeek-V3", gpu="h100-80g", num_gpus=512, rows=4096, length=4096,
        layout=_sizes(2, 8, 32, **_OVERLAPS, **_BF16_GRADIENTS, **_BF16_AVERAGES, **_FULL),
        source=f"{_BRIDGE}/deepseek/h100/deepseek_v3.py (deepseek_v3_pretrain_256gpu)",
        told="It is for 256 devices; here for 512. It names the layers of each stage; here they are even.",
    ),
    Recipe(
        model="DeepSeek-V3", gpu="h800-80g", num_gpus=2048, rows=15_360, length=4096,
        layout=_sizes(1, 16, 64, **_OVERLAPS, **_BF16_AVERAGES, **_FULL),
        source="https://arxiv.org/abs/2412.19437, section 3.2",
        told="It computes in FP8, overlaps expert communication with computing (DualPipe) and recomputes less than\n"
        "whole layers, which is not supported here: bf16 and full recomputation are planned instead. It sends a token\n"
        "to four machines at most, which the planner does not model: experts over eight machines cost less there.",
    ),
)  # fmt: skip


def request_of(recipe: Recipe) -> SearchRequest:
    """What is searched: the recipe's own settings, with one row a micro-batch."""
    parallel = recipe.layout["tensor_model_parallel_size"] * recipe.layout["pipeline_model_parallel_size"]
    values = {"cutoff_len": recipe.length, "bf16": True, "per_device_train_batch_size": 1, **_FUSIONS,
              "gradient_accumulation_steps": recipe.rows * parallel // recipe.num_gpus, **recipe.layout}  # fmt: skip
    loaded = load(overrides=[f"{key}={str(value).lower()}" for key, value in values.items()])
    assert not loaded.findings, loaded.findings
    model, machine = find_model(recipe.model), find_machine(recipe.gpu)
    case = Case(model=model, settings=loaded.settings, world_size=recipe.num_gpus, machine=machine)
    assert case.global_batch_size == recipe.rows
    return SearchRequest(case=case, global_batch_size=recipe.rows)


def planned(recipe: Recipe) -> tuple[Estimate, Estimate]:
    """The recipe's layout, and the one that a search recommends."""
    request = request_of(recipe)
    found = search(replace(request, keep=10)).recommended
    assert found is not None
    return estimate(request.case), found


def verdict(published: Estimate, found: Estimate) -> str:
    """How the two stand to each other."""
    gain, bound = published.time.total / found.time.total, memory_bound(found.case)
    names = describe_layout(published.case), describe_layout(found.case)
    if names[0] == names[1]:
        said = f"The layout is the recipe's, {gain:.2f} times as fast by its batch and recomputation."
    elif gain > 1 + equal_within(found.case):
        said = f"{names[1]} is {gain:.2f} times as fast as {names[0]}."
    elif num_kinds(found.case) < num_kinds(published.case):
        said = f"{names[1]} is as fast as {names[0]}, within the uncertainty, with fewer kinds of parallelism."
    else:
        said = f"{names[1]} is as fast as {names[0]}, within the uncertainty."
    ends = []
    for name, plan in (("the recipe", published), ("the recommended one", found)):
        end = f"{(1 + bound) * plan.fullest.total / _GIB:.1f} GiB"
        does = "does not fit as planned" if not plan.fits else "is tight" if plan.is_tight else "fits"
        ends.append(f"{name} {does} ({end})")
    return f"{said} At the upper end of the uncertainty, {bound:.0%} above the plan: {', '.join(ends)}."


def section(recipe: Recipe) -> Iterator[str]:
    published, found = planned(recipe)
    yield f"\n## {recipe.model} on {recipe.num_gpus:,} × {recipe.gpu}\n"
    yield f"{recipe.rows:,} rows of {recipe.length:,} tokens a step. Recipe: {recipe.source}."
    if recipe.told:
        yield f"\n{recipe.told}"
    plans = {"recipe": published, "recommended": found}
    yield "\n" + table(plans)
    yield "\n" + verdict(published, found)
    if told := list(reasons(published, found)):
        yield "\n" + "\n".join(told)
    yield "\n" + parts(plans)


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD.rstrip("\n"), *(line for recipe in RECIPES for line in section(recipe))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", action="store_true", help="also write it to docs/published-recipes.md")
    arguments = parser.parse_args()
    text = page()
    print(text)
    if arguments.output:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
