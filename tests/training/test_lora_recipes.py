"""The examples of LoRA, as a user types them, on CPU processes with tiny models: trained, asked, merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import metrics, tensors, train
from transformers import AutoModelForCausalLM

from megatune.cli.main import main
from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import preflight

EXAMPLES = Path(__file__).parents[2] / "examples" / "lora"
# A family, the processes of the layout, and the linear layers of attention and feed-forward.
RUNS = {
    "qwen3_lora_sft": ("qwen3", 2),
    "qwen3_new_tokens": ("qwen3", 2),
    "qwen3_5_lora_sft": ("qwen3_5_text", 2),
    "qwen3_moe_lora_sft": ("qwen3_moe", 8),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets under the names of the files, in alpaca's form."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"It is {number}. " * 3} for number in range(64)]
    (folder / "rows.json").write_text(json.dumps(rows))
    entry = {"file_name": "rows.json"}
    (folder / "dataset_info.json").write_text(json.dumps({"identity": entry, "alpaca_en_demo": entry}))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(input_ids=torch.arange(5, 25)[None]).logits


@pytest.mark.extended("qwen3_moe_lora_sft")
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains_and_its_adapter_is_peft_s(
    name: str, pool: RankPool, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the model, the folders, the number of steps, of their micro-batches and of the processes that read rows are
    others."""
    family, world_size = RUNS[name]
    model, output, merged = make_checkpoint(family, tmp_path / "model"), tmp_path / "out", tmp_path / "merged"
    loaded = load(
        EXAMPLES / f"{name}.yaml",
        [f"model_name_or_path={model}", f"dataset_dir={data}", f"output_dir={output}", "max_steps=2",
         "gradient_accumulation_steps=2", "logging_steps=1", "preprocessing_num_workers=1",
         "dataloader_num_workers=0", "learning_rate=1e-2",
         "cutoff_len=128", "ddp_timeout=240"],
    )  # fmt: skip
    checked = preflight(loaded, world_size, (), cpu_machine(2**36, world_size))
    assert checked.planned is not None
    case = checked.planned.case
    assert pool.run(world_size, train, checked.settings, tmp_path / "run", None, case) == [0] * world_size
    steps = metrics(output)
    assert list(steps) == [1, 2]
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in steps.values())
    assert {path.name for path in output.glob("*.safetensors")} == {"adapter_model.safetensors"}

    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if name == "qwen3_new_tokens":
        base.resize_token_embeddings(2048, mean_resizing=False)
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, str(output)))
    assert (adapted - before).abs().max() > 1e-2 * before.abs().max()

    assert main(["infer", str(output), "--prompt", "Say 7.", "--max_new_tokens", "4"]) == 0
    words = [f"model_name_or_path={model}", f"adapter_name_or_path={output}", f"export_dir={merged}"]
    assert main(["export", str(EXAMPLES / "qwen3_lora_merge.yaml"), *words]) == 0
    assert str(merged) in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(merged)
    assert (logits(whole) - adapted).abs().max() < 2e-2 * adapted.abs().max()  # rounded to the base's dtype
    assert {name: each.dtype for name, each in tensors(merged).items()} == {
        name: each.dtype for name, each in tensors(model).items()
    }
