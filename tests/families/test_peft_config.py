"""What an adapter's configuration may say, and how everything else is refused: by name, and all at once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.families.peft_config import read_peft_config

# As peft 0.21 writes it.
WRITTEN: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 12, "lora_bias": False, "lora_dropout": 0.05,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


def folder_with(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(WRITTEN | changes))
    (tmp_path / "adapter_model.safetensors").touch()
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(MegatuneError) as error:
        read_peft_config(folder)
    assert error.value.exit_code == ExitCode.INPUT
    return str(error.value)


def test_a_config_is_read(tmp_path: Path) -> None:
    config = read_peft_config(folder_with(tmp_path, rank_pattern={"v_proj": 2}, alpha_pattern={r"layers\.1\..+": 3}))
    assert (config.rank, config.alpha) == (4, 12)
    assert config.base_model_name_or_path == "base"
    assert config.rank_of("model.layers.0.self_attn.v_proj") == 2
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 4
    assert config.scaling_of("model.layers.0.self_attn.q_proj", 4) == 3
    assert config.scaling_of("model.layers.1.self_attn.q_proj", 4) == 0.75
    assert read_peft_config(folder_with(tmp_path, use_rslora=True)).scaling_of("q_proj", 4) == 6


@pytest.mark.parametrize("begun", [True, False, "gaussian", "eva", "orthogonal"])
def test_ways_to_begin_that_leave_the_base_alone_pass(tmp_path: Path, begun: object) -> None:
    read_peft_config(folder_with(tmp_path, init_lora_weights=begun, layers_to_transform=[0], a_new_switch=False))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "OFT"}, "peft_type is 'OFT'"),
    ({"r": 0}, "r is 0"),
    ({"lora_alpha": None}, "lora_alpha is None"),
    ({"lora_alpha": math.inf}, "lora_alpha is inf"),
    ({"lora_alpha": math.nan}, "lora_alpha is nan"),
    ({"lora_dropout": "much"}, "lora_dropout is 'much'"),
    ({"lora_dropout": 1}, "lora_dropout is 1"),
    ({"alpha_pattern": {"q_proj": math.nan}}, "alpha_pattern of 'q_proj' is nan"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"lora_bias": True}, "lora_bias is true"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is [[0, 2], [1, 3]]"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]"),
    ({"megatron_config": {"a": 1}}, "megatron_config is"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "olora"}, "the adapter belongs to the changed base"),
    ({"use_qalora": True}, "it does not compute W + s · B · A"),
    ({"rank_pattern": {"(": 4}}, "not a valid regular expression"),
    ({"modules_to_save": "lm_head"}, "it must be a list of names"),
    ({"a_new_method": {"on": True}}, "a_new_method is"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(folder_with(tmp_path, **changes))


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, bias="all", lora_bias=True, layer_replication=[[0, 1]], init_lora_weights="pissa")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").touch()
    text = refusal(folder)
    for said in ("bias is 'all'", "lora_bias", "layer_replication", "pissa", "adapter_model.bin is a pickle"):
        assert said in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    text = refusal(tmp_path)
    assert "there is no adapter_config.json" in text
    assert "give it as model_name_or_path" in text
    assert "there is no adapter_model.safetensors" in text
    (tmp_path / "adapter_config.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    assert "is not a JSON object" in refusal(tmp_path)
