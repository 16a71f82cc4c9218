"""A small gpt_oss as the large ones are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def as_published(model: Path, folder: Path) -> Path:
    """Copy a gpt_oss in bf16, its experts' matrices random ones in MXFP4."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(3)
    found = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in found if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = found.pop(name).shape
        count = columns // 32
        found[f"{name}_blocks"] = torch.randint(256, (experts, rows, count, 16), generator=generator).byte()
        found[f"{name}_scales"] = torch.randint(119, 125, (experts, rows, count), generator=generator).byte()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder
