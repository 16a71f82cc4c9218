"""`megatune verify` with adapters: the engine's against peft's, gradients of every A and B."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pool_launch import CommandLine, Ended
from safetensors.torch import load_file, save_file

from megatune.config.settings import FinetuningSettings, ParallelSettings, Settings
from megatune.errors import ExitCode
from megatune.families import load_architecture
from megatune.launch.world import LOOPBACK, World, find_free_port
from megatune.verify.checkpoints import is_new, with_adapters, write_random_adapter
from megatune.verify.run import show, verify_layout
from megatune.verify.samples import random_samples

LORA = {"finetuning_type": "lora", "lora_rank": 4}
FEW = ("--samples", "3", "--length", "8")

MakeModel = Callable[..., Path]


@pytest.fixture
def verify(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.setenv("COLUMNS", "160")  # wide enough that the table breaks no name
    return partial(command_line, "verify")


@pytest.fixture
def adapter(model_dir: MakeModel, tmp_path: Path) -> Path:
    """Rank-4 adapters of q_proj and of every feed-forward's matrix of the qwen3_moe, random."""
    model, folder = model_dir("qwen3_moe"), tmp_path / "adapter"
    folder.mkdir()
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    settings = FinetuningSettings(**LORA, lora_target=targets, lora_alpha=12)
    write_random_adapter(folder, model, load_architecture(model), settings, seed=3)
    return folder


CASES = {
    "experts, tp 2 with sp, ep 2": (
        "qwen3_moe",
        ["tensor_model_parallel_size=2", "sequence_parallel=true", "expert_model_parallel_size=2"],
        "adapters of rank 4, tp 2, ep 2, dp 2, sequence parallel, float32, 3 rows",
        140,
    ),
    "a shared expert, rank-stabilized, pp 2": (
        "qwen2_moe",
        ["use_rslora=true", "lora_target=gate_proj,up_proj,down_proj,v_proj", "pipeline_model_parallel_size=2"],
        "pp 2",
        176,
    ),
    "DoRA, words and norm trained whole, tp 2": (
        "qwen3",
        ["use_dora=true", "additional_target=embed_tokens,norm", "tensor_model_parallel_size=2"],
        "tp 2",
        86,
    ),
    "a vision encoder, bf16": ("qwen2_5_vl", ["freeze_vision_tower=false", "--bf16"], "bfloat16", 96),
}


@pytest.mark.parametrize("name", CASES)
def test_what_would_be_trained_is_compared(verify: Callable[..., Ended], name: str, model_dir: MakeModel) -> None:
    family, words, described, num_parameters = CASES[name]
    ended = verify(model_dir(family), *(f"{key}={value}" for key, value in LORA.items()), *words, *FEW)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert described in ended.stdout
    assert f"PASS: all {num_parameters + 3} are within their tolerance" in ended.stdout


def test_an_adapter_is_its_own_settings(verify: Callable[..., Ended], adapter: Path, model_dir: MakeModel) -> None:
    """As MODEL, with its base from adapter_config.json, and behind another one, which is merged."""
    as_model = verify(adapter, *FEW, "expert_model_parallel_size=2", "--num_processes", "2")
    assert as_model.returncode == 0, as_model.stdout + as_model.stderr
    assert f"{adapter}: adapters of rank 4, ep 2" in as_model.stdout
    # q_proj of 4 layers, of two of them a dense feed-forward, and 8 experts in the others.
    assert f"PASS: all {2 * (4 + 2 * 3 + 2 * 8 * 3) + 3} are" in as_model.stdout
    chain = verify(model_dir("qwen3_moe"), f"adapter_name_or_path={adapter},{adapter}", *FEW, "--verbose")
    assert chain.returncode == 0, chain.stdout + chain.stderr
    assert chain.stdout.count("gradient of ") == 2 * (4 + 2 * 3 + 2 * 8 * 3)


@pytest.mark.usefixtures("command_line")
def test_a_difference_is_found_and_located(model_dir: MakeModel, tmp_path: Path, capsys) -> None:
    """The engine's base differs from the one that peft's adapter is on."""
    model, changed = model_dir("qwen3"), tmp_path / "changed"
    shutil.copytree(model, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 0.5
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    parallel = ParallelSettings(tensor_model_parallel_size=2)
    settings = Settings(parallel=parallel, finetuning=FinetuningSettings(**LORA))
    world = World(nnodes=1, node_rank=0, nproc_per_node=2, master_addr=LOOPBACK, master_port=find_free_port())
    with with_adapters(settings, model, load_architecture(model)) as settings:
        (folder,) = settings.finetuning.adapter_name_or_path
        assert not is_new(Path(folder))
        verdict = verify_layout(changed, settings, random_samples(301, [8, 6]), world, reference_dir=model)
    assert show(verdict) == ExitCode.DIFFERENT
    assert "the first difference arises at: layer 2 MLP" in capsys.readouterr().out
    assert not Path(folder).exists()


def test_a_new_adapter_is_pointed_out(verify: Callable[..., Ended], adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * ("lora_A" in name) for name, tensor in tensors.items()}, path)
    ended = verify(adapter, *FEW)
    assert ended.returncode == 0, ended.stderr
    assert f"all B of {adapter} are zero" in ended.stdout


def test_mistakes_are_named_before_any_process_starts(
    verify: Callable[..., Ended], adapter: Path, model_dir: MakeModel
) -> None:
    model = model_dir("qwen3_moe")
    for words, code, said in (
        ([adapter, "finetuning_type=lora", "lora_rank=8"], ExitCode.SETTINGS, "lora_rank has no effect"),
        ([model, f"adapter_name_or_path={adapter}", "lora_rank=8"], ExitCode.SETTINGS, "lora_rank has no effect"),
        ([model, "finetuning_type=freeze"], ExitCode.SETTINGS, "finetuning_type has no effect in verify"),
        (
            [model, "finetuning_type=lora", "lora_dropout=0.1"],
            ExitCode.SETTINGS,
            "lora_dropout has no effect",
        ),
        ([model, "finetuning_type=lora", "use_dora=true"], ExitCode.SETTINGS, "with adapters of routed experts"),
        ([model, "finetuning_type=lora", "lora_target=q"], ExitCode.SETTINGS, "lora_target"),
        ([model, "finetuning_type=lora", "--against", "lora_rank=4"], ExitCode.SETTINGS, "lora_rank is the same in"),
        ([model, f"adapter_name_or_path={adapter}x"], ExitCode.INPUT, f"did you mean {adapter}?"),
        ([model, f"model_name_or_path={model}"], ExitCode.SETTINGS, "--model_name_or_path: has no effect"),
        ([model_dir("qwen3"), f"adapter_name_or_path={adapter}"], ExitCode.INPUT, str(adapter)),
    ):
        ended = verify(*words, *FEW)
        assert ended.returncode == code, ended.stderr
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert "base_model_name_or_path is empty" in verify(adapter, *FEW).stderr
