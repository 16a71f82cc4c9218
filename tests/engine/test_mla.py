"""One layer's multi-latent attention against Transformers' DeepseekV3Attention: values and all gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from layouts import Layout

from megatune.architecture import Architecture, MultiLatentAttention
from megatune.rope_scaling import YarnRopeScaling

HIDDEN_SIZE, HEADS, ROWS = 48, 4, 2
# Every width differs from every other, so that a confusion of two shows.
CHANNELS = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
# Where documents begin, and the end; all lengths are multiples of 4.
ONE_DOCUMENT, PACKED = (0, 24), (0, 12, 16, 24)

NAMES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
CUT = {"linear_q_proj": 0, "linear_q_up_proj": 0, "linear_kv_up_proj": 0, "linear_proj": 1}

TP2, SP, CP2 = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}, {"context_parallel_size": 2}
LAYOUTS = {
    "1": Layout(1),
    "tp2": Layout(2, TP2),
    "tp2 sp": Layout(2, TP2 | SP),
    "tp4": Layout(4, {"tensor_model_parallel_size": 4}),
    "tp4 sp": Layout(4, {"tensor_model_parallel_size": 4} | SP),
    "tp2 sp, fused": Layout(2, TP2 | SP, performance={"apply_rope_fusion": True}),
}
CONTEXT_LAYOUTS = {
    "1": Layout(1),
    "tp2 sp": Layout(2, TP2 | SP),
    "cp2 p2p": Layout(2, CP2 | {"cp_comm_type": "p2p"}),
    "cp2 all_gather": Layout(2, CP2 | {"cp_comm_type": "all_gather"}),
    "cp2 a2a": Layout(2, CP2 | {"cp_comm_type": "a2a"}),
    "cp2 tp2 sp": Layout(4, CP2 | TP2 | SP),
}

Tensors = dict[str, torch.Tensor]


def reference(
    q_lora_rank: int | None, rope: dict[str, Any], interleaved: bool, boundaries: tuple[int, ...]
) -> tuple[Architecture, Tensors]:
    """Transformers' layer with random weights: its architecture; and input, weights of the output in a loss, output,
    and everything's gradient, rows first: [b, s, h]."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        **CHANNELS,
        rope_parameters=dict(rope),
        rope_interleave=interleaved,
        rms_norm_eps=1e-2,  # of other norms: the latents' have their own
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    layer, rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.2)
    s = boundaries[-1]
    hidden_states, weights = torch.randn(2, ROWS if len(boundaries) == 2 else 1, s, HIDDEN_SIZE).unbind()
    hidden_states.requires_grad_()
    position_ids, mask = documents(boundaries)
    output, _ = layer(hidden_states, rotary(hidden_states, position_ids[None]), mask)
    (output * weights).sum().backward()
    named = {NAMES[name.split(".")[0]]: parameter for name, parameter in layer.named_parameters()}
    return architecture(config, layer.scaling, rotary.attention_scaling), {
        "hidden_states": hidden_states.detach(),
        "loss_weights": weights,
        "output": output.detach(),
        "hidden_states.grad": hidden_states.grad,
        **{name: parameter.detach() for name, parameter in named.items()},
        **{f"{name}.grad": parameter.grad for name, parameter in named.items()},
    }


