"""Rules of pipelines, experts, context parallelism and recomputation, each with its whole message."""

import dataclasses
import itertools
import re

import pytest
from test_rules import BASE, QWEN

from megatune.architecture import Architecture, DeltaNet, MixtureOfExperts
from megatune.config.load import load
from megatune.config.rules import check, pipeline
from megatune.config.rules.pipeline import deepstack
from megatune.config.rules.rule import Context
from megatune.config.settings import BatchSettings, ParallelSettings, Settings
from megatune.encoders import Vision
from megatune.references import spell

EXPERTS = dataclasses.replace(
    QWEN,
    model_type="qwen3_moe",
    moe=MixtureOfExperts(layers=(True,) * 12, num_experts=8, router_topk=2, moe_ffn_hidden_size=48),
)
ONE_EXPERT = dataclasses.replace(
    EXPERTS, moe=MixtureOfExperts(layers=(True,) * 12, num_experts=8, router_topk=1, moe_ffn_hidden_size=48)
)
SIGMOID = dataclasses.replace(
    EXPERTS,
    model_type="deepseek_v3",
    moe=MixtureOfExperts(
        layers=(False, *(True,) * 11),
        num_experts=8,
        router_topk=2,
        moe_ffn_hidden_size=48,
        shared_expert_intermediate_size=48,
        score_function="sigmoid",
        expert_bias=True,
    ),
)

WHOLE_PICTURES = dataclasses.replace(
    QWEN,
    model_type="gemma3",
    vision=Vision(
        depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=64, patch_size=14,
        spatial_merge_size=4, whole=True,
    ),
)  # fmt: skip

# Three of the encoder's layers feed the decoder's first three.
DEEPSTACK = dataclasses.replace(
    QWEN,
    model_type="qwen3_vl",
    vision=Vision(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        out_hidden_size=64,
        patch_size=16,
        spatial_merge_size=2,
        deepstack_visual_indexes=(5, 11, 17),
    ),
)


def messages(architecture: Architecture, *overrides: str) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings, architecture)]


DELTA = dataclasses.replace(
    QWEN,
    model_type="qwen3_next",
    delta=DeltaNet(
        layers=(True, False) * 6,
        num_key_heads=6,
        num_value_heads=12,
        key_head_dim=8,
        value_head_dim=8,
        conv_kernel_size=4,
    ),
)

VALID = [
    (QWEN, ["pipeline_model_parallel_size=5"]),  # 3, 3, 2, 2, 2 layers
    (QWEN, ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=5",
            "gradient_accumulation_steps=2"]),
    (QWEN, ["pipeline_model_parallel_size=2", "decoder_last_pipeline_num_layers=5"]),
    (QWEN, ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*3|t*3|t*4|t*2L",
            "gradient_accumulation_steps=2"]),
    (QWEN, ["context_parallel_size=4", "tensor_model_parallel_size=2", "sequence_parallel=true", "num_processes=16"]),
    (QWEN, ["moe_grouped_gemm=true", "moe_token_dispatcher_type=alltoall", "expert_model_parallel_size=1"]),
    (EXPERTS, ["expert_model_parallel_size=4", "tensor_model_parallel_size=2", "sequence_parallel=true",
               "expert_tensor_parallel_size=1", "num_processes=4"]),
    (EXPERTS, ["moe_aux_loss_coeff=0.001"]),
    (SIGMOID, ["moe_router_bias_update_rate=0.001", "moe_shared_expert_overlap=true"]),
    (EXPERTS, ["recompute_granularity=selective", "recompute_modules=[core_attn, moe_act, layernorm]"]),
    (EXPERTS, ["recompute_granularity=full", "moe_layer_recompute=true"]),
    (QWEN, ["recompute_granularity=full", "recompute_method=block", "recompute_num_layers=5"]),
    (DEEPSTACK, ["pipeline_model_parallel_size=4"]),
    (DEEPSTACK, ["pipeline_model_parallel_size=6", "decoder_first_pipeline_num_layers=3"]),
    (DEEPSTACK, ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*3|t*2|t*5|t*2L",
                 "gradient_accumulation_steps=2"]),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "overrides"), VALID)
def test_what_is_valid_passes(architecture, overrides):
    assert messages(architecture, *overrides) == []


