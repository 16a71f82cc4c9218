"""What Megatron-Core's own dist_checkpointing makes of our checkpoints, and we of its own."""

from __future__ import annotations

import copy
import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bridging import assert_same_bits, tensors
from model_sizes import MakeModel
from torch import Tensor
from torch_dist_kit import to_mcore
from transformers import AutoModelForCausalLM

from megatune.architecture import Architecture, DeltaNet
from megatune.bridge.merged_model import MergedModel
from megatune.bridge.torch_dist.table import read_table
from megatune.config.settings import Settings
from megatune.engine.groups import build
from megatune.families import load_architecture

TOKENS = torch.tensor([[3, 17, 250, 9, 41, 77, 300, 5]])


def megatron_model(model: Path, settings: Settings) -> torch.nn.Module:
    """Megatron-Core's GPTModel of its local layers, in the layout that the ranks are in."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    coords = build(settings.parallel, seed=0, timeout=60)
    found, moe = load_architecture(model), {}
    if found.moe is not None:
        moe = {
            "num_moe_experts": found.moe.num_experts,
            "moe_ffn_hidden_size": found.moe.moe_ffn_hidden_size,
            "moe_router_topk": found.moe.router_topk,
            # Stacked where all are alike, by themselves otherwise.
            "moe_layer_freq": 1 if all(found.moe.layers) else [int(sparse) for sparse in found.moe.layers],
        }
    delta = found.delta
    hybrid = {} if delta is None else delta_settings(delta, found)
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
    config = TransformerConfig(
        **{name: getattr(found, name) for name in names},
        **moe,
        **hybrid,
        tensor_model_parallel_size=coords.tp_size,
        pipeline_model_parallel_size=coords.pp_size,
        expert_model_parallel_size=coords.ep_size,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=found.norm_epsilon,
        qk_layernorm=found.qk_layernorm,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # `put_delta_nets` puts them there; from 0.19 on the list refuses them
    layers = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=False)
    if delta is not None:
        put_delta_nets(layers, delta)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=-(-found.vocab_size // 128) * 128,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=found.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=found.rotary_base,
        rotary_percent=found.rotary_dim / found.kv_channels,
    ).eval()


def delta_settings(delta: DeltaNet, found: Architecture) -> dict[str, Any]:
    """Return what Megatron-Core's configuration says of gated delta nets and of the gated attention between them."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(is_delta) for is_delta in delta.layers],
        "linear_conv_kernel_dim": delta.conv_kernel_size,
        **{f"linear_{name}": getattr(delta, name) for name in names},
        "attention_output_gate": found.attention_output_gate,
        # Its own rule in torch: the other one is FLA's.
        "deterministic_mode": True,
    }


def put_delta_nets(layers: Any, delta: DeltaNet) -> None:
    """Put Megatron-Core's gated delta nets into layers, of its local modules: its own list has Transformer Engine's.

    Of FLA, which is not installed, they then need the normalization of queries and keys alone.
    """
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    common: Any = getattr(gated_delta_net, "common", gated_delta_net)  # a folder from 0.19 on
    common.HAVE_FLA = True
    common.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)
    parts = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    first = ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=parts)
    for index, is_delta in enumerate(delta.layers):
        if is_delta:
            layer = copy.deepcopy(layers.layer_specs[index])
            layer.submodules.self_attention = first
            names = layer.submodules.sharded_state_dict_keys_map
            names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
            layers.layer_specs[index] = layer


@torch.no_grad()
def logits(model: Path, folder: Path, settings: Settings) -> Tensor:
    """On a rank: what Megatron-Core's model computes after its own loader, strict as it is, has read our folder."""
    from megatron.core import dist_checkpointing

    gpt = megatron_model(model, settings)
    gpt.load_state_dict(dist_checkpointing.load({"model": gpt.sharded_state_dict()}, str(folder))["model"])
    if load_architecture(model).zero_centered_norms:
        for name, weight in gpt.named_parameters():
            # Its local norms multiply by their weights, those of Transformer Engine by 1 more, too.
            if "norm" in name:
                weight += 1
    size = TOKENS.shape[1]
    mask = torch.ones(1, 1, size, size).tril() < 0.5
    return gpt(TOKENS, torch.arange(size)[None], mask)[0]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_megatron_computes_what_transformers_does(pool, model_dir: MakeModel, tmp_path: Path, family: str) -> None:
    model = model_dir(family)
    folder = to_mcore(model, tmp_path / "mcore")
    (found,) = pool.run(1, logits, model, folder / "iter_0000001", Settings())
    expected = AutoModelForCausalLM.from_pretrained(model)(TOKENS).logits[0]
    error = (found[:, : expected.shape[1]] - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def resave(model: Path, folder: Path, out: Path, settings: Settings, apart: bool) -> None:
    """On every rank: Megatron-Core loads a folder of ours, and saves it as it does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    gpt = megatron_model(model, settings)
    gpt.load_state_dict(dist_checkpointing.load({"model": gpt.sharded_state_dict()}, str(folder))["model"])
    # Its saver starts processes, which those of the pool may not.
    with mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False}):
        dist_checkpointing.save(gpt.sharded_state_dict(metadata={"singleton_local_shards": apart}), str(out))
        filesystem_async._results_queue = None


@pytest.mark.extended("mixtral")
@pytest.mark.parametrize(
    ("family", "ranks", "parallel", "apart"),
    [
        pytest.param(
            "qwen3", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, False,
            marks=pytest.mark.extended,
        ),
        ("qwen3", 2, {"pipeline_model_parallel_size": 2}, False),
        ("qwen3_5_text", 2, {"tensor_model_parallel_size": 2}, False),
        ("qwen3_moe", 2, {"expert_model_parallel_size": 2}, False),
        ("mixtral", 2, {"expert_model_parallel_size": 2}, False),
        ("mixtral", 1, {}, True),
    ],
)  # fmt: skip
def test_what_megatron_writes(
    pool, model_dir: MakeModel, tmp_path: Path, family: str, ranks: int, parallel: dict[str, int], apart: bool
) -> None:
    """Of whatever layout, with a padded vocabulary; apart: experts, gate and up are tensors of their own."""
    model = model_dir(family, tied=family == "qwen3")
    folder = to_mcore(model, tmp_path / "mcore")
    for name in ("out", "hf"):
        (tmp_path / name).mkdir()
    settings = Settings.model_validate({"parallel": parallel})
    pool.run(ranks, resave, model, folder / "iter_0000001", tmp_path / "out", settings, apart)
    keys = {key.partition(".mlp.")[2] for key in read_table(tmp_path / "out")}
    assert ("experts.experts.0.linear_fc1.weight_w" in keys) == apart
    (tmp_path / "out/config.json").write_text((model / "config.json").read_text())
    MergedModel(tmp_path / "out", []).write(tmp_path / "hf", 5 * 10**9)
    assert_same_bits(tensors(tmp_path / "hf"), tensors(model))