def documents(boundaries: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [s], and the mask [s, s] that is added to scores: causal, and within documents."""
    position_ids = torch.cat([torch.arange(stop - start) for start, stop in pairwise(boundaries)])
    document = torch.cat([torch.full((stop - start,), start) for start, stop in pairwise(boundaries)])
    sees = (document[:, None] == document) & (position_ids[:, None] >= position_ids)
    return position_ids, torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)


def architecture(config: Any, softmax_scale: float, attention_factor: float) -> Architecture:
    rope = config.rope_parameters
    scaling = None
    if rope["rope_type"] == "yarn":
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        scaling = YarnRopeScaling(**{name: rope[name] for name in names}, attention_factor=attention_factor)
    return Architecture(
        model_type="deepseek_v3",
        num_layers=1,
        hidden_size=HIDDEN_SIZE,
        ffn_hidden_size=96,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        kv_channels=CHANNELS["qk_rope_head_dim"],
        vocab_size=32,
        max_position_embeddings=64,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=rope["rope_theta"],
        rope_scaling=scaling,
        mla=MultiLatentAttention(
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=CHANNELS["kv_lora_rank"],
            qk_head_dim=CHANNELS["qk_nope_head_dim"],
            qk_pos_emb_head_dim=CHANNELS["qk_rope_head_dim"],
            v_head_dim=CHANNELS["v_head_dim"],
            softmax_scale=softmax_scale,
            rope_interleaved=config.rope_interleave,
        ),
    )


def compute(architecture: Architecture, layout: Layout, truth: Tensors, boundaries: tuple[int, ...]) -> Tensors:
    """On every rank: output, and gradients of input and weights, of this rank's tokens and heads; and `up_calls`, how
    often keys and values were projected up."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatune.engine import groups
    from megatune.engine.layers.rotary import attention_factor, cos_sin, inverse_frequencies
    from megatune.engine.specs import block_spec
    from megatune.engine.transformer_config import transformer_config

    settings = layout.settings()
    coords = groups.build(settings.parallel, seed=0, timeout=30)
    config = transformer_config(architecture, settings)
    spec = block_spec(architecture, config, None).layer_specs[0].submodules.self_attention
    pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(
        spec, config=config, layer_number=1, pg_collection=pg_collection, cp_comm_type=config.cp_comm_type
    )
    up_calls = []
    layer.linear_kv_up_proj.register_forward_hook(lambda *args: up_calls.append(args))
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(heads_of(truth, name.removesuffix(".weight"), coords))
    tokens = tokens_of(boundaries, config, coords)
    hidden_states = truth["hidden_states"].transpose(0, 1)[tokens].clone().requires_grad_()
    sequences = sequences_of(boundaries, len(truth["output"]))
    table = cos_sin(
        sequences.position_ids, inverse_frequencies(architecture), attention_factor(architecture), torch.float32
    )
    output, _ = layer(hidden_states, attention_mask=None, rotary_pos_emb=table, packed_seq_params=sequences)
    (output * truth["loss_weights"].transpose(0, 1)[tokens]).sum().backward()
    for parameter in layer.parameters():
        # As Megatron-Core finishes gradients.
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(parameter.grad, group=pg_collection.tp)
        torch.distributed.all_reduce(parameter.grad, group=pg_collection.cp)
    return {
        "output": output.detach(),
        "hidden_states.grad": hidden_states.grad,
        **{f"{name.removesuffix('.weight')}.grad": parameter.grad for name, parameter in layer.named_parameters()},
        "up_calls": torch.tensor(len(up_calls)),
    }


def heads_of(tensors: Tensors, name: str, coords: Any, suffix: str = "") -> torch.Tensor:
    tensor = tensors[name + suffix]
    return tensor.chunk(coords.tp_size, CUT[name])[coords.tp_rank] if name in CUT else tensor


def sequences_of(boundaries: tuple[int, ...], rows: int) -> Any:
    from megatune.data.batches import Batch
    from megatune.engine.sequences import local_batch

    tokens = torch.zeros(rows, boundaries[-1], dtype=torch.int64)
    is_packed = len(boundaries) > 2
    batch = Batch(
        input_ids=tokens,
        labels=tokens,
        position_ids=documents(boundaries)[0].expand(rows, -1),
        lengths=tuple(stop - start for start, stop in pairwise(boundaries)) if is_packed else (boundaries[-1],) * rows,
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32) if is_packed else None,
    )
    return local_batch(batch).sequences


def tokens_of(boundaries: tuple[int, ...], config: Any, coords: Any) -> torch.Tensor:
    from megatune.engine.sequences import local_tokens

    tokens = local_tokens(boundaries, coords.cp_rank, coords.cp_size)
    return tokens.chunk(coords.tp_size)[coords.tp_rank] if config.sequence_parallel else tokens


