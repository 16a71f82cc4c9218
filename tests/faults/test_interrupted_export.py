"""An export that is interrupted: its folder appears when it is whole, or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fault_injector import Fault, installed
from safetensors.torch import load_file

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.peft_config["default"].base_model_name_or_path = str(model)
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    adapted.save_pretrained(folder)
    return folder


def in_child(fault: Fault, words: list[str]) -> int:
    """Run a command in a forked process with a fault; how it ended: minus the signal that killed it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        torch.set_num_threads(1)
        with installed([fault]):
            code = main(words)
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    ("at", "when"),
    [
        ("megatune.bridge.file_stream:TensorFile.write", "before"),
        ("megatune.bridge.merged_model:MergedModel.write", "after"),
        ("megatune.training.storage.files:sync", "after"),
    ],
    ids=["before weights are written", "when weights are written", "while it is synced to disk"],
)
def test_a_killed_export_leaves_no_half_of_a_model(
    at: str, when: str, model: Path, adapter: Path, tmp_path: Path, request: pytest.FixtureRequest,
    told: Callable[..., None],
) -> None:  # fmt: skip
    out = tmp_path / "merged"
    words = ["export", "--adapter_name_or_path", str(adapter), "--export_dir", str(out)]
    assert in_child(Fault("signal", at, when=when), words) == -signal.SIGKILL
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".merged.partial"]
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("q_proj.weight")}
    moment = request.node.callspec.id
    got = "no folder of that name, only .merged.partial, which the same command replaces by the whole model"
    told(case="T24", fault=f"`kill -9` of an export {moment}", got=got, lost="the work of that command")
