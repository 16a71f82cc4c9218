"""A model with adapters computes W + s · B · A of every matrix, whatever form they have in files; what doesn't fit is
refused, where peft says nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import model_class, tiny_config
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

from megatune.bridge.peft_model import apply_adapter, merge_adapters
from megatune.cli.main import main
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.families.adapters import adapter_weights, scaling
from megatune.families.weights import hf_shapes, layers_of
from megatune.generation.generator import Generator
from megatune.generation.inputs import adapted_model
from megatune.generation.options import GenerationOptions
from megatune.generation.transformers_backend import TransformersBackend
from megatune.verify.checkpoints import write_random_adapter
from megatune.verify.reference import checkpoint_tensors

MakeModel = Callable[..., Path]
PREFIX = "base_model.model."
ALL = {"finetuning_type": "lora", "lora_rank": 4}


def load(folder: Path) -> Any:
    family = json.loads((folder / "config.json").read_text())["model_type"]
    return model_class(family).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def tensors_one_by_one(model: Path, settings: FinetuningSettings) -> dict[str, Tensor]:
    """Random A and B of every matrix, by name, those of experts one by one."""
    architecture, generator = load_architecture(model), torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) / 10
        for weight in adapter_weights(architecture, settings)
        for layer in layers_of(weight, architecture)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }


def write_one_by_one(folder: Path, model: Path, settings: FinetuningSettings) -> Path:
    """Write an adapter as peft did with Transformers 4: every expert's matrices are modules with names."""
    tensors = tensors_one_by_one(model, settings)
    folder.mkdir()
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    names = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    target = rf".*language_model.*\.({'|'.join(names)})" if "vl" in model.name else names
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": target,
               "use_rslora": settings.use_rslora, "base_model_name_or_path": str(model)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merged(model: Path, adapters: list[dict[str, Tensor]], scale: float, folder: Path) -> Any:
    """Load the model with s · B · A added in its file."""
    weights = load_file(model / "model.safetensors")
    for tensors in adapters:
        for name in tensors:
            if name.endswith(".lora_A.weight"):
                path = name.removesuffix("lora_A.weight")
                key = f"{path}weight" if f"{path}weight" in weights else f"{path}weight".replace(".language_model", "")
                weights[key] += scale * tensors[f"{path}lora_B.weight"] @ tensors[name]
    shutil.copytree(model, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load(folder)


def logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(2, 26)[None]).logits


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


