"""config.json to architecture."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from model_sizes import tiny_config
from torch.nn import Embedding
from transformers import CONFIG_MAPPING

from megatune.architecture import Architecture
from megatune.errors import ExitCode, MegatuneError
from megatune.families import FAMILIES, load_architecture
from megatune.families.rope import with_rope_scaling
from megatune.rope_scaling import LinearRopeScaling, Llama3RopeScaling, LongRopeScaling

PACKAGE = Path(__file__).parents[2] / "src" / "megatune"
LLAMA31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, **changes: Any) -> Architecture:
    return load_architecture(write(folder, LLAMA31 | changes))


def refusal(folder: Path, **changes: Any) -> MegatuneError:
    with pytest.raises(MegatuneError) as raised:
        load(folder, **changes)
    assert raised.value.exit_code == ExitCode.INPUT
    return raised.value


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},  # Transformers 5
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},  # Transformers 4
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}},  # and its early days
    ],
)
def test_rotary_settings_of_every_age_are_read(tmp_path, rope):
    architecture = load(tmp_path, **rope)
    assert architecture.rotary_base == 500000.0
    assert architecture.rope_scaling == Llama3RopeScaling(**SCALING)


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 163840),
        ({"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096}}, 40960),
        ({"rope_scaling": {"rope_type": "llama3", **SCALING}}, 40960),  # max_position_embeddings is stretched there
        ({}, 40960),
    ],
)
def test_positions_are_those_that_yarn_stretches_to(tmp_path, changes, positions):
    """As Qwen's README says, config.json gets rope_scaling and keeps its max_position_embeddings."""
    assert load(tmp_path, max_position_embeddings=40960, **changes).max_position_embeddings == positions


UNSCALED = {"model_type": "llama", "max_position_embeddings": 4096, "rope_theta": 10000.0}
SCALED = {**UNSCALED, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", **SCALING}}


@pytest.mark.parametrize(
    ("config", "asked", "length", "positions", "scaling"),
    [
        (UNSCALED, "yarn", 4096, 4096, None),  # rows fit
        (UNSCALED, "linear", 4097, 8192, {"rope_type": "linear", "factor": 2.0}),
        (UNSCALED, "yarn", 16000, 16384,
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
        (UNSCALED, "llama3", 8192, 8192, {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}),
        (SCALED, "llama3", 9000, 16384, {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),  # not of the stretched ones
        (UNSCALED, {"type": "yarn", "factor": 2.5, "beta_fast": 16}, 128, 10240,
         {"rope_type": "yarn", "factor": 2.5, "beta_fast": 16, "original_max_position_embeddings": 4096}),
    ],
)  # fmt: skip
def test_a_scaling_is_given_as_llamafactory_gives_it(config, asked, length, positions, scaling):
    changed = with_rope_scaling(config, asked, length)
    assert changed["max_position_embeddings"] == positions
    assert changed.get("rope_scaling") == scaling
    assert changed["rope_theta"] == 10000.0
    assert with_rope_scaling(changed, asked, length) == changed or asked == "linear"


@pytest.mark.parametrize(
    ("config", "asked", "said"),
    [
        (UNSCALED, {"rope_type": "dynamic"}, "rope_type 'dynamic' is not supported"),
        (UNSCALED, {"factor": 2.0}, "rope_type None is not supported"),
        (UNSCALED, {"rope_type": "yarn", "factor": None, "facter": 2.0}, "yarn has no 'facter'"),
        (UNSCALED, {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "linear has no 'beta_fast'"),
        (UNSCALED, {"rope_type": "yarn", "factor": "2"}, "factor = '2' is not a number"),
        (UNSCALED, {"rope_type": "yarn", "truncate": "no"}, "truncate = 'no' is neither true nor false"),
        (UNSCALED, {"rope_type": "yarn", "original_max_position_embeddings": 0.5},
         "original_max_position_embeddings = 0.5 is not a whole number above 0"),
        (UNSCALED, {"rope_type": "yarn", "factor": 0.5}, "factor = 0.5 is not a number of at least 1"),
        ({"model_type": "llama"}, "yarn", "config.json has no max_position_embeddings"),
        (
            {**UNSCALED, "model_type": "qwen3_vl", "text_config": UNSCALED},
            "yarn",
            "not supported with a qwen3_vl",
        ),
        ({**UNSCALED, "rope_parameters": {"full_attention": {}}}, "yarn", "not supported with a llama"),
    ],
)  # fmt: skip
def test_a_scaling_that_a_model_cannot_have_is_refused(config, asked, said):
    with pytest.raises(MegatuneError) as raised:
        with_rope_scaling(config, asked, 9000)
    assert [finding.what for finding in raised.value.findings] == [said]
    assert raised.value.exit_code == ExitCode.SETTINGS


# As Phi-4-mini has it: three quarters of 128 channels are turned.
LONGROPE = {
    "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1] * 48, "long_factor": [1.5] * 48},
}  # fmt: skip


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_is_read(tmp_path, name):
    architecture = load(tmp_path, **LONGROPE | {"rope_scaling": {**LONGROPE["rope_scaling"], "type": name}})
    scaling = architecture.rope_scaling
    assert (architecture.max_position_embeddings, architecture.rotary_dim) == (131072, 96)
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.short_factors, scaling.long_factors) == ((1.0,) * 48, (1.5,) * 48)
    assert scaling.original_max_position_embeddings == 4096
    assert scaling.attention_factor == pytest.approx(1.1902380714238083, rel=1e-12)  # sqrt(1 + ln 32 / ln 4096)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({"short_factor": [1] * 47}, "short_factor has 47 numbers"),
        ({"long_factor": None}, "no list 'long_factor' of numbers above 0"),
        ({"long_factor": [1.0, 0] * 24}, "no list 'long_factor' of numbers above 0"),
    ],
)
def test_longrope_needs_a_factor_for_each_pair(tmp_path, factors, said):
    changes = LONGROPE | {"rope_scaling": {**LONGROPE["rope_scaling"], **factors}}
    assert said in str(refusal(tmp_path, **changes))


def test_rotary_settings_have_transformers_defaults(tmp_path):
    assert load(tmp_path).rotary_base == 10000.0
    assert load(tmp_path, rope_scaling=None, rope_theta=1e6).rotary_base == 1e6
    assert load(tmp_path, rope_scaling=None).rope_scaling is None
    # As DeepSeek-Coder has it; and what changes nothing up to max_position_embeddings.
    assert load(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}).rope_scaling == LinearRopeScaling(4.0)
    dynamic = load(tmp_path, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (dynamic.rope_scaling, dynamic.max_position_embeddings) == (None, 131072)


def test_numbers_are_read(tmp_path):
    architecture = load(tmp_path, head_dim=None, torch_dtype="bfloat16")
    assert (architecture.num_layers, architecture.hidden_size, architecture.ffn_hidden_size) == (32, 4096, 14336)
    assert (architecture.num_attention_heads, architecture.num_query_groups, architecture.kv_channels) == (32, 8, 128)
    assert (architecture.vocab_size, architecture.norm_epsilon, architecture.torch_dtype) == (128256, 1e-5, "bfloat16")
    assert load(tmp_path, head_dim=64).kv_channels == 64
    assert load(tmp_path, dtype="float16").torch_dtype == "float16"


def test_what_families_add(tmp_path):
    qwen2, qwen3 = load(tmp_path, model_type="qwen2"), load(tmp_path, model_type="qwen3", hidden_size=1024)
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm) == (True, False)
    assert (qwen3.add_qkv_bias, qwen3.qk_layernorm, qwen3.kv_channels) == (False, True, 128)
    # Published with a dropout, as every one is left out.
    assert load(tmp_path, model_type="granite", attention_dropout=0.1, attention_multiplier=0.5).softmax_scale == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rotary scaling 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rotary scaling 'linear' has no number 'factor'"),
        ({"rope_scaling": {"type": "yarn"}}, "rotary scaling 'yarn' has no number 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "has no number 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized (fp8)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not a whole number above 0"),
        ({"model_type": "olmo3", "rope_scaling": {"rope_type": "longrope"}}, "rotary scaling 'longrope'"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "'layer_types' is missing with sliding_window"),
        ({"model_type": "dots1"}, "norm_topk_prob = False"),
        ({"model_type": "qwen4"}, "nearest: qwen"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, said):
    assert said in str(refusal(tmp_path, **changes))


def test_every_reason_is_given_at_once(tmp_path):
    error = refusal(tmp_path, attention_bias=True, mlp_bias=True, rope_scaling={"type": "longrope"})
    assert len(error.findings) == 3
    assert all(finding.where == str(tmp_path / "config.json") for finding in error.findings)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_config_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MegatuneError) as raised:
        load_architecture(tmp_path)
    assert raised.value.exit_code == ExitCode.INPUT


