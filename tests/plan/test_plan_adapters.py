"""What an adapter that is trained further says of a run's settings."""

from __future__ import annotations

import json
import os
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
from model_sizes import MakeModel

from megatune.architecture import Architecture
from megatune.config.derived import resolve_finetuning, with_adapter_settings
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.load import Loaded, load
from megatune.config.rules import trained
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.families.adapters import adapter_weights
from megatune.families.peft_form import adapter_config
from megatune.families.trained import trained_weights
from megatune.families.weights import hf_shapes

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def architecture(tmp_path: Path) -> Architecture:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(DENSE))
    return load_architecture(tmp_path / "model")


def save_adapter(folder: Path, architecture: Architecture, **changes: Any) -> Path:
    """Write the header of an adapter's file: nothing reads the rest here."""
    selection = FinetuningSettings(finetuning_type="lora", lora_rank=4, lora_alpha=12, **changes)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(architecture, selection, "model")))
    header, end = {}, 0
    for weight, layer in trained_weights(architecture, selection):
        for name, shape in hf_shapes(weight, architecture, layer).items():
            start, end = end, end + 4 * prod(shape)
            header[f"base_model.model.{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return folder


def loaded(*words: str) -> Loaded:
    return load(None, ["finetuning_type=lora", *words])


def test_what_is_not_written_is_the_adapters(architecture: Architecture, tmp_path: Path) -> None:
    targets = {"lora_target": ["q_proj", "mlp.down_proj"], "use_rslora": True, "additional_target": ["lm_head"]}
    first, last = (save_adapter(tmp_path / name, architecture, **targets) for name in ("first", "last"))
    found = with_adapter_settings(loaded(f"adapter_name_or_path={first},{last}", "lora_dropout=0.1"), architecture)
    finetuning = found.settings.finetuning
    assert not found.findings
    assert (finetuning.lora_rank, finetuning.lora_alpha, finetuning.lora_dropout) == (4, 12, 0.1)
    assert finetuning.use_rslora
    assert finetuning.additional_target == ["lm_head"]
    expected = FinetuningSettings(finetuning_type="lora", lora_rank=4, lora_alpha=12, **targets)
    assert adapter_weights(architecture, finetuning) == adapter_weights(architecture, expected)
    assert found.origins["finetuning.lora_rank"] == "adapter_config.json"
    assert found.origins["finetuning.lora_dropout"] == "override"
    assert not found.check_rules(architecture, rules=trained.RULES)


def test_what_is_written_may_say_the_same(architecture: Architecture, tmp_path: Path) -> None:
    """And modules that are trained whole may be more than the adapter has."""
    adapter = save_adapter(tmp_path / "adapter", architecture)
    same = ["lora_rank=4", "lora_alpha=12", "lora_target=all", "additional_target=lm_head", "use_rslora=false"]
    found = with_adapter_settings(loaded(f"adapter_name_or_path={adapter}", *same), architecture)
    assert not found.findings
    assert found.settings.finetuning.lora_target == ["all"]
    assert found.settings.finetuning.additional_target == ["lm_head"]


def test_a_model_with_experts_everywhere_continues_with_all(tmp_path: Path) -> None:
    """Its family has a dense feed-forward, which no layer of this model has."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    sparse = DENSE | experts | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(sparse))
    architecture = load_architecture(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", architecture)
    found = with_adapter_settings(loaded(f"adapter_name_or_path={adapter}", "lora_target=all"), architecture)
    assert not found.findings


def test_what_is_written_otherwise_is_refused(architecture: Architecture, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", architecture, lora_target=["q_proj"])
    words = ["lora_rank=16", "lora_target=all", "use_dora=true"]
    found = with_adapter_settings(loaded(f"adapter_name_or_path={adapter}", *words), architecture)
    text = "\n".join(map(str, found.findings))
    assert f"lora_rank=16: lora_rank is 16, that of {adapter} is 4" in text
    assert "lora_target is all, that of" in text
    assert f"{adapter} is self_attn.q_proj" in text
    assert "use_dora is true" in text
    assert "create_new_adapter: true" in text
    assert len(found.findings) == 3


ENCODER = {"freeze_vision_tower": False, "freeze_language_model": True}


@pytest.mark.parametrize(
    ("has", "words", "refused"),
    [
        ({}, ["freeze_vision_tower=false"], "freeze_vision_tower is false, that of {} is true"),
        ({}, ["freeze_multi_modal_projector=false"], "freeze_multi_modal_projector is false, that of {} is true"),
        ({}, ["freeze_language_model=true"], "freeze_language_model is true, that of {} is false"),
        (ENCODER, ["freeze_vision_tower=true"], "freeze_vision_tower is true, that of {} is false"),
        (ENCODER, ["freeze_vision_tower=false", "additional_target=norm"], None),
        ({"lora_target": [r".*deepstack.*linear_fc1"], "freeze_deepstack_mergers": False}, [], None),
    ],
)
def test_parts_of_a_vision_language_model_are_those_of_the_adapter(
    has: dict[str, Any], words: list[str], refused: str | None, model_dir: MakeModel, tmp_path: Path
) -> None:
    """Refused once, with a fix that the adapter allows: which layers have adapters cannot be changed."""
    architecture = load_architecture(model_dir("qwen3_vl"))
    adapter = save_adapter(tmp_path / "adapter", architecture, **has)
    found = with_adapter_settings(loaded(f"adapter_name_or_path={adapter}", *words), architecture)
    if refused is None:
        assert not found.findings
        kept = FinetuningSettings(finetuning_type="lora", lora_rank=4, lora_alpha=12, **has)
        assert adapter_weights(architecture, found.settings.finetuning) == adapter_weights(architecture, kept)
    else:
        (finding,) = found.findings
        assert refused.format(adapter) in str(finding)
    assert not found.check_rules(architecture, rules=trained.RULES)


def test_processes_that_read_the_model_later_train_the_same(architecture: Architecture, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", architecture, additional_target=["lm_head"])
    begun = loaded(f"adapter_name_or_path={adapter}", "additional_target=embed_tokens,lm_head")
    later, earlier = (
        resolve_finetuning(each.settings.finetuning, architecture)
        for each in (begun, with_adapter_settings(begun, architecture))
    )
    for finetuning in (later, earlier):
        assert (finetuning.lora_rank, finetuning.lora_alpha) == (4, 12)
        assert set(finetuning.additional_target) == {"lm_head", "embed_tokens"}
    assert adapter_weights(architecture, later) == adapter_weights(architecture, earlier)
    new = loaded(f"adapter_name_or_path={adapter}", "create_new_adapter=true").settings.finetuning
    assert resolve_finetuning(new, architecture) is new


def test_what_peft_could_not_load_is_not_trained(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"model_type": "mixtral"} | sizes))
    (finding,) = loaded("lora_target=w1,q_proj").check_rules(load_architecture(tmp_path), rules=trained.RULES)
    assert str(finding) == (
        "lora_target=w1,q_proj: lora_target: w1, q_proj cannot be saved for peft\n"
        "    why: of experts, w1 and w3 are one matrix in Transformers: both have adapters, or none\n"
        "    fix: write lora_target: all"
    )


def test_a_new_adapter_has_its_own_settings(architecture: Architecture, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", architecture)
    words = [f"adapter_name_or_path={adapter}", "create_new_adapter=true"]
    for more, rank in (([], 8), (["lora_rank=16"], 16)):
        found = with_adapter_settings(loaded(*words, *more), architecture)
        assert not found.findings
        assert found.settings.finetuning.lora_rank == rank


def test_all_adapters_are_read(architecture: Architecture, tmp_path: Path) -> None:
    broken = save_adapter(tmp_path / "broken", architecture)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    with pytest.raises(MegatuneError) as error:
        with_adapter_settings(loaded(f"adapter_name_or_path={broken},{tmp_path / 'nowhere'}"), architecture)
    assert error.value.exit_code == ExitCode.INPUT
    assert "bias is 'all'" in str(error.value)
    assert "there is no folder" in str(error.value)