def errors(architecture: Architecture, layout: Layout, truth: Tensors, boundaries: tuple[int, ...]) -> dict[str, float]:
    """On every rank: relative L2 error of each of `compute`'s answers."""
    from megatune.engine import groups
    from megatune.engine.transformer_config import transformer_config

    ours = compute(architecture, layout, truth, boundaries)
    coords, config = groups.coordinates(), transformer_config(architecture, layout.settings())
    found = {}
    for name, tensor in ours.items():
        if name in ("output", "hidden_states.grad"):
            expected = truth[name].transpose(0, 1)[tokens_of(boundaries, config, coords)]
        elif name.endswith(".grad"):
            expected = heads_of(truth, name.removesuffix(".grad"), coords, ".grad")
        else:
            continue
        found[name] = ((tensor - expected).norm() / expected.norm()).item()
    return found


def check(pool: Any, layout: Layout, boundaries: tuple[int, ...], *case: Any) -> None:
    architecture, truth = reference(*case, boundaries)
    for found in pool.run(layout.world_size, errors, architecture, layout, truth, boundaries):
        assert {name for name in truth if name.endswith(".grad")} | {"output"} == set(found)
        assert max(found.values()) < 1e-6, found


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_lora_rank", [None, 28])
def test_layer_equals_that_of_transformers(pool, q_lora_rank, rope, layout):
    check(pool, LAYOUTS[layout], ONE_DOCUMENT, q_lora_rank, rope, True)


def test_halves_equal_those_of_transformers(pool):
    """rope_interleave: false."""
    check(pool, LAYOUTS["tp2 sp"], ONE_DOCUMENT, 28, YARN, False)


@pytest.mark.covering
@pytest.mark.parametrize("boundaries", [ONE_DOCUMENT, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS)
def test_documents_and_their_parts_equal_those_of_transformers(pool, layout, boundaries):
    check(pool, CONTEXT_LAYOUTS[layout], boundaries, 28, YARN, True)


def compute_with_and_without(
    architecture: Architecture, layout: Layout, truth: Tensors, recompute: dict[str, Any]
) -> tuple[Tensors, Tensors]:
    from megatune.engine import groups

    kept = compute(architecture, layout, truth, ONE_DOCUMENT)
    groups.parallel_state.destroy_model_parallel()
    again = Layout(layout.world_size, layout.parallel, recompute=recompute)
    return kept, compute(architecture, again, truth, ONE_DOCUMENT)


@pytest.mark.covering
@pytest.mark.parametrize("modules", [["mla_up_proj"], ["core_attn"], ["core_attn", "mla_up_proj"]])
@pytest.mark.parametrize("layout", ["1", "tp2 sp"])
@pytest.mark.parametrize("q_lora_rank", [None, 28])
def test_recomputation_is_exact(pool, q_lora_rank, layout, modules):
    architecture, truth = reference(q_lora_rank, YARN, True, ONE_DOCUMENT)
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
    for kept, again in pool.run(
        LAYOUTS[layout].world_size, compute_with_and_without, architecture, LAYOUTS[layout], truth, recompute
    ):
        assert (kept.pop("up_calls"), again.pop("up_calls")) == (1, 2 if "mla_up_proj" in modules else 1)
        assert all(torch.equal(kept[name], again[name]) for name in kept)


def counted_elements(architecture: Architecture, layout: Layout) -> int:
    """On every rank: elements whose gradients this rank adds to the norm."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    from megatune.engine import groups
    from megatune.engine.model import build_model

    settings = layout.settings()
    groups.build(settings.parallel, seed=0, timeout=30)
    (chunk,) = build_model(architecture, settings)
    return sum(weight.numel() for weight in chunk.parameters() if param_is_not_tensor_parallel_duplicate(weight))


@pytest.mark.parametrize("q_lora_rank", [None, 28])
def test_gradient_norm_counts_each_weight_once(pool, q_lora_rank):
    architecture, _ = reference(q_lora_rank, PLAIN, True, ONE_DOCUMENT)
    (whole,) = pool.run(1, counted_elements, architecture, LAYOUTS["1"])
    assert sum(pool.run(2, counted_elements, architecture, LAYOUTS["tp2 sp"])) == whole
