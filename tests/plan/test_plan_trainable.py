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

FREEZE = "finetuning_type=freeze"
SWITCHES = ["freeze_language_model=true", "freeze_vision_tower=true", "freeze_multi_modal_projector=true"]


def refused(folder: Path, family: str, overrides: list[str]) -> str:
    """What a run is refused with before its processes start; "" where it is not."""
    (folder / "config.json").write_text(json.dumps(tiny_config(family).to_dict()))
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
        ("qwen3_vl", [*SWITCHES, "freeze_deepstack_mergers=false"]),
        ("qwen2_vl", [*SWITCHES[:2], "freeze_multi_modal_projector=false"]),
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
        "qwen3",
        [FREEZE, "freeze_trainable_modules=[]"],
        "freeze_trainable_modules names nothing\n"
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
        SWITCHES,
        "freeze_language_model: true, freeze_vision_tower: true, freeze_multi_modal_projector: true "
        "leave nothing to train\n    fix: write freeze_vision_tower: false, or remove freeze_language_model",
    ),
]  # fmt: skip


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