# model, overrides -> the one message they cause
WRONG = [
    (
        dataclasses.replace(QWEN, ffn_hidden_size=9720),
        ["bf16=true", "fp8=rowwise", "tensor_model_parallel_size=2"],
        "fp8 with linear_fc1 of 9720 × 96 on each process\n"
        "    why: 8-bit matrix products need sizes that are multiples of 16\n"
        "    fix: remove fp8, or write a smaller tensor_model_parallel_size",
    ),
    (
        DELTA,
        ["transformer_impl=transformer_engine"],
        "transformer_impl: transformer_engine with a qwen3_next\n"
        "    why: gated delta nets have further weights next to their projections\n"
        "    fix: write transformer_impl: native or auto",
    ),
    (
        QWEN,
        ["fp8=rowwise"],
        "fp8: rowwise without bf16\n"
        "    why: inputs and outputs of 8-bit products are bf16\n"
        "    fix: write bf16: true, or remove fp8",
    ),
    (
        QWEN,
        ["crop_to_patches=true"],
        "crop_to_patches: true with a qwen2\n    why: only InternVL supports tiles\n    fix: remove crop_to_patches",
    ),
    (
        DELTA,
        ["context_parallel_size=4"],
        "context_parallel_size 4 does not divide the 6 key heads of a process\n"
        "    why: a gated delta net gives each context-parallel process whole rows of an equal number of heads\n"
        "    fix: write context_parallel_size: 3, the nearest that divides them",
    ),
    (
        dataclasses.replace(QWEN, model_type="gemma4"),
        ["save_format=torch_dist"],
        "save_format: torch_dist with a gemma4\n    why: Megatron-Core's attention does not support layers with heads "
        "of two sizes\n    fix: write save_format: hf",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=13"],
        "pipeline_model_parallel_size 13: with 12 layers some of 13 parts have none\n"
        "    why: every stage has at least one layer\n"
        "    fix: write pipeline_model_parallel_size: 12, the largest possible",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=7", "gradient_accumulation_steps=2"],
        "2 stages of 7 virtual stages: with 12 layers some of 14 parts have none\n"
        "    why: every virtual stage has at least one layer\n"
        "    fix: write virtual_pipeline_model_parallel_size: 6, the largest possible",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=12", "virtual_pipeline_model_parallel_size=2", "gradient_accumulation_steps=12"],
        "12 stages of 2 virtual stages: with 12 layers some of 24 parts have none\n"
        "    why: every virtual stage has at least one layer\n"
        "    fix: remove virtual_pipeline_model_parallel_size: each stage has one layer",
    ),
    (
        QWEN,
        ["decoder_first_pipeline_num_layers=5"],
        "decoder_first_pipeline_num_layers: 5 with pipeline_model_parallel_size: 1\n"
        "    why: there is one stage, which holds everything\n"
        "    fix: write pipeline_model_parallel_size: 2, or remove decoder_first_pipeline_num_layers",
    ),
    (
        QWEN,
        [
            "pipeline_model_parallel_size=2",
            "decoder_first_pipeline_num_layers=5",
            "account_for_loss_in_pipeline_split=true",
        ],
        "decoder_first_pipeline_num_layers and account_for_loss_in_pipeline_split\n"
        "    why: each sets the number of layers per stage\n"
        "    fix: keep decoder_first_pipeline_num_layers",
    ),
    (
        QWEN,
        [
            "pipeline_model_parallel_size=2",
            "pipeline_model_parallel_layout=Et*6|t*6L",
            "account_for_loss_in_pipeline_split=true",
        ],
        "account_for_loss_in_pipeline_split and pipeline_model_parallel_layout\n"
        "    why: each sets the number of layers per stage\n"
        "    fix: keep pipeline_model_parallel_layout",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=2", "decoder_first_pipeline_num_layers=5", "decoder_last_pipeline_num_layers=5"],
        "decoder_first_pipeline_num_layers 5 and decoder_last_pipeline_num_layers 5: 10 layers are "
        "requested, the model has 12\n"
        "    why: the parts together must have the model's 12 layers\n"
        "    fix: write decoder_last_pipeline_num_layers: 7",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*6|t*5L"],
        "pipeline_model_parallel_layout Et*6|t*5L: it has 11 layers, the model 12\n"
        "    why: the parts together must have the model's 12 layers\n"
        "    fix: write pipeline_model_parallel_layout: Et*6|t*6L",
    ),
    (
        DEEPSTACK,
        ["pipeline_model_parallel_size=6"],
        "the first of 6 pipeline parts has 2 of the first 3 layers\n"
        "    why: each of these 3 gets features of the vision encoder, which is in the first part (deepstack)\n"
        "    fix: write decoder_first_pipeline_num_layers: 3",
    ),
    (
        DEEPSTACK,
        ["pipeline_model_parallel_size=4", "virtual_pipeline_model_parallel_size=3", "gradient_accumulation_steps=4"],
        "the first of 12 pipeline parts has 1 of the first 3 layers\n"
        "    why: each of these 3 gets features of the vision encoder, which is in the first part (deepstack)\n"
        "    fix: write virtual_pipeline_model_parallel_size: 2 and pipeline_model_parallel_layout: "
        "Et*3|t*2|t*2|t|t|t|t|tL",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*6|t*5mL"],
        "pipeline_model_parallel_layout 'Et*6|t*5mL' cannot be read: unknown m: multi-token "
        "prediction layers (m) are always in the last part, and not written\n"
        "    fix: write E first, t for each layer, L last, and | between stages: Et*3|t*3L",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*6|t*6"],
        "pipeline_model_parallel_layout 'Et*6|t*6' cannot be read: it must have one E, then layers, "
        "then one L\n"
        "    fix: write E first, t for each layer, L last, and | between stages: Et*3|t*3L",
    ),
    (
        QWEN,
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*4|t*4|t*4L"],
        "pipeline_model_parallel_layout 'Et*4|t*4|t*4L' has 3 parts for 2 stages\n"
        "    why: every stage holds one part, or one for each of its virtual stages\n"
        "    fix: write a multiple of 2 parts, or pipeline_model_parallel_size: 3",
    ),
    (
        QWEN,
        ["context_parallel_size=8", "cp_comm_type=a2a"],
        "context_parallel_size 8 with cp_comm_type a2a does not divide the 12 attention heads of a process\n"
        "    why: a2a gives each context-parallel process an equal number of heads\n"
        "    fix: write cp_comm_type: p2p, or context_parallel_size: 6, the nearest that divides them",
    ),
    (
        WHOLE_PICTURES,
        ["context_parallel_size=2"],
        "context_parallel_size 2 with cp_comm_type p2p splits images that attend to themselves\n"
        "    why: in this model image tokens also attend to later tokens of the image, which needs whole rows\n"
        "    fix: write cp_comm_type: a2a",
    ),
    (
        QWEN,
        ["context_parallel_size=2", "tensor_model_parallel_size=2", "num_processes=6"],
        "6 processes are not a multiple of the 4 that one replica of the model takes\n"
        "    why: tensor_model_parallel_size 2 times pipeline_model_parallel_size 1 times "
        "context_parallel_size 2 is 4\n"
        "    fix: write context_parallel_size: 1, or write num_processes: 4 or 8",
    ),
    (
        EXPERTS,
        ["expert_model_parallel_size=4", "pipeline_model_parallel_size=2", "num_processes=4"],
        "4 processes are not a multiple of the 8 that one replica of the experts takes\n"
        "    why: expert_tensor_parallel_size 1 times expert_model_parallel_size 4 times "
        "pipeline_model_parallel_size 2 is 8\n"
        "    fix: write expert_model_parallel_size: 2, or write num_processes: 8",
    ),
    (
        EXPERTS,
        ["expert_model_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=true", "num_processes=2"],
        "2 processes are not a multiple of the 4 that one replica of the experts takes\n"
        "    why: expert_tensor_parallel_size 2 times expert_model_parallel_size 2 times "
        "pipeline_model_parallel_size 1 is 4; expert_tensor_parallel_size is tensor_model_parallel_size "
        "if it is not set\n"
        "    fix: write expert_tensor_parallel_size: 1, or write num_processes: 4",
    ),
    (
        EXPERTS,
        ["expert_model_parallel_size=3"],
        "expert_model_parallel_size 3 does not divide the model's 8 experts\n"
        "    why: each process holds the same number of experts\n"
        "    fix: write expert_model_parallel_size: 2, the nearest that does",
    ),
    (
        EXPERTS,
        ["expert_tensor_parallel_size=5"],
        "expert_tensor_parallel_size 5 does not divide an expert's 48 channels\n"
        "    why: each process takes an equal number of channels of every expert\n"
        "    fix: write expert_tensor_parallel_size: 4",
    ),
    (
        EXPERTS,
        ["tensor_model_parallel_size=2"],
        "tensor_model_parallel_size above 1 without sequence_parallel\n"
        "    why: without it every tensor-parallel process would send all tokens to the experts\n"
        "    fix: write sequence_parallel: true",
    ),
    (
        QWEN,
        ["expert_model_parallel_size=2"],
        "expert_model_parallel_size: 2 with a dense model\n"
        "    why: a qwen2 has no experts\n"
        "    fix: remove expert_model_parallel_size",
    ),
    (
        QWEN,
        ["moe_aux_loss_coeff=0.001"],
        "moe_aux_loss_coeff: 0.001 with a dense model\n    why: a qwen2 has no experts\n"
        "    fix: remove moe_aux_loss_coeff",
    ),
    (
        QWEN,
        ["moe_layer_recompute=true"],
        "moe_layer_recompute: true with a dense model\n    why: a qwen2 has no experts\n"
        "    fix: remove moe_layer_recompute",
    ),
    (
        EXPERTS,
        ["moe_router_bias_update_rate=0.001"],
        "moe_router_bias_update_rate with a model that has no bias on its experts\n"
        "    why: a qwen3_moe balances with a loss: moe_aux_loss_coeff\n"
        "    fix: remove moe_router_bias_update_rate",
    ),
    (
        SIGMOID,
        ["moe_router_bias_update_rate=0.001", "finetuning_type=lora"],
        "moe_router_bias_update_rate: 0.001 with finetuning_type: lora\n"
        "    why: the bias belongs to the base model, which is frozen\n"
        "    fix: remove moe_router_bias_update_rate",
    ),
    (
        SIGMOID,
        ["moe_router_load_balancing_type=sinkhorn"],
        "moe_router_load_balancing_type sinkhorn with a deepseek_v3\n"
        "    why: sinkhorn balances the softmax of the router's logits; this model uses their sigmoid\n"
        "    fix: write moe_router_load_balancing_type: seq_aux_loss",
    ),
    (
        EXPERTS,
        ["moe_aux_loss_coeff=0.001", "moe_router_load_balancing_type=none"],
        "moe_aux_loss_coeff: 0.001 with moe_router_load_balancing_type: none\n"
        "    why: there is no auxiliary loss to weigh\n"
        "    fix: write moe_router_load_balancing_type: aux_loss, or remove moe_aux_loss_coeff",
    ),
    (
        EXPERTS,
        ["moe_pad_expert_input_to_capacity=true"],
        "moe_pad_expert_input_to_capacity: true without moe_expert_capacity_factor\n"
        "    why: without it experts have no capacity\n"
        "    fix: write moe_expert_capacity_factor: 1.5, or remove moe_pad_expert_input_to_capacity",
    ),
    (
        SIGMOID,
        ["moe_shared_expert_overlap=true", "moe_token_dispatcher_type=allgather"],
        "moe_shared_expert_overlap: true with moe_token_dispatcher_type: allgather\n"
        "    why: allgather has no communication to overlap with\n"
        "    fix: write moe_token_dispatcher_type: alltoall, or remove moe_shared_expert_overlap",
    ),
    (
        EXPERTS,
        ["moe_shared_expert_overlap=true"],
        "moe_shared_expert_overlap: true with a model without shared experts\n"
        "    why: a qwen3_moe has none\n"
        "    fix: remove moe_shared_expert_overlap",
    ),
    (
        EXPERTS,
        ["moe_router_load_balancing_type=sinkhorn", "moe_expert_capacity_factor=1.5"],
        "moe_expert_capacity_factor: 1.5 with moe_router_load_balancing_type: sinkhorn\n"
        "    why: sinkhorn itself balances the load\n"
        "    fix: remove moe_expert_capacity_factor",
    ),
    (
        ONE_EXPERT,
        [],
        "the model sends each token to one expert and normalizes its weight, which is then always 1\n"
        "    why: its router would never learn\n"
        "    fix: train a checkpoint with num_experts_per_tok above 1, or with norm_topk_prob: false",
    ),
    (
        QWEN,
        ["recompute_method=block"],
        "recompute_method: block without recompute_granularity\n"
        "    why: it sets how whole layers are recomputed\n"
        "    fix: write recompute_granularity: full, or remove recompute_method",
    ),
    (
        QWEN,
        ["recompute_granularity=selective", "recompute_num_layers=1"],
        "recompute_num_layers: 1 with recompute_granularity: selective\n"
        "    why: it sets how whole layers are recomputed\n"
        "    fix: write recompute_granularity: full, or remove recompute_num_layers",
    ),
    (
        QWEN,
        ["recompute_granularity=full", "recompute_num_layers=5"],
        "recompute_num_layers 5 does not divide the 12 layers of a stage\n"
        "    why: uniform recomputes layers in groups of that size\n"
        "    fix: write recompute_num_layers: 4, the nearest that does, or recompute_method: block",
    ),
    (
        QWEN,
        ["recompute_granularity=selective", "recompute_modules=[mla_up_proj]"],
        "recompute_modules has mla_up_proj, and a qwen2 has no latent attention\n    fix: remove mla_up_proj",
    ),
    (
        QWEN,
        ["recompute_granularity=selective", "recompute_modules=[core_attn, moe]"],
        "recompute_modules has moe, and a qwen2 has no experts\n    fix: remove moe",
    ),
    (
        EXPERTS,
        ["recompute_granularity=selective", "recompute_modules=[shared_experts]"],
        "recompute_modules has shared_experts, and a qwen3_moe has no shared experts\n    fix: remove shared_experts",
    ),
    (
        EXPERTS,
        ["recompute_granularity=selective", "recompute_modules=[moe_act]", "moe_grouped_gemm=false"],
        "recompute_modules has moe_act with moe_grouped_gemm: false\n"
        "    fix: remove moe_act, or write moe_grouped_gemm: true",
    ),
    (
        QWEN,
        ["optimizer=sgd", "exp_avg_dtype=bf16"],
        "exp_avg_dtype: bf16 with optimizer: sgd\n"
        "    why: it applies to Adam's state\n"
        "    fix: write optimizer: adam, or remove exp_avg_dtype",
    ),
    (
        QWEN,
        ["optimizer=sgd", "optimizer_cpu_offload=true"],
        "optimizer_cpu_offload: true with optimizer: sgd\n"
        "    why: it applies to Adam's state\n"
        "    fix: write optimizer: adam, or remove optimizer_cpu_offload",
    ),
    (
        QWEN,
        ["optimizer_offload_fraction=0.5"],
        "optimizer_offload_fraction: 0.5 without optimizer_cpu_offload\n"
        "    why: nothing is offloaded\n"
        "    fix: write optimizer_cpu_offload: true, or remove optimizer_offload_fraction",
    ),
    (
        QWEN,
        ["optimizer_cpu_offload=true", "use_distributed_optimizer=false"],
        "optimizer_cpu_offload: true without use_distributed_optimizer\n"
        "    why: without it every replica keeps the whole optimizer state on the device\n"
        "    fix: write use_distributed_optimizer: true, or remove optimizer_cpu_offload",
    ),
    (
        QWEN,
        ["accumulate_allreduce_grads_in_fp32=false"],
        "accumulate_allreduce_grads_in_fp32: false without bf16 or fp16\n"
        "    why: gradients have the dtype of the model, which is fp32\n"
        "    fix: write bf16: true, or remove accumulate_allreduce_grads_in_fp32",
    ),
]


