"""A config.json that no model can have ends with a finding for each key, and never with a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture

WHOLE: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    "rope_theta": 1e6, "tie_word_embeddings": False, "initializer_range": 0.02, "max_position_embeddings": 4096,
}  # fmt: skip


def _load(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="utf-8")
    load_architecture(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf is impossible"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is impossible"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6' is not a number"),
        ({"pad_token_id": [1]}, "pad_token_id = [1] is not a whole number"),
        ({"rope_theta": 0}, "rope_theta = 0 is impossible"),
        ({"rope_theta": -10000.0}, "rope_theta = -10000.0 is impossible"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters: rope_theta = 0"),
        ({"rope_parameters": [1, 2]}, "rope_parameters = [1, 2] is not an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn' is not an object"),
        ({"quantization_config": "gptq"}, "quantization_config = 'gptq' is not an object"),
        ({"dtype": "float99"}, "dtype = 'float99' is not a supported dtype"),
        ({"torch_dtype": 16}, "torch_dtype = 16 is not a supported dtype"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' is neither true nor false"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads = '2' is not a whole number"),
        ({"head_dim": -16}, "head_dim = -16 is not a whole number"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings = 'long' is not a whole number"),
        ({"hidden_size": "64"}, "hidden_size = '64' is not a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is impossible"),
        ({"vocab_size": 10**400}, "vocab_size = a number of hundreds of digits is impossible"),
        ({"rope_theta": 10**400}, "rope_theta = a number of hundreds of digits is impossible"),
        ({"hidden_size": True}, "hidden_size = True is not a whole number"),
        ({"layer_types": [None, None]}, "layer_types = [None, None] is not a list of names"),
        ({"mlp_only_layers": [[]]}, "mlp_only_layers = [[]] is not a list of layer numbers"),
        ({"architectures": 7}, "architectures = 7 is not a list of names"),
        ({"q_lora_rank": float("nan")}, "q_lora_rank = nan is not a whole number"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor = '2' is not a number"),
        ({"text_config": {"rope_scaling": {"factor": 0}}}, "text_config: rope_scaling: factor = 0 is impossible"),
        ({"initializer_range": []}, "initializer_range = [] is not a number"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters: full_attention = 5 is not an object"),
        (
            {"text_config": {"rope_parameters": {"sliding_attention": {"rope_theta": "1e4"}}}},
            "text_config: rope_parameters: sliding_attention: rope_theta = '1e4' is not a number",
        ),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries, but num_hidden_layers is 2"),
        ({"per_layer_config": {"3": 16}}, "per_layer_config: 3 = 16 is not an object"),
        ({"per_layer_config": {"3": {"head_dim": "16"}}}, "per_layer_config: 3: head_dim = '16' is not a whole number"),
        ({"moe_layer_end_index": "last"}, "moe_layer_end_index = 'last' is not a whole number"),
        ({"rope_parameters": {"llama_4_scaling_beta": 10**400}}, "rope_parameters: llama_4_scaling_beta = a number"),
        ({"vision_config": {"position_embedding_size": {}}}, "position_embedding_size = {} is not a whole number"),
    ],
)
def test_an_impossible_value_is_named(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    _load(tmp_path, json.dumps(WHOLE))
    with pytest.raises(MegatuneError) as caught:
        _load(tmp_path, json.dumps({**WHOLE, **change}))
    (finding,) = caught.value.findings
    assert caught.value.exit_code == ExitCode.INPUT
    assert what in finding.what
    assert finding.where == str(tmp_path / "config.json")


def test_null_is_what_is_not_said(tmp_path: Path) -> None:
    _load(tmp_path, json.dumps({**WHOLE, "rope_parameters": {"rope_type": "default", "rope_theta": None}}))


def test_all_impossible_values_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        _load(tmp_path, json.dumps({**WHOLE, "rope_theta": 0, "rms_norm_eps": 2, "dtype": "int3"}))
    assert len(caught.value.findings) == 3


def test_a_config_nested_without_end_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match="objects are nested too deeply") as caught:
        _load(tmp_path, '{"a":' * 100_000 + "1" + "}" * 100_000)
    assert caught.value.exit_code == ExitCode.INPUT
