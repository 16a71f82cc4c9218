"""Plans of many models, settings and devices to full precision, to show that a change of the planner changes no answer.

    python benchmarks/plan_dump.py before.json        (on the base)
    python benchmarks/plan_dump.py after.json --compare before.json

Memory must be equal to the byte and seconds to 1e-9; what differs is printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.predict import case_of
from planner.published import ROWS

from megatune.config.load import load
from megatune.plan.case import Case
from megatune.plan.catalogue import cpu_machine, find_machine, find_model
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.layouts import SearchRequest
from megatune.plan.memory.stage import MEMORY_PARTS
from megatune.plan.search import search
from megatune.plan.time.estimate import TIME_PARTS

MODELS = ("Qwen3-8B", "Llama-3.2-1B", "Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3", "Qwen2.5-VL-7B", "Qwen3-VL-8B")
MACHINES = {"h100-80g": find_machine("h100-80g"), "cpu": cpu_machine(2**36, 8, 8)}
_COMMON = "bf16=true cutoff_len=4096 per_device_train_batch_size=2 gradient_accumulation_steps=8"
# Settings of a run, in words of the command line.
SETTINGS = (
    "",
    "bf16=false",
    "tensor_model_parallel_size=2 sequence_parallel=true",
    "pipeline_model_parallel_size=4 virtual_pipeline_model_parallel_size=2",
    "context_parallel_size=2",
    "context_parallel_size=2 cp_comm_type=a2a",
    "expert_model_parallel_size=2",
    "recompute_granularity=full recompute_method=block recompute_num_layers=3",
    "recompute_granularity=selective recompute_modules=core_attn,layernorm",
    "bias_activation_fusion=true apply_rope_fusion=true cross_entropy_loss_fusion=true moe_grouped_gemm=true",
    "overlap_grad_reduce=true overlap_param_gather=true use_distributed_optimizer=true",
    "optimizer_cpu_offload=true",
    "packing=true",
    "finetuning_type=lora",
    "finetuning_type=lora quantization_bit=4 pipeline_model_parallel_size=2",
    "finetuning_type=freeze freeze_trainable_layers=2",
    "stage=dpo",
    "stage=kto finetuning_type=lora",
    "freeze_vision_tower=false",
)
# Model, GPU, GPUs, rows of a step.
SEARCHES = (
    ("Qwen3-8B", "h100-80g", 8, 64),
    ("Qwen3-8B", "rtx-4090", 2, 64),
    ("Qwen3-30B-A3B", "a100-40g", 8, 64),
    ("Qwen2.5-VL-7B", "a100-80g", 8, 64),
    ("Qwen2.5-72B", "h100-80g", 64, 256),
)


def plans() -> Iterator[tuple[str, Any]]:
    """Name each plan, or each search, and what it says."""
    for name in MODELS:
        model = find_model(name)
        for device, machine in MACHINES.items():
            for words in SETTINGS:
                settings = load(None, [*_COMMON.split(), *words.split()], []).settings
                case = Case(model=model, settings=settings, world_size=16, machine=machine)
                yield f"{name}, {device}, {words}", shown(estimate(case))
    for row in ROWS:
        yield f"row {row.name}", shown(estimate(case_of(row)))
    for name, gpu, gpus, rows in SEARCHES:
        settings = load(None, ["bf16=true", "cutoff_len=4096"], []).settings
        case = Case(model=find_model(name), settings=settings, world_size=gpus, machine=find_machine(gpu))
        found = search(SearchRequest(case=case, global_batch_size=rows))
        groups = (found.ranked, found.frontier, found.too_large)
        yield f"search {name}, {gpu}, {gpus}", [[shown(each) for each in group] for group in groups]


def shown(planned: Estimate) -> dict[str, Any]:
    """Bytes by stage and part, seconds by part, and the settings that a search chooses."""
    settings = planned.case.settings
    return {
        "chosen": [str(settings.parallel), str(settings.batch), str(settings.recompute)],
        "bytes": [[getattr(stage, part) for part in (*MEMORY_PARTS, "host")] for stage in planned.stages],
        "seconds": [getattr(planned.time, part) for part in (*TIME_PARTS, "forward", "model_flops")],
    }


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    """Say where two dumps differ: numbers that are no integers by more than 1e-9."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            yield from differences(before[key], after[key], f"{where}, {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}, {index}")
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{where}: {before!r} before, {after!r} after"
    elif before != after:
        yield f"{where}: {str(before)[:60]} before, {str(after)[:60]} after"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the plans are written")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier dump")
    arguments = parser.parse_args()
    found = dict(plans())
    arguments.file.write_text(json.dumps(found), encoding="utf-8")
    print(f"{len(found)} plans and searches")
    if arguments.compare is not None:
        before = json.loads(arguments.compare.read_text(encoding="utf-8"))
        wrong = list(differences(before, json.loads(arguments.file.read_text(encoding="utf-8")), "plans"))
        print("\n".join([f"{len(wrong)} differences", *wrong[:20]]))
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
