"""Adapters of peft are read in every form that it writes, and ours are loaded by it as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import (
    MLP,
    QKVO,
    Tensors,
    all_tensors,
    assert_same_numbers,
    load,
    logits,
    lora,
    peft_adapter,
    random_adapter,
    with_adapter,
)
from model_sizes import MakeModel
from safetensors.torch import load_file, save_file

from megatune.bridge.adapter_files import MergedFolder, open_adapter, write_adapter, write_adapter_config
from megatune.bridge.assemble import open_checkpoint
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.errors import MegatuneError
from megatune.families import FAMILIES, load_architecture
from megatune.families.peft_form import peft_problems
from megatune.families.peft_reading import settings_of
from megatune.families.table import Box

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"target_modules": QKVO + MLP}),
    "DoRA, rank-stabilized": ("qwen3", {"target_modules": QKVO + MLP, "use_dora": True, "use_rslora": True}),
    "modules whole": ("qwen3", {"target_modules": QKVO, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "output layer": ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
    "some layers, several ranks": (
        "qwen3",
        {
            "target_modules": QKVO,
            "layers_to_transform": [1, 2],
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {r"layers\.1\.self_attn\.o_proj": 3},
        },
    ),
    "experts by their old names": ("mixtral", {"target_modules": [*QKVO, "w1", "w2", "w3"]}),
    "experts as parameters, with a router": (
        "mixtral",
        {"target_modules": QKVO, "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    ),
    "one of the experts' parameters": ("mixtral", {"target_modules": QKVO, "target_parameters": EXPERTS[:1]}),
    "shared and routed experts": ("qwen2_moe", {"target_modules": QKVO + MLP, "target_parameters": EXPERTS}),
    "experts stacked from their names": ("qwen3_moe", {"target_modules": QKVO + MLP}),
    "a dense feed-forward as parameters": (
        "qwen3_moe",
        {"target_modules": QKVO, "target_parameters": [*EXPERTS, "mlp.gate_proj.weight"]},
    ),
    "latent attention": ("deepseek_v3", {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj", *MLP]}),
    "a vision model's everything": ("qwen2_5_vl", {"target_modules": "all-linear"}),
    "mergers": ("qwen3_vl", {"target_modules": ["q_proj", "linear_fc1", "qkv"]}),
    "stacked in the base's files, too": ("qwen3_vl_moe", {"target_modules": QKVO, "target_parameters": EXPERTS}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_peft_is_merged_as_peft_merges_it(form: str, model_dir: MakeModel, tmp_path: Path) -> None:
    family, config = FORMS[form]
    model = model_dir(family)
    peft_adapter(model, tmp_path / "adapter", **config).merge_and_unload().save_pretrained(tmp_path / "merged")
    architecture = load_architecture(model)
    base, expected = (open_checkpoint(folder, architecture)[0] for folder in (model, tmp_path / "merged"))
    adapter = open_adapter(tmp_path / "adapter", architecture)
    merged = MergedFolder(base, adapter)
    num_changed = 0
    for name, shape in all_tensors(architecture):
        found = merged.whole(name)
        assert_same_numbers(found, expected.whole(name))
        assert adapter.changes(name) == (not torch.equal(expected.whole(name), base.whole(name))), name
        num_changed += adapter.changes(name)
        if adapter.changes(name) and len(shape) == 2:
            for box in (Box(0, shape[0], 1, shape[1] - 1), Box(1, shape[0] // 2, 0, shape[1])):
                assert_same_numbers(merged.read_box(name, box), found[box.slices])
    assert num_changed


def test_old_names_of_a_vision_models_modules_are_read(model_dir: MakeModel, tmp_path: Path) -> None:
    """Transformers before 4.52 had the decoder where language models have it, and the encoder beside it."""
    model = model_dir("qwen2_5_vl")
    peft_adapter(model, tmp_path, target_modules="all-linear")
    architecture = load_architecture(model)
    new, path = open_adapter(tmp_path, architecture), tmp_path / "adapter_model.safetensors"
    old = tmp_path / "old"
    shutil.copytree(tmp_path, old)
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.model.visual.", "model.visual."): tensor
        for name, tensor in load_file(path).items()
    }
    assert tensors.keys().isdisjoint(load_file(path))
    save_file(tensors, old / path.name)
    found = open_adapter(old, architecture)
    assert found.adapter.tensors.keys() == new.adapter.tensors.keys()
    for name in new.adapter.tensors:
        assert torch.equal(found.whole(name), new.whole(name))


SELECTIONS: dict[str, tuple[str, bool, FinetuningSettings]] = {
    **{family: (family, False, lora()) for family in FAMILIES},
    "encoder and mergers": (
        "qwen2_5_vl",
        False,
        lora(freeze_vision_tower=False, freeze_multi_modal_projector=False, lora_target=["all", "merger.mlp.0"]),
    ),
    "encoder alone": ("qwen3_vl", False, lora(freeze_vision_tower=False, freeze_language_model=True)),
    "modules whole": ("qwen3", False, lora(additional_target=["embed_tokens", "lm_head", "norm"])),
    "tied embeddings whole": ("qwen3", True, lora(additional_target=["embed_tokens"], use_dora=True)),
    "rank-stabilized experts": ("mixtral", False, lora(use_rslora=True)),
    "rank-stabilized experts and shared ones": ("deepseek_v3", False, lora(use_rslora=True)),
    "gate and up of experts": ("qwen2_moe", False, lora(lora_target=["linear_fc1"])),
    "down of experts": ("qwen3_moe", False, lora(lora_target=["linear_fc2", "q_proj"])),
    "shared experts alone": ("deepseek_v3", False, lora(lora_target=["shared_experts.gate_proj", "o_proj"])),
    "DoRA of attention": ("qwen3_moe", False, lora(lora_target=["q_proj"], use_dora=True)),
    "names of decoder and encoder": (
        "qwen2_5_vl",
        False,
        lora(lora_target=["q_proj", "mlp.down_proj"], freeze_vision_tower=False),
    ),
}


# Of families in each form of modules: plain, fused, with latent or linear attention, experts apart and stacked, an
# encoder; and those whose modules have other names than their files, which show in peft's own copy alone. Each of the
# others is loaded by peft, too, in test_merged_model.py.
_ONE_OF_ITS_FORM = ("llama", "phi3", "deepseek_v3", "gpt_oss", "qwen3_5_moe", "qwen3_vl_moe", "gemma3")


@pytest.mark.extended(*(name for name, each in FAMILIES.items() if name not in _ONE_OF_ITS_FORM and not each.renamed))
@pytest.mark.covering
@pytest.mark.parametrize("case", SELECTIONS)
def test_peft_loads_what_is_written_and_computes_the_same(case: str, model_dir: MakeModel, tmp_path: Path) -> None:
    family, tied, selection = SELECTIONS[case]
    model = model_dir(family, tied=tied)
    architecture = load_architecture(model)
    assert not [*peft_problems(architecture, selection)]
    values, adapter = random_adapter(architecture, selection), tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(adapter / "adapter_model.safetensors", Tensors(values), architecture, selection)
    write_adapter_config(adapter, architecture, selection, str(model))

    # What was written is read back, and peft's own copy of it, too.
    adapted = with_adapter(model, adapter)
    adapted.save_pretrained(tmp_path / "again")
    for folder in (adapter, tmp_path / "again"):
        found = open_adapter(folder, architecture, selection)
        for name, value in values.items():
            assert torch.equal(found.whole(name), value), name
        settings = selection.model_copy(update=settings_of(folder, architecture))
        open_adapter(folder, architecture, settings)

    with_it = logits(adapted)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    base, expected = (open_checkpoint(each, architecture)[0] for each in (model, tmp_path / "merged"))
    merged = MergedFolder(base, open_adapter(adapter, architecture))
    for name, _ in all_tensors(architecture):
        assert_same_numbers(merged.whole(name), expected.whole(name))
    assert_same_numbers(with_it, logits(load(tmp_path / "merged")), 5e-5)


def test_dropout_is_kept_where_peft_takes_it(model_dir: MakeModel, tmp_path: Path) -> None:
    for family, dropout in (("qwen3", 0.1), ("mixtral", 0.0)):
        path = write_adapter_config(tmp_path, load_architecture(model_dir(family)), lora(), "base", dropout=0.1)
        config = json.loads(path.read_text())
        assert config["lora_dropout"] == dropout
        assert config["base_model_name_or_path"] == "base"
        assert config["inference_mode"] is True


def test_what_peft_has_no_form_for_is_known(model_dir: MakeModel) -> None:
    architecture = load_architecture(model_dir("mixtral"))
    (found,) = peft_problems(architecture, lora(lora_target=["w1", "q_proj"]))
    assert found[0] == "lora_target"
    assert "w1 and w3 are one matrix" in found[1]
    problems = peft_problems(load_architecture(model_dir("deepseek_v3")), lora(use_dora=True, lora_target=["up_proj"]))
    assert [key for key, _ in problems] == ["lora_target", "use_dora"]
    (found,) = peft_problems(
        load_architecture(model_dir("qwen2_moe")), lora(use_dora=True, lora_target=["shared_expert.up_proj"])
    )
    assert found[0] == "use_dora"


def refusal(function: Any, *args: Any) -> str:
    with pytest.raises(MegatuneError) as error:
        function(*args)
    return str(error.value)


def test_another_models_adapter_is_refused(model_dir: MakeModel, tmp_path: Path) -> None:
    peft_adapter(model_dir("qwen3"), tmp_path, target_modules=QKVO)
    path = tmp_path / "adapter_model.safetensors"
    text = refusal(open_adapter, tmp_path, load_architecture(model_dir("deepseek_v3")))
    assert "tensors have no module in a deepseek_v3" in text
    text = refusal(open_adapter, tmp_path, load_architecture(model_dir("qwen3", hidden_size=32)))
    assert "belongs to the model's matrix" in text

    tensors = load_file(path)
    prefix = "base_model.model.model.layers.0.self_attn"
    changed = {name: tensor for name, tensor in tensors.items() if name != f"{prefix}.q_proj.lora_A.weight"}
    changed[f"{prefix}.o_proj.lora_magnitude_vector"] = torch.ones(64)
    changed["base_model.model.model.layers.9.mlp.down_proj.lora_A.weight"] = torch.ones(4, 96)
    changed["base_model.model.nothing"] = torch.ones(1)
    changed[f"{prefix}.v_proj.lora_A.weight"] = torch.ones(2, 64)
    changed[f"{prefix}.v_proj.lora_B.weight"] = torch.ones(48, 2)
    save_file(changed, path)
    text = refusal(open_adapter, tmp_path, load_architecture(model_dir("qwen3")))
    for said in (
        "1 tensor has no module",
        "is there without model.layers.0.self_attn.q_proj.lora_A.weight",
        "has a magnitude, adapter_config.json says use_dora False",
        "layers.9.mlp.down_proj.lora_A.weight is there without",
        "has rank 2, adapter_config.json says 4",
    ):
        assert said in text
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read as safetensors" in refusal(open_adapter, tmp_path, load_architecture(model_dir("qwen3")))


@pytest.mark.parametrize(
    ("form", "module"),
    [("dense", "layers.0.self_attn.q_proj"), ("experts as parameters, with a router", "layers.0.mlp.experts")],
)
@pytest.mark.parametrize("shapes", [((), ()), ((0, 64), (96, 0))])
def test_shapes_that_no_adapter_has_are_refused(
    form: str, module: str, shapes: tuple[tuple[int, ...], ...], model_dir: MakeModel, tmp_path: Path
) -> None:
    family, config = FORMS[form]
    peft_adapter(model_dir(family), tmp_path, **config)
    path = tmp_path / "adapter_model.safetensors"
    prefix = f"base_model.model.model.{module}.lora_"
    wrong = {f"{prefix}{which}.weight": torch.ones(shape) for which, shape in zip("AB", shapes, strict=True)}
    save_file(load_file(path) | wrong, path)
    assert module in refusal(open_adapter, tmp_path, load_architecture(model_dir(family)))


def test_a_copy_of_a_tied_embedding_is_refused(model_dir: MakeModel, tmp_path: Path) -> None:
    model = model_dir("qwen3", tied=True)
    peft_adapter(model, tmp_path, target_modules=QKVO, modules_to_save=["embed_tokens"])
    assert "of a model with tied embeddings" in refusal(open_adapter, tmp_path, load_architecture(model))


def test_only_what_is_trained_is_trained_further(model_dir: MakeModel, tmp_path: Path) -> None:
    model = model_dir("qwen3")
    architecture = load_architecture(model)
    peft_adapter(model, tmp_path, target_modules=QKVO, modules_to_save=["lm_head"])
    known = {"lora_target": QKVO, "additional_target": ["lm_head"]}
    open_adapter(tmp_path, architecture, lora(**known))
    text = refusal(open_adapter, tmp_path, architecture, lora(lora_target=["q_proj", "up_proj"]))
    assert "it lacks 8 tensors, such as" in text
    assert "it has 25 tensors, such as" in text
    other = lora(**known).model_copy(update={"lora_rank": 2})
    assert "32 tensors have other shapes" in refusal(open_adapter, tmp_path, architecture, other)
    other = lora(**known).model_copy(update={"lora_alpha": 4, "use_rslora": True})
    text = refusal(open_adapter, tmp_path, architecture, other)
    assert "lora_alpha is 12 in the adapter, but 4 in this run" in text
    assert "use_rslora is false in the adapter, but true in this run" in text


UNTRAINABLE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "some layers": ("qwen3", {"target_modules": QKVO, "layers_to_transform": [1]}, ["in 1 of 4 modules"]),
    "ranks": ("qwen3", {"target_modules": QKVO, "rank_pattern": {"q_proj": 2}}, ["ranks or alphas differ", "rank 2"]),
    "alphas": ("qwen3", {"target_modules": QKVO, "alpha_pattern": {"q_proj": 2}}, ["alpha 2 in"]),
    "output layer": ("qwen3", {"target_modules": ["q_proj", "lm_head"]}, ["lm_head has an adapter"]),
    "norms": ("qwen3", {"target_modules": QKVO, "modules_to_save": ["q_norm"]}, ["inside layers"]),
}


@pytest.mark.parametrize("case", UNTRAINABLE)
def test_an_adapter_that_can_be_merged_only_is_named(case: str, model_dir: MakeModel, tmp_path: Path) -> None:
    family, config, said = UNTRAINABLE[case]
    model = model_dir(family)
    peft_adapter(model, tmp_path, **config)
    open_adapter(tmp_path, load_architecture(model))
    text = refusal(settings_of, tmp_path, load_architecture(model))
    assert all(each in text for each in said), text
    assert "create_new_adapter: true" in text
    assert "and 0 more" not in text


def test_experts_that_share_an_adapter_of_gate_and_up(model_dir: MakeModel, tmp_path: Path) -> None:
    """They can be merged, and are not trained further: two adapters would depart from one after the first step."""
    model = model_dir("mixtral")
    architecture = load_architecture(model)
    peft_adapter(model, tmp_path / "one", target_modules=QKVO, target_parameters=EXPERTS)
    assert "is one adapter of gate and up together" in refusal(settings_of, tmp_path / "one", architecture)
    found = open_adapter(tmp_path / "one", architecture)
    gate, up = (f"model.layers.0.block_sparse_moe.experts.1.{each}.lora_A.weight" for each in ("w1", "w3"))
    assert torch.equal(found.whole(gate), found.whole(up))
    peft_adapter(model, tmp_path / "two", target_modules=[*QKVO, "w1", "w2", "w3"])
    settings = lora().model_copy(update=settings_of(tmp_path / "two", architecture))
    text = refusal(open_adapter, tmp_path / "two", architecture, settings)
    assert "is one adapter of gate and up together" in text
