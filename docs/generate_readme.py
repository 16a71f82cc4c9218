"""Writes README's table of models from the planner: `python docs/generate_readme.py` (a quarter of a minute)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatune.config.derived import with_adapter_settings
from megatune.config.load import load
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine
from megatune.plan.catalogue.models import find_model
from megatune.plan.flops import num_parameters
from megatune.plan.layouts import SearchRequest
from megatune.plan.search import search

PAGE = Path(__file__).parents[1] / "README.md"
GPU, ROW_TOKENS, ROWS = "h100-80g", 4096, 64
MOST_GPUS = 1024
# A model that the planner knows by name, and the template that its users train with.
MODELS = {
    "Qwen3-0.6B": "qwen3",
    "Qwen3-8B": "qwen3",
    "Qwen3-32B": "qwen3",
    "Llama-3.1-8B": "llama3",
    "Qwen2.5-72B": "qwen",
    "Qwen2.5-VL-7B": "qwen2_vl",
    "Qwen3-VL-8B": "qwen3_vl",
    "Qwen3-30B-A3B": "qwen3",
    "DeepSeek-V3": "deepseek3",
}
_BYTES = {"full": 18, "lora": 2}  # of a parameter, at least: no search below
_ROW = re.compile(r"\| (\S+) \| `(\w+)` \| (\d+) \| (\d+) \|")


class Row(NamedTuple):
    """One line of the table: GPUs of full fine-tuning and of LoRA."""

    model: str
    template: str
    full: int
    lora: int


def smallest(model: str, finetuning_type: str) -> int:
    """Return the least power of two of GPUs on which a layout surely fits."""
    planned = find_model(model)
    sizes = (2**power for power in range(MOST_GPUS.bit_length()))
    memory = find_machine(GPU).device.memory
    least = _BYTES[finetuning_type] * num_parameters(planned.architecture)
    return next(size for size in sizes if size * memory > least and fits(planned, finetuning_type, size))


def fits(model: PlannedModel, finetuning_type: str, gpus: int) -> bool:
    """Whether `megatune plan MODEL --gpus N --gpu h100-80g --seq 4096` recommends a layout that is not tight."""
    words = [f"finetuning_type={finetuning_type}", "bf16=true", f"cutoff_len={ROW_TOKENS}"]
    settings = with_adapter_settings(load(None, words), model.architecture).settings
    case = Case(model=model, settings=settings, world_size=gpus, machine=find_machine(GPU))
    found = search(SearchRequest(case=case, global_batch_size=max(ROWS, gpus), keep=1)).recommended
    return found is not None and not found.is_tight


def rows_of(text: str) -> Iterator[Row]:
    """Yield the rows that a page has."""
    for model, template, full, lora in _ROW.findall(text):
        yield Row(model, template, int(full), int(lora))


def render(text: str) -> str:
    """Return the page with its table as the planner has it."""
    rows = (
        f"| {name} | `{template}` | {smallest(name, 'full')} | {smallest(name, 'lora')} |"
        for name, template in MODELS.items()
    )
    table = "\n".join(["| model | `template` | full fine-tuning | LoRA |", "|---|---|---|---|", *rows])
    block = re.compile(r"(<!-- models: docs/generate_readme\.py -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