def test_missing_folder_and_file_are_told_apart(tmp_path):
    with pytest.raises(MegatuneError, match="no folder"):
        load_architecture(tmp_path / "nowhere")
    with pytest.raises(MegatuneError, match=r"no config\.json"):
        load_architecture(tmp_path)


@pytest.mark.parametrize("room", ["engine", "training", "plan"])
def test_nothing_is_decided_by_the_name_of_a_family(room):
    """What a family needs is an option of a layer, or a declaration."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in (PACKAGE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    ]
    assert not found


def test_a_mistral_that_says_nothing_of_a_window_has_one(tmp_path):
    """As in Transformers; files without one say null."""
    config = LLAMA31 | {"model_type": "mistral"}
    assert load_architecture(write(tmp_path, config)).windows == (4096,) * 32
    assert load_architecture(write(tmp_path, config | {"sliding_window": None})).windows == ()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_padding_token_is_transformers(tmp_path, model_type):
    """Also where config.json does not say it, or says that there is none."""
    written = tiny_config(model_type).to_dict() | {"model_type": model_type}
    for of in (written, written.get("text_config") or {}):
        of.pop("pad_token_id", None)
    for change in ({}, {"pad_token_id": None}, {"pad_token_id": 7}):
        of = "text_config" if written.get("text_config") else ""
        config = {**written, of: {**written[of], **change}} if of else {**written, **change}
        (tmp_path / "config.json").write_text(json.dumps(config))
        expected = CONFIG_MAPPING[FAMILIES[model_type].computed_as or model_type].from_dict(config)
        assert load_architecture(tmp_path).padding_token == expected.get_text_config().pad_token_id


def test_a_padding_token_below_zero_is_counted_from_the_last(tmp_path):
    assert load(tmp_path, pad_token_id=-1).padding_token == Embedding(128256, 1, padding_idx=-1).padding_idx