FAMILIES = ["qwen3", "qwen2_5_vl", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"]


@pytest.mark.covering
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_merged_weights(
    family: str, use_rslora: bool, model_dir: MakeModel, tmp_path: Path
) -> None:
    """peft alone leaves out some or all experts' adapters of qwen2_moe, and dense layers' beside experts."""
    model, settings = model_dir(family), FinetuningSettings(**ALL, use_rslora=use_rslora)
    applied = apply_adapter(load(model), write_one_by_one(tmp_path / "adapter", model, settings), trained=True)
    tensors, scale = tensors_one_by_one(model, settings), scaling(settings)
    truth = merged(model, [tensors], scale, tmp_path / "merged")
    found, expected = logits(applied.model), logits(truth)
    assert distance(found, expected) < 1e-5
    assert distance(logits(load(model)), expected) > 0.1
    found.square().mean().backward()
    expected.square().mean().backward()
    # The gradient of W + s · B · A says those of A and B.
    named = {name: parameter.grad for name, parameter in truth.named_parameters() if parameter.grad is not None}
    whole, gradients = checkpoint_tensors(truth, named), applied.gradients_of(load_architecture(model))
    assert gradients.keys() == tensors.keys()
    for name in (name.removesuffix("lora_A.weight") for name in tensors if name.endswith("lora_A.weight")):
        key = f"{name}weight" if f"{name}weight" in whole else f"{name}weight".replace(".language_model", "")
        a, b = tensors[f"{name}lora_A.weight"], tensors[f"{name}lora_B.weight"]
        for part, its in (("A", scale * b.T @ whole[key]), ("B", scale * whole[key] @ a.T)):
            assert (gradients[f"{name}lora_{part}.weight"] - its).norm() <= 1e-4 * its.norm() + 1e-12


@pytest.mark.parametrize("use_rslora", [False, True])
def test_experts_one_by_one_of_a_family_that_is_not_trained_here(tmp_path: Path, use_rslora: bool) -> None:
    model = tmp_path / "olmoe"
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = OlmoeConfig(vocab_size=64, num_hidden_layers=2, num_experts=4, **sizes, eos_token_id=1, pad_token_id=1)
    OlmoeForCausalLM(config).save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    named = [name.removesuffix("weight") for name in weights if ".experts." in name or "_proj." in name]
    assert len(named) == 2 * (4 + 3 * 4)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name in named:
        out, into = weights[f"{name}weight"].shape
        tensors[f"{name}lora_A.weight"] = torch.randn(4, into, generator=generator) / 4
        tensors[f"{name}lora_B.weight"] = torch.randn(out, 4, generator=generator) / 4
    (folder := tmp_path / "adapter").mkdir()
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "use_rslora": use_rslora}
    written["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(written))

    def read(path: Path) -> Any:
        return OlmoeForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()

    for name in named:
        weights[f"{name}weight"] += (
            8 / (2 if use_rslora else 4) * tensors[f"{name}lora_B.weight"] @ tensors[f"{name}lora_A.weight"]
        )
    shutil.copytree(model, tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    expected = logits(read(tmp_path / "merged"))
    assert distance(logits(apply_adapter(read(model), folder).model), expected) < 1e-5
    assert distance(logits(merge_adapters(read(model), [folder])), expected) < 1e-5
    assert distance(logits(read(model)), expected) > 0.01


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_vl_moe"])
def test_what_training_writes_is_what_peft_loads(family: str, model_dir: MakeModel, tmp_path: Path) -> None:
    from peft import PeftModel

    model, settings = model_dir(family), FinetuningSettings(**ALL, use_rslora=True)
    write_random_adapter(tmp_path, model, load_architecture(model), settings, seed=1)
    ours = logits(apply_adapter(load(model), tmp_path).model)
    assert distance(logits(PeftModel.from_pretrained(load(model), str(tmp_path)).eval()), ours) < 1e-6
    assert distance(logits(load(model)), ours) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_adapters_are_applied_in_order(family: str, model_dir: MakeModel, tmp_path: Path) -> None:
    model, settings = model_dir(family), FinetuningSettings(**ALL)
    one = write_one_by_one(tmp_path / "one", model, settings)
    tensors = tensors_one_by_one(model, settings)
    found = logits(apply_adapter(merge_adapters(load(model), [one]), one).model)
    assert distance(found, logits(merged(model, [tensors, tensors], 2.0, tmp_path / "merged"))) < 1e-5


def refusal(model: Path, adapter: Path) -> str:
    with pytest.raises(MegatuneError) as raised:
        apply_adapter(load(model), adapter)
    assert raised.value.exit_code == ExitCode.INPUT
    return str(raised.value)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_adapter_that_lacks_tensors_or_has_others_is_refused(
    family: str, model_dir: MakeModel, tmp_path: Path
) -> None:
    model = model_dir(family)
    adapter = write_one_by_one(tmp_path / "adapter", model, FinetuningSettings(**ALL))
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.3.mlp" in name and "down_proj.lora_B" in name)
    tensors[name.replace("layers.3", "layers.9")] = tensors.pop(name)
    save_file(tensors, path)
    said = refusal(model, adapter)
    assert f"the adapter lacks 1 tensors: {name.removeprefix(PREFIX)}" in said
    assert "1 tensors of the adapter do not fit the model: model.layers.9" in said


def test_an_adapter_of_another_model_is_refused(model_dir: MakeModel, tmp_path: Path) -> None:
    for change, said in (({"num_hidden_layers": 3}, "lacks 14 tensors"), ({"hidden_size": 32}, "of another shape")):
        other = tmp_path / said.replace(" ", "-") / "qwen3"
        model_class("qwen3").from_config(tiny_config("qwen3", **change)).save_pretrained(other)
        adapter = write_one_by_one(other.parent / "adapter", other, FinetuningSettings(**ALL))
        assert said in refusal(model_dir("qwen3"), adapter)
    adapter = write_one_by_one(tmp_path / "adapter", model_dir("deepseek_v3"), FinetuningSettings(**ALL))
    assert "do not fit the model" in refusal(model_dir("mixtral"), adapter)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"cut")
    assert "cannot be read" in refusal(model_dir("deepseek_v3"), adapter)


def test_which_base_and_which_adapters(tmp_path: Path, model_dir: MakeModel) -> None:
    model = model_dir("qwen3")
    run = tmp_path / "run"
    run.mkdir()
    adapter = write_one_by_one(run / "checkpoint-9", model, FinetuningSettings(**ALL))
    assert adapted_model(str(model)) == (str(model), ())
    assert adapted_model("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", ())
    assert adapted_model(str(adapter)) == adapted_model(str(run)) == (str(model), (adapter,))
    assert adapted_model(str(run), "other") == ("other", (adapter,))
    assert adapted_model(str(model), None, [str(run), str(adapter)]) == (str(model), (adapter, adapter))
    shutil.copytree(adapter, run, dirs_exist_ok=True)  # the final adapter, once the run is done
    assert adapted_model(str(run)).adapters == (run,)


def test_names_that_say_too_much_or_too_little(tmp_path: Path, model_dir: MakeModel) -> None:
    model = str(model_dir("qwen3"))
    adapter = write_one_by_one(tmp_path / "adapter", model_dir("qwen3"), FinetuningSettings(**ALL))

    def said(*words: Any) -> str:
        with pytest.raises(MegatuneError) as raised:
            adapted_model(*words)
        return str(raised.value)

    assert "--model_name_or_path: has no effect" in said(model, model)
    assert f"--adapter_name_or_path {adapter},{adapter}" in said(str(adapter), None, [str(adapter)])
    both = said(model, None, [str(tmp_path / "adaptor"), model])
    assert f"did you mean {adapter}?" in both
    assert f"{model} has no adapter" in both
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    assert "is in Megatron-Core's format" in said(model, None, [str(tmp_path / "megatron")])
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, message in (("", "base_model_name_or_path is empty"), ("/gone", "there is no folder /gone, the base")):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        assert message in said(str(adapter))
        assert adapted_model(str(adapter), model).base == model
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    assert "peft_type is 'IA3'" in said(str(adapter))


def test_infer_answers_with_an_adapter(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path_factory, "qwen3")
    settings = FinetuningSettings(**ALL)
    adapter = write_one_by_one(tmp_path / "adapter", model, settings)
    options = GenerationOptions(max_new_tokens=12)
    shutil.copy(model / "tokenizer_config.json", adapter)
    shutil.copy(model / "tokenizer.json", adapter)  # as runs write them, here without a chat template
    truth = merged(model, [tensors_one_by_one(model, settings)], scaling(settings), tmp_path / "merged")
    generator = Generator.load(model, options)
    expected = (
        Generator(TransformersBackend(truth, generator.tokenizer), generator.tokenizer, options, "")
        .complete("Who")
        .text
    )
    assert expected != generator.complete("Who").text

    capsys.readouterr()
    for words in (["--adapters", str(adapter)], ["--adapter_name_or_path", str(adapter), str(model)]):
        assert main(["infer", *words, "--max_new_tokens", "12", "--prompt", "Who", "--raw"]) == ExitCode.DONE
        printed = capsys.readouterr()
        assert printed.out.strip() == expected.strip()
        assert [line for line in printed.err.splitlines() if "cut after" not in line] == []
    assert main(["infer", str(adapter), "--prompt", "Who"]) == ExitCode.INPUT
    assert "no chat template" in capsys.readouterr().err
