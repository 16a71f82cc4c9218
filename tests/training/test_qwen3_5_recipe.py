"""The example of a small Qwen3.5, as its file says it, with weights beside the model that no layer uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from pool import RankPool
from runs import metrics, tensors, train
from safetensors.torch import load_file, save_file

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import preflight
from megatune.training.callbacks.console import DETAILS_NAME

EXAMPLES = Path(__file__).parents[2] / "examples" / "vision"


def test_qwen3_5_learns_and_keeps_what_it_does_not_use(pool: RankPool, tmp_path: Path) -> None:
    model, output = make_checkpoint("qwen3_5", tmp_path / "model", num_layers=4), tmp_path / "out"
    predicts = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.randn(64).bfloat16()}
    weights = model / "model.safetensors"
    save_file(load_file(weights) | predicts, weights, {"format": "pt"})
    subprocess.run([sys.executable, EXAMPLES / "shapes.py", tmp_path / "shapes"], check=True, timeout=60)
    loaded = load(
        EXAMPLES / "qwen3_5_demo.yaml",
        [f"model_name_or_path={model}", f"dataset_dir={tmp_path / 'shapes'}", f"output_dir={output}",
         "dataloader_num_workers=0", "ddp_timeout=240"],
    )  # fmt: skip
    checked = preflight(loaded, 1, (), cpu_machine(2**36, 1))
    assert checked.planned is not None
    assert pool.run(1, train, checked.settings, tmp_path / "run", None, checked.planned.case) == [0]
    losses = [step["loss"] for step in metrics(output).values()]
    assert len(losses) == 8
    assert losses[-1] < 0.8 * losses[0]
    found = tensors(output)
    assert all(torch.equal(found[name], tensor) for name, tensor in predicts.items())
    told = (output / DETAILS_NAME).read_text()
    assert "2 tensors that this model does not use (mtp.fc.weight, ...): written back unchanged" in told
