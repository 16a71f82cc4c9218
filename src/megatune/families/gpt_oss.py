"""gpt-oss: attention with sinks, every second layer with a window, and experts with biases and clamped gates."""

from functools import partial

from megatune.families.dense import DECODER, OUTPUT_BIAS, QKV_BIAS, SINKS
from megatune.families.family import Family
from megatune.families.forms import CheckpointForm
from megatune.families.gemma3_text import windows
from megatune.families.sparse import local_experts, sparse_weight
from megatune.families.weights import TensorLayout

_EXPERT, _FFN, _GATE_UP = "mlp.experts.{expert}", "moe.moe_ffn_hidden_size", "moe.gate_up_size"
_EXPERTS = (
    sparse_weight(
        "router.weight", TensorLayout.REPLICATED, ("mlp.router.weight", "moe.num_experts", "hidden_size"), linear=False
    ),
    sparse_weight("router.bias", TensorLayout.REPLICATED, ("mlp.router.bias", "moe.num_experts")),
    sparse_weight("experts.weight1", TensorLayout.ROWS, (f"{_EXPERT}.gate_up_proj.weight", _GATE_UP, "hidden_size")),
    sparse_weight("experts.linear_fc1.bias", TensorLayout.ROWS, (f"{_EXPERT}.gate_up_proj.bias", _GATE_UP)),
    sparse_weight("experts.weight2", TensorLayout.COLUMNS, (f"{_EXPERT}.down_proj.weight", "hidden_size", _FFN)),
    sparse_weight("experts.linear_fc2.bias", TensorLayout.REPLICATED, (f"{_EXPERT}.down_proj.bias", "hidden_size")),
)
_IN_FILES = {
    "weight1": "gate_up_proj", "linear_fc1.bias": "gate_up_proj_bias",
    "weight2": "down_proj", "linear_fc2.bias": "down_proj_bias",
}  # fmt: skip


FAMILY = Family(
    model_type="gpt_oss",
    weights=(*(weight for weight in DECODER if ".mlp." not in weight.engine), QKV_BIAS, OUTPUT_BIAS, SINKS, *_EXPERTS),
    constants={"add_qkv_bias": True, "add_bias_linear": True, "attention_sinks": True},
    # Transformers uses this limit regardless of config.json.
    required={"attention_bias": True, "attention_dropout": 0, "hidden_act": "silu", "swiglu_limit": 7},
    dimensions=("num_local_experts", "num_experts_per_tok", "sliding_window", "sliding_window_pattern"),
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072, "sliding_window": 128,
        "sliding_window_pattern": 2, "head_dim": 64, "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
    aliases={"num_experts": "num_local_experts"},
    experts=partial(local_experts, swiglu_limit=7.0),
    windows=windows,
    dequantized=("mxfp4",),
    forms=(
        CheckpointForm(
            fused=tuple(
                (f"decoder.layers.{{layer}}.mlp.experts.{engine}", f"model.layers.{{layer}}.mlp.experts.{name}")
                for engine, name in _IN_FILES.items()
            ),
            transposed=True,
        ),
    ),
)  # fmt: skip
