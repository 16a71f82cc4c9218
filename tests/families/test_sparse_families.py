"""config.json of families with experts and latent attention, as published and as Transformers writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from model_sizes import MakeModel

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.errors import ExitCode, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_architecture
from megatune.families.trained import trained_weights
from megatune.rope_scaling import YarnRopeScaling

_DECODER = {"rms_norm_eps": 1e-6, "vocab_size": 151936, "hidden_act": "silu", "tie_word_embeddings": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen1.5-MoE-A2.7B": _DECODER | {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192, "rope_theta": 1e6,
        "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21, "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "Qwen3-30B-A3B": _DECODER | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": True, "output_router_logits": False,
    },
    "Mixtral-8x7B": _DECODER | {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "rms_norm_eps": 1e-5, "vocab_size": 32000, "sliding_window": None, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02,
    },
    "DeepSeek-V3": _DECODER | {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True,
        "vocab_size": 129280, "max_position_embeddings": 163840, "rope_theta": 10000, "attention_bias": False,
        "attention_dropout": 0.0, "ep_size": 1, "pretraining_tp": 1,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
}  # fmt: skip


def load(folder: Path, name: str, **changes: Any) -> Architecture:
    config = {key: value for key, value in (PUBLISHED[name] | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return load_architecture(folder)


def experts(folder: Path, name: str, **changes: Any) -> MixtureOfExperts:
    moe = load(folder, name, **changes).moe
    assert moe is not None
    return moe


def test_qwen2_moe(tmp_path):
    architecture = load(tmp_path, "Qwen1.5-MoE-A2.7B")
    assert (architecture.add_qkv_bias, architecture.kv_channels) == (True, 128)
    assert architecture.moe == MixtureOfExperts(
        layers=(True,) * 24,
        num_experts=60,
        router_topk=4,
        moe_ffn_hidden_size=1408,
        shared_expert_intermediate_size=5632,
        shared_expert_gate=True,
        pre_softmax=True,
    )
    assert not load(tmp_path, "Qwen1.5-MoE-A2.7B", qkv_bias=False).add_qkv_bias


def test_qwen3_moe(tmp_path):
    architecture = load(tmp_path, "Qwen3-30B-A3B")
    assert (architecture.qk_layernorm, architecture.kv_channels) == (True, 128)
    assert architecture.moe == MixtureOfExperts(
        layers=(True,) * 48, num_experts=128, router_topk=8, moe_ffn_hidden_size=768
    )
    # Unlike qwen3's, its head dimension is derived where it is left out.
    assert load(tmp_path, "Qwen3-30B-A3B", head_dim="absent").kv_channels == 64
    assert experts(tmp_path, "Qwen3-30B-A3B", norm_topk_prob="absent").pre_softmax


@pytest.mark.parametrize(
    ("name", "changes", "weight"),
    [
        ("Mixtral-8x7B", {}, 0.02),
        ("Qwen3-30B-A3B", {}, 0.001),
        ("Qwen3-30B-A3B", {"router_aux_loss_coef": 0.5}, 0.5),
        ("Qwen1.5-MoE-A2.7B", {"router_aux_loss_coef": "absent"}, 0.001),  # Transformers' default
        ("DeepSeek-V3", {}, 0.0),
    ],
)
def test_the_weight_of_the_balancing_loss_is_read(tmp_path, name, changes, weight):
    assert experts(tmp_path, name, **changes).aux_loss_coeff == weight


def test_experts_go_by_two_names(tmp_path):
    """Transformers 5 saves Qwen's num_experts as num_local_experts."""
    renamed = load(tmp_path, "Qwen3-30B-A3B", num_experts="absent", num_local_experts=128)
    assert renamed == load(tmp_path, "Qwen3-30B-A3B")


@pytest.mark.parametrize("name", ["Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B"])
def test_qwens_rule_for_sparse_layers(tmp_path, name):
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert experts(tmp_path, name, **changes).layers == (False, True, False, False, False, True)
    assert load(tmp_path, name, num_hidden_layers=2, mlp_only_layers=[0, 1]).moe is None


def test_mixtral(tmp_path):
    architecture = load(tmp_path, "Mixtral-8x7B")
    assert architecture.moe == MixtureOfExperts(
        layers=(True,) * 32, num_experts=8, router_topk=2, moe_ffn_hidden_size=14336
    )
    left_out = load(tmp_path, "Mixtral-8x7B", rope_theta="absent", rms_norm_eps="absent")
    assert (left_out.rotary_base, left_out.norm_epsilon) == (1e6, 1e-5)


def test_deepseek_v3(tmp_path):
    architecture = load(tmp_path, "DeepSeek-V3")
    assert architecture.moe == MixtureOfExperts(
        layers=(False,) * 3 + (True,) * 58,
        num_experts=256,
        router_topk=8,
        moe_ffn_hidden_size=2048,
        shared_expert_intermediate_size=2048,
        score_function="sigmoid",
        num_groups=8,
        group_topk=4,
        topk_scaling_factor=2.5,
        expert_bias=True,
        router_dtype="fp32",
    )
    mla = architecture.mla
    assert mla is not None
    assert (mla.q_lora_rank, mla.kv_lora_rank, mla.rope_interleaved) == (1536, 512, True)
    assert (mla.qk_head_dim, mla.qk_pos_emb_head_dim, mla.v_head_dim) == (128, 64, 128)
    assert (architecture.kv_channels, architecture.query_size, architecture.attention_size) == (64, 24576, 16384)
    # Both parts of the factor are 1, so that it all goes into the scores.
    assert architecture.rope_scaling == YarnRopeScaling(factor=40.0, original_max_position_embeddings=4096)
    assert mla.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192), rel=1e-12)


