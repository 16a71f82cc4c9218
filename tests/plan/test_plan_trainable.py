"""Rules of what is trained that need the model: what train and plan refuse before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_sizes import tiny_config

from megatune.cli.main import main
from megatune.config.load import load
from megatune.errors import ExitCode, MegatuneError
from megatune.plan.run.preflight import preflight

FREEZE, LORA = "finetuning_type=freeze", "finetuning_type=lora"
FREEZE_SETTINGS = ["freeze_language_model=true", "freeze_vision_tower=true", "freeze_multi_modal_projector=true"]


def refused(folder: Path, family: str, overrides: list[str], **sizes: object) -> str:
    """What a run is refused with before its processes start; "" where it is not."""
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **sizes).to_dict()))
    loaded = load(
        None,
        [f"model_name_or_path={folder}", "output_dir=o", "dataset=d", "template=qwen", "cutoff_len=64", *overrides],
    )
    try:
        preflight(loaded, 1)
    except MegatuneError as error:
        return str(error) if error.exit_code == ExitCode.SETTINGS else repr(error)
    return ""


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", [FREEZE, "freeze_trainable_modules=mlp,self_attn,input_layernorm,post_attention_layernorm"]),
        ("deepseek_v3", [FREEZE, "freeze_trainable_modules=mlp", "freeze_extra_modules=embed_tokens,norm,lm_head"]),
        ("qwen3_vl", [FREEZE, "freeze_extra_modules=norm"]),
        ("qwen3_vl", [*FREEZE_SETTINGS, "freeze_deepstack_mergers=false"]),
        ("qwen2_vl", [*FREEZE_SETTINGS[:2], "freeze_multi_modal_projector=false"]),
        ("qwen3", [LORA, "additional_target=embed_tokens,norm,lm_head"]),
        ("qwen3", [LORA, r"lora_target=q_proj,self_attn.v_proj,linear_fc1,model\.layers\.\d+\.mlp\.down_proj"]),
        ("mixtral", [LORA, "lora_target=w1,w3,q_proj"]),
        ("deepseek_v3", [LORA, "lora_target=q_a_proj,kv_b_proj", "lora_dropout=0.1"]),
        # Of a family that may have routed experts, without them.
        ("gemma4_text", [LORA, "lora_dropout=0.1"]),
        ("gemma4_text", [LORA, "use_dora=true"]),
        ("qwen3_vl", [LORA, "freeze_vision_tower=false", "vision_lr=1e-6", "merger_lr=1e-5"]),
        ("qwen2_vl", [LORA, "freeze_multi_modal_projector=false", "lora_target=all,merger.mlp.0", "merger_lr=1e-5"]),
        ("qwen2_vl", [LORA, "freeze_vision_tower=false", "freeze_language_model=true"]),
    ],
)
def test_what_the_model_has_passes(tmp_path, family, overrides):
    assert refused(tmp_path, family, overrides) == ""


WRONG = [
    (
        "qwen3",
        [FREEZE, "freeze_trainable_modules=mlp,self_attention"],
        "freeze_trainable_modules has self_attention\n"
        "    why: modules of a qwen3 inside a layer: all, input_layernorm, post_attention_layernorm, mlp, self_attn\n"
        "    fix: did you mean self_attn?",
    ),
    (
        "qwen3",
        [FREEZE, "freeze_extra_modules=embeddings"],
        "freeze_extra_modules has embeddings\n"
        "    why: modules of a qwen3 outside of layers: embed_tokens, norm, lm_head\n"
        "    fix: did you mean embed_tokens?",
    ),
    (
        "qwen3_vl",
        [FREEZE, "freeze_extra_modules=merger"],
        "freeze_extra_modules has merger\n"
        "    why: modules of a qwen3_vl outside of layers: embed_tokens, norm, lm_head\n"
        "    fix: write freeze_extra_modules: embed_tokens, or others of them",
    ),
    (
        "qwen3_vl",
        [FREEZE, "freeze_extra_modules=lm_head", "freeze_vision_tower=false", "freeze_language_model=true"],
        "freeze_extra_modules: [lm_head] with freeze_language_model: true\n"
        "    why: it names parts of the language model\n"
        "    fix: remove freeze_extra_modules or freeze_language_model",
    ),
    (
        "qwen3",
        [FREEZE, "freeze_trainable_modules=[]"],
        "freeze_trainable_modules is empty\n"
        "    why: nothing would be trained\n"
        "    fix: write freeze_trainable_modules: all",
    ),
    (
        "qwen3",
        ["freeze_language_model=true"],
        "freeze_language_model: true leaves nothing to train\n"
        "    why: the model has no vision encoder\n"
        "    fix: remove freeze_language_model",
    ),
    (
        "qwen2_vl",
        FREEZE_SETTINGS,
        "freeze_language_model: true, freeze_vision_tower: true, freeze_multi_modal_projector: true "
        "leave nothing to train\n    fix: write freeze_vision_tower: false, or remove freeze_language_model",
    ),
    (
        "qwen3",
        [LORA, "lora_target=q_proj,v_prj"],
        "lora_target has v_prj\n"
        "    why: linear layers of a qwen3: gate_proj, up_proj, down_proj, q_proj, k_proj, v_proj, o_proj\n"
        "    fix: did you mean v_proj?",
    ),
    (
        "qwen3",
        [LORA, "lora_target=lm_head"],
        "lora_target has lm_head\n"
        "    why: adapters of the output layer and of word embeddings are not supported\n"
        "    fix: write additional_target: lm_head, which trains it fully",
    ),
    (
        "qwen3_moe",
        [LORA, "lora_target=mlp.gate"],
        "lora_target has mlp.gate\n"
        "    why: the router is not a linear layer in Transformers, so it has no adapter\n"
        "    fix: remove mlp.gate",
    ),
    (
        "qwen2_moe",
        [LORA, "lora_target=shared_expert_gate"],
        "lora_target has shared_expert_gate\n"
        "    why: adapters of shared_expert_gate, the gate of shared experts, are not supported\n"
        "    fix: remove shared_expert_gate",
    ),
    (
        "qwen3",
        [LORA, "lora_target=norm"],
        "lora_target has norm\n"
        "    why: norm is not a matrix, so it has no adapter\n"
        "    fix: write additional_target: norm, which trains it fully",
    ),
    (
        "qwen3",
        [LORA, r"lora_target=.*\.[12]\..*q_proj"],
        "lora_target has .*\\.[12]\\..*q_proj\n"
        "    why: it matches layers 1, 2 only; an adapter must be in all layers that have the matrix\n"
        "    fix: write \\d+ instead of the layers' numbers",
    ),
    (
        "qwen3_vl",
        [LORA, "lora_target=qkv"],
        "lora_target has qkv, which is in the vision encoder, and freeze_vision_tower: true\n"
        "    why: frozen parts have no adapters\n"
        "    fix: write freeze_vision_tower: false, or remove qkv",
    ),
    (
        "qwen3_vl",
        [LORA, "freeze_language_model=true", "freeze_vision_tower=false", "lora_target=q_proj,qkv"],
        "lora_target has q_proj, which is in the language model, and freeze_language_model: true\n"
        "    why: frozen parts have no adapters\n"
        "    fix: write freeze_language_model: false, or remove q_proj",
    ),
    (
        "qwen3_vl",
        [LORA, "freeze_vision_tower=false", "lora_target=q_proj", "vision_lr=1e-6"],
        "freeze_vision_tower: false, and no adapter is in the vision encoder\n"
        "    why: with lora a part is trained only if lora_target names its linear layers, such as qkv\n"
        "    fix: write lora_target: q_proj,qkv, or remove freeze_vision_tower",
    ),
    (
        "qwen3_vl",
        [LORA, "freeze_multi_modal_projector=false"],
        "freeze_multi_modal_projector: false, and no adapter is in the projector\n"
        "    why: with lora a part is trained only if lora_target names its linear layers, such as merger.linear_fc1; "
        "all does not include it\n"
        "    fix: write lora_target: all,merger.linear_fc1, or remove freeze_multi_modal_projector",
    ),
    (
        "internvl",
        [LORA, "freeze_multi_modal_projector=false"],
        "freeze_multi_modal_projector: false, and no adapter is in the projector\n"
        "    why: with lora a part is trained only if lora_target names its linear layers, such as "
        "multi_modal_projector.linear_1; all does not include it\n"
        "    fix: write lora_target: all,multi_modal_projector.linear_1, or remove freeze_multi_modal_projector",
    ),
    (
        "gemma4",
        [LORA, "freeze_multi_modal_projector=false"],
        "freeze_multi_modal_projector: false, and no adapter is in the projector\n"
        "    why: that of a gemma4 has no linear layer that can have one\n"
        "    fix: remove freeze_multi_modal_projector, or write finetuning_type: full",
    ),
    (
        "qwen2",
        [LORA, "additional_target=embed_tokens,lm_heat"],
        "additional_target has lm_heat\n"
        "    why: modules of a qwen2 outside of layers: embed_tokens, norm, lm_head\n"
        "    fix: did you mean lm_head?",
    ),
    (
        "qwen3",
        [LORA, "additional_target=q_proj"],
        "additional_target has q_proj\n"
        "    why: modules of a qwen3 outside of layers: embed_tokens, norm, lm_head\n"
        "    fix: write lora_target: q_proj, for adapters next to it",
    ),
    (
        "qwen3_vl",
        [LORA, "additional_target=norm", "freeze_vision_tower=false", "freeze_language_model=true"],
        "additional_target: [norm] with freeze_language_model: true\n"
        "    why: it names parts of the language model\n"
        "    fix: remove additional_target or freeze_language_model",
    ),
    (
        "qwen3_moe",
        [LORA, "lora_dropout=0.1"],
        "lora_dropout 0.1 with adapters of routed experts\n"
        "    why: peft supports no dropout for experts\n"
        "    fix: write lora_dropout: 0, or write lora_target: q_proj,k_proj,v_proj,o_proj",
    ),
    (
        "mixtral",
        [LORA, "lora_target=w1", "use_dora=true"],
        "use_dora: true with adapters of routed experts\n"
        "    why: peft does not support DoRA for experts\n"
        "    fix: write use_dora: false, or write lora_target: q_proj,k_proj,v_proj,o_proj",
    ),
    (
        "qwen3",
        [LORA, "freeze_language_model=true"],
        "freeze_language_model: true leaves nothing to train\n"
        "    why: the model has no vision encoder\n"
        "    fix: remove freeze_language_model",
    ),
]  # fmt: skip


def test_tied_embeddings_go_by_the_name_of_the_first(tmp_path):
    found = refused(tmp_path, "qwen3", [LORA, "additional_target=norm,lm_head"], tie_word_embeddings=True)
    assert found.partition(": ")[2] == (
        "additional_target has lm_head, and the model ties embed_tokens and lm_head\n"
        "    why: they share one matrix, which has the name of the first\n"
        "    fix: write embed_tokens instead, which trains the shared matrix"
    )


NEW_ROWS = [LORA, "add_tokens=<fish>"]


def test_adapters_have_the_rows_of_new_tokens(tmp_path):
    """Unless they are merged: peft loads adapters on a base without these rows."""
    found = refused(tmp_path, "qwen3", [*NEW_ROWS, "additional_target=norm,embed_tokens"])
    assert found.partition(": ")[2] == (
        "tokens are added, and additional_target has no lm_head\n"
        "    why: new rows would be neither in the adapter nor in its base model\n"
        "    fix: write additional_target: norm,embed_tokens,lm_head, or merge_lora: true"
    )


@pytest.mark.parametrize(("family", "overrides", "message"), WRONG)
def test_train_refuses_what_the_model_has_not(tmp_path, family, overrides, message):
    found = refused(tmp_path, family, overrides)
    assert found.partition(": ")[2] == message


@pytest.mark.parametrize(("family", "overrides", "message"), WRONG)
def test_plan_refuses_it_too(tmp_path, capsys, family, overrides, message):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family).to_dict()))
    code = main(["plan", str(tmp_path), "--gpu", "a100-80g", "--gpus", "1", *overrides])
    assert code == ExitCode.SETTINGS
    assert message.splitlines()[0] in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("per_device_train_batch_size=1",)], ids=["search", "own layout"])
def test_plan_says_what_freezing_trains_and_saves(tmp_path, capsys, words):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3").to_dict()))
    command = ["plan", str(tmp_path), "--gpu", "a100-80g", "--gpus", "1", *words]
    assert main([*command, FREEZE, "freeze_trainable_layers=1"]) == ExitCode.DONE
    assert "freeze fine-tuning, frozen: language model but for layer 3, " in capsys.readouterr().out
    assert main([*command, FREEZE, "freeze_trainable_layers=5"]) == ExitCode.SETTINGS
    assert "freeze_trainable_layers 5: the model has 4 layers" in capsys.readouterr().err