@pytest.mark.parametrize(("architecture", "overrides", "message"), WRONG)
def test_what_is_wrong_is_told_with_the_nearest_valid_value(architecture, overrides, message):
    assert messages(architecture, *overrides) == [message]


@pytest.mark.parametrize("num_layers", [3, 4, 5, 7, 28])
def test_layouts_that_deepstack_is_told_are_valid(num_layers):
    """Whatever the sizes: the fix of a first chunk that is too small is one that no rule of pipelines has a word on."""
    model = dataclasses.replace(DEEPSTACK, num_layers=num_layers)
    shapes = ({}, {"decoder_last_pipeline_num_layers": 2}, {"account_for_embedding_in_pipeline_split": True})
    refused = 0
    for pp, vpp, shape in itertools.product((2, 3, 4, 7), (None, 2, 3, 4), shapes):
        batch = BatchSettings(gradient_accumulation_steps=84)
        given = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp, **shape}
        for problem in deepstack(Context(Settings(parallel=ParallelSettings(**given), batch=batch), model, None)):
            writes, _, removes = spell(problem.fix).partition("remove ")
            fixed = {key: value for key, value in given.items() if key not in removes.split(" and ")}
            changes = re.findall(r"(\w+): (\S+?)(?:,|$| and)", writes)
            fixed |= {key: value if key.endswith("layout") else int(value) for key, value in changes}
            context = Context(Settings(parallel=ParallelSettings(**fixed), batch=batch), model, None)
            assert [each.what for rule in pipeline.RULES for each in rule(context)] == [], problem.fix
            refused += 1
    assert refused