def test_deepseek_v3_without_groups_or_query_latent(tmp_path):
    """As Moonlight: one group, which decides nothing."""
    architecture = load(tmp_path, "DeepSeek-V3", n_group=1, topk_group=1, q_lora_rank=None, rope_scaling=None)
    assert architecture.moe is not None
    assert architecture.mla is not None
    assert (architecture.moe.num_groups, architecture.moe.group_topk) == (0, 0)
    assert architecture.mla.q_lora_rank is None
    assert architecture.mla.softmax_scale == 192**-0.5
    turned_in_halves = load(tmp_path, "DeepSeek-V3", rope_interleave=False).mla
    assert turned_in_halves is not None
    assert not turned_in_halves.rope_interleaved


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Mixtral-8x7B", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ("Mixtral-8x7B", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is impossible"),
        ("Mixtral-8x7B", {"num_local_experts": "absent"}, "'num_local_experts' is missing"),
        ("Qwen3-30B-A3B", {"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
        ("Qwen3-30B-A3B", {"attention_bias": True}, "attention_bias = True"),
        ("Qwen3-30B-A3B", {"num_experts": 0}, "num_experts = 0 is not a whole number above 0"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("Qwen1.5-MoE-A2.7B", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("DeepSeek-V3", {"q_lora_rank": "absent"}, "'q_lora_rank' is missing"),
        ("DeepSeek-V3", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ("DeepSeek-V3", {"head_dim": 128}, "head_dim = 128"),
        ("DeepSeek-V3", {"n_group": 7}, "n_group = 7 is impossible"),
        ("DeepSeek-V3", {"num_experts_per_tok": 129}, "topk_group = 4 is impossible"),
        ("DeepSeek-V3", {"quantization_config": {"quant_method": "fp8"}}, "fp8 is read in blocks of [128, 128]"),
        ("DeepSeek-V3", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rotary scaling 'llama3'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name, changes, said):
    with pytest.raises(MegatuneError) as raised:
        load(tmp_path, name, **changes)
    assert raised.value.exit_code == ExitCode.INPUT
    assert said in str(raised.value)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"factor": 1.0},
        {"attention_factor": 1.3},
        {"beta_fast": 24, "beta_slow": 2, "truncate": False},
        {"beta_fast": None, "original_max_position_embeddings": "absent"},
    ],
)
def test_yarn_is_what_transformers_derives(tmp_path, rope):
    """Frequencies, the factor of cosine and sine, and what multiplies the scores."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    from megatune.engine.layers.rotary import inverse_frequencies

    scaling = {key: value for key, value in (YARN | rope).items() if value != "absent"}
    architecture = load(tmp_path, "DeepSeek-V3", rope_scaling=scaling, hidden_size=64, num_attention_heads=2,
                        num_key_value_heads=2)  # fmt: skip
    config = AutoConfig.from_pretrained(tmp_path)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert isinstance(architecture.rope_scaling, YarnRopeScaling)
    assert architecture.rope_scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert inverse_frequencies(architecture).tolist() == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert architecture.mla is not None
    assert architecture.mla.softmax_scale == pytest.approx(DeepseekV3Attention(config, 0).scaling, rel=1e-12)


@pytest.mark.parametrize("name", ["Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "Mixtral-8x7B"])
def test_yarn_of_other_families(tmp_path, name):
    scaling = load(tmp_path, name, rope_scaling=YARN).rope_scaling
    assert scaling == YarnRopeScaling(
        factor=4.0, original_max_position_embeddings=4096, attention_factor=0.1 * math.log(4) + 1
    )


def test_ernie_may_have_no_shared_experts():
    """As its largest model."""
    config = {
        "model_type": "ernie4_5_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "moe_k": 2,
        "num_attention_heads": 4, "vocab_size": 301, "moe_num_experts": 4, "moe_intermediate_size": 40,
        "moe_num_shared_experts": 0,
    }  # fmt: skip
    architecture = read_architecture(config, "")
    names = {weight.engine for weight in FAMILIES["ernie4_5_moe"].weight_map(architecture)}
    assert "decoder.layers.{layer}.mlp.experts.weight1" in names
    assert not [name for name in names if "shared_experts" in name]


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_a_module_is_frozen_by_its_name_in_transformers_or_in_files(family: str, model_dir: MakeModel) -> None:
    architecture = load_architecture(model_dir(family))

    def trained(*modules: str) -> set[str]:
        selection = FinetuningSettings(finetuning_type="freeze", freeze_trainable_modules=[*modules])
        return {weight.engine for weight, _ in trained_weights(architecture, selection)}

    norms = "input_layernorm", "post_attention_layernorm"
    assert any(".router." in name for name in trained("mlp"))
    assert any(".experts." in name for name in trained("mlp"))
    assert trained("block_sparse_moe") == trained("mlp") == trained("all") - trained("self_attn", *norms)
