"""`merge_lora`: at the end of a run the model is there, too, with what was trained merged into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import RankPool
from runs import settings_of, tensors, train

from megatune.bridge.adapter_files import open_adapter, with_adapters
from megatune.bridge.assemble import open_checkpoint
from megatune.demo.checkpoint import make_checkpoint
from megatune.families import load_architecture

LORA = {"finetuning_type": "lora", "lora_rank": 4, "merge_lora": True, "max_steps": 2, "save_steps": 2, "bf16": True}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_dora": True}),
        ("qwen3_moe", {"expert_model_parallel_size": 2, "per_device_train_batch_size": 2}),
        ("qwen3_vl_moe", {"pipeline_model_parallel_size": 2}),
    ],
)
def test_a_run_leaves_its_merged_model(family: str, layout: dict[str, object], pool: RankPool, tmp_path: Path) -> None:
    """Of every adapter that it began with, and its own; a second run goes on beside the first one's model."""
    model = make_checkpoint(family, tmp_path / "model", num_layers=2)
    first, second = tmp_path / "first", tmp_path / "second"
    assert pool.run(2, train, settings_of(model, first, **LORA, **layout), tmp_path) == [0, 0]
    more = {"adapter_name_or_path": str(first), "create_new_adapter": True}
    assert pool.run(2, train, settings_of(model, second, **LORA, **layout, **more), tmp_path) == [0, 0]

    architecture = load_architecture(model)
    base = open_checkpoint(model, architecture)[0]
    merged = with_adapters(base, [open_adapter(folder, architecture) for folder in (first, second)])
    written = open_checkpoint(second / "merged", architecture)[0]
    num_changed = 0
    for name in written.places:
        expected, before = merged.whole(name), base.whole(name)
        assert torch.equal(written.whole(name), expected.to(before.dtype)), name
        num_changed += not torch.equal(expected.to(before.dtype), before)
    assert num_changed
    assert tensors(model).keys() == tensors(second / "merged").keys()
    assert (second / "merged/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (second / "merged/config.json").read_bytes() == (model / "config.json").read_bytes()
