"""Models and settings whose activations are measured, and the machine that they are measured on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from layouts import Layout
from measured_memory import DOCUMENTS, GRID
from model_sizes import FAMILY_SIZES, tiny_config

from megatune.architecture import Architecture, DeltaNet, MixtureOfExperts, MultiLatentAttention
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import BatchSettings, DataSettings, Settings
from megatune.families import read_architecture
from megatune.plan.case import Case, PlannedModel
from megatune.plan.machine import Device, Link, Machine
from megatune.plan.memory.activations import Activations
from megatune.plan.memory.stage import StageMemory


def machine(generation: str = "cpu") -> Machine:
    """One of which only the generation matters."""
    peaks = {"float32": 1e12, "bfloat16": 1e12, "float16": 1e12}
    device = Device(name="x", generation=generation, memory=2**36, flops=peaks, bandwidth=1e11, link="x")
    link = Link(name="x", bandwidth=1e10, latency=1e-5)
    return Machine(device=device, gpus_per_node=8, link=link, network=link)


def activation_bytes(case: Case, stage: int) -> StageMemory:
    return Activations(case).parts(stage)


def architecture(**numbers: Any) -> Architecture:
    """Small, but wide enough that activations outweigh whatever a token has few bytes of."""
    sizes: dict[str, Any] = {
        "model_type": "llama", "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 704, "num_attention_heads": 8,
        "num_query_groups": 4, "kv_channels": 32, "vocab_size": 4096, "max_position_embeddings": 4096,
        "norm_epsilon": 1e-6, "rotary_base": 1e4,
    }  # fmt: skip
    return Architecture(**{**sizes, **numbers})


def experts(**numbers: Any) -> MixtureOfExperts:
    sizes = {"layers": (True,) * 4, "num_experts": 8, "router_topk": 2, "moe_ffn_hidden_size": 256}
    return MixtureOfExperts(**{**sizes, **numbers})


DENSE = architecture()
# Of few layers, so that the score weighs.
REWARD = architecture(num_layers=2, num_labels=1)
CLASSIFIER = architecture(num_layers=2, num_labels=2000)
QWEN3 = architecture(model_type="qwen3", qk_layernorm=True)
# Its vocabulary is padded: the loss masks a copy.
LARGE_VOCABULARY = architecture(num_layers=2, vocab_size=31900)
WIDE = architecture(hidden_size=512, ffn_hidden_size=1408, kv_channels=64)
DEEP = architecture(num_layers=8)
SPARSE = architecture(model_type="qwen3_moe", moe=experts())
DELTA = architecture(
    model_type="qwen3_5",
    qk_layernorm=True,
    zero_centered_norms=True,
    attention_output_gate=True,
    delta=DeltaNet(
        layers=(True,) * 4, num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32, conv_kernel_size=4
    ),
)
# Layers with a window gather keys and values in place of a ring.
SCALED = {"qk_layernorm": True, "post_norms": True, "windows": (64, None, 64, None), "local_rotary_base": 1e4}
GEMMA3 = architecture(
    model_type="gemma3_text", zero_centered_norms=True, activation="gelu_tanh", embedding_multiplier=16.0, **SCALED
)
OLMO3 = architecture(model_type="olmo3", wide_qk_norms=True, pre_norms=False, **SCALED)
SHARED = architecture(
    model_type="qwen2_moe", moe=experts(shared_expert_intermediate_size=512, shared_expert_gate=True, pre_softmax=True)
)
FURTHER = architecture(
    model_type="glm4_moe", moe=experts(shared_expert_intermediate_size=256, score_function="sigmoid"), mtp_num_layers=1
)
LATENT = architecture(
    model_type="deepseek_v3",
    kv_channels=16,
    num_query_groups=8,
    mla=MultiLatentAttention(
        q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32, softmax_scale=0.1
    ),
    moe=experts(
        layers=(False, True, True, True), shared_expert_intermediate_size=256, score_function="sigmoid", num_groups=4,
        group_topk=2, topk_scaling_factor=2.5, expert_bias=True, router_dtype="fp32",
    ),
)  # fmt: skip


def vision_language(family: str, section: list[int], **sizes: int) -> Architecture:
    """The same decoder with an encoder before it."""
    encoder = {"hidden_size": 128, "intermediate_size": 352, "out_hidden_size": 256, "num_heads": 4}
    if family == "qwen2_vl":
        encoder = {"embed_dim": 128, "hidden_size": 256, "mlp_ratio": 4, "num_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    if family == "mistral3":
        del encoder["out_hidden_size"]
        encoder["num_attention_heads"] = encoder.pop("num_heads")
        rope = FAMILY_SIZES[family]["rope_parameters"]
    config = tiny_config(
        family, hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        vocab_size=4096, rope_parameters=rope, vision_config=encoder, **sizes,
    )  # fmt: skip
    return read_architecture(config.to_dict(), "config.json")


QWEN2_VL = vision_language("qwen2_vl", [4, 6, 6])
QWEN2_5_VL = vision_language("qwen2_5_vl", [4, 6, 6])
MISTRAL3 = vision_language("mistral3", [])
QWEN3_VL = vision_language("qwen3_vl", [6, 5, 5])

ALL = FinetuningSettings()
ENCODER_ADAPTED = FinetuningSettings(finetuning_type="lora", freeze_vision_tower=False)
WHOLE = FinetuningSettings(freeze_vision_tower=False, freeze_multi_modal_projector=False)


@dataclass(frozen=True)
class Measured:
    """One line of the table: rows of `length` tokens and of `images`, in `micro_batches` of `rows`."""

    model: str
    architecture: Architecture
    layout: Layout
    bf16: bool = False
    rows: int = 1
    length: int = 512
    micro_batches: int = 1
    trainable: FinetuningSettings = ALL
    images: int = 0

    @property
    def settings(self) -> Settings:
        settings = self.layout.settings(precision={"bf16": self.bf16})
        batch = BatchSettings(per_device_train_batch_size=self.rows, gradient_accumulation_steps=self.micro_batches)
        vision = self.architecture.vision
        pixels = math.prod(GRID) * vision.patch_size**2 if vision else 1
        data = DataSettings(cutoff_len=self.length, packing=self.layout.packed, image_max_pixels=pixels)
        return settings.model_copy(update={"batch": batch, "data": data, "finetuning": self.trainable})

    @property
    def case(self) -> Case:
        return Case(
            model=PlannedModel(name=self.model, architecture=self.architecture),
            settings=self.settings,
            world_size=self.layout.world_size,
            machine=machine(),
            document_length=self.length / DOCUMENTS if self.layout.packed else None,
            image_tokens=self.images * math.prod(GRID) // 4,
        )


TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
PP4: dict[str, Any] = {"pipeline_model_parallel_size": 4}
VPP2: dict[str, Any] = {"virtual_pipeline_model_parallel_size": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
EP8: dict[str, Any] = {"expert_model_parallel_size": 8}
ETP1: dict[str, Any] = {"expert_tensor_parallel_size": 1}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
# Random routers send equally many tokens to all ranks of experts only where they are balanced.
EVEN: dict[str, Any] = {"moe_router_load_balancing_type": "sinkhorn"}


def _selective(*modules: str) -> Layout:
    return Layout(1, recompute={"recompute_granularity": "selective", "recompute_modules": list(modules)})


def _kernels(**performance: Any) -> Layout:
    return Layout(1, performance=performance)


def _both(name: str, model: str, architecture: Architecture, layout: Layout, **shape: Any) -> dict[str, Measured]:
    return {
        f"{name}, {dtype}": Measured(model, architecture, layout, bf16=dtype == "bf16", **shape)
        for dtype in ("fp32", "bf16")
    }


def _dense() -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for name, layout in {
        "1": Layout(1),
        "full": Layout(1, recompute=FULL),
        "unfused attention": _kernels(attention_backend="unfused"),
        "plain cross-entropy": _kernels(cross_entropy_loss_fusion=False),
        "plain norms": _kernels(rms_norm_fusion=False),
        "bias_activation_fusion": _kernels(bias_activation_fusion=True),
        "gradient_accumulation_fusion": _kernels(gradient_accumulation_fusion=True),
        "tp2": Layout(2, TP2),
        "tp2 sp": Layout(2, TP2 | SP),
        "cp2 p2p": Layout(2, CP2),
    }.items():
        found |= _both(name, "dense", DENSE, layout)
    for name, layout in {
        "core_attn": _selective("core_attn"),
        "layernorm": _selective("layernorm"),
        "mlp": _selective("mlp"),
        "core_attn, layernorm, mlp": _selective("core_attn", "layernorm", "mlp"),
        "full, 2 layers": Layout(1, recompute=FULL | {"recompute_num_layers": 2}),
        "full, block, 1 layer": Layout(1, recompute=FULL | {"recompute_method": "block", "recompute_num_layers": 1}),
        "apply_rope_fusion": _kernels(apply_rope_fusion=True),
        "tp2 sp, full": Layout(2, TP2 | SP, recompute=FULL),
        "tp2 sp, packed": Layout(2, TP2 | SP, packed=True),
        "cp2 all_gather": Layout(2, CP2 | {"cp_comm_type": "all_gather"}),
        "cp2 a2a": Layout(2, CP2 | {"cp_comm_type": "a2a"}),
        "cp2 all_gather, packed": Layout(2, CP2 | {"cp_comm_type": "all_gather"}, packed=True),
    }.items():
        found[f"{name}, fp32"] = Measured("dense", DENSE, layout)
    # Fewer key/value heads than ranks.
    found["tp2 sp, fp32"] = Measured("one key/value head", replace(DENSE, num_query_groups=1), Layout(2, TP2 | SP))
    found["packed, 2 rows, bf16"] = Measured("dense", DENSE, Layout(1, packed=True), bf16=True, rows=2)
    found["h 512, 3 rows, fp32"] = Measured("dense, wide", WIDE, Layout(1), length=256, rows=3)
    found["h 512, full, bf16"] = Measured("dense, wide", WIDE, Layout(1, recompute=FULL), bf16=True, length=1024)
    found["q and k norms, bf16"] = Measured("qwen3", QWEN3, Layout(1), bf16=True)
    found["v 32k, plain cross-entropy, bf16"] = Measured(
        "large vocabulary", LARGE_VOCABULARY, _kernels(cross_entropy_loss_fusion=False), bf16=True, length=256
    )
    return found


def _rewards() -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for name, layout in {"1": Layout(1), "full": Layout(1, recompute=FULL), "tp2 sp": Layout(2, TP2 | SP)}.items():
        found |= _both(name, "reward model", REWARD, layout, rows=2)
    return found | {"pp2, bf16": Measured("reward model", REWARD, Layout(2, PP2), bf16=True, rows=2, micro_batches=3)}


def _classifiers() -> dict[str, Measured]:
    """Of many classes: their scores of all tokens count."""
    found: dict[str, Measured] = {}
    for name, layout in {"1": Layout(1), "full": Layout(1, recompute=FULL), "tp2 sp": Layout(2, TP2 | SP)}.items():
        found |= _both(name, "classifier", CLASSIFIER, layout, rows=2)
    return found


def _pipelines() -> dict[str, Measured]:
    found = _both("pp2", "dense", DENSE, Layout(2, PP2), micro_batches=4)
    found |= _both("pp2 vpp2", "dense", DENSE, Layout(2, PP2 | VPP2), micro_batches=4)
    for name, world_size, parallel in (
        ("pp2 vpp2, no p2p overlap", 2, PP2 | VPP2 | {"overlap_p2p_comm": False}),
        ("pp4", 4, PP4),
        ("pp4 vpp2", 4, PP4 | VPP2),
    ):
        layout = Layout(world_size, parallel)
        found[f"{name}, fp32"] = Measured("dense, 8 layers", DEEP, layout, length=256, micro_batches=8)
    full = Layout(2, PP2, recompute=FULL)
    found["pp2, full, fp32"] = Measured("dense", DENSE, full, micro_batches=4)
    found["v 32k, pp2, fp32"] = Measured(
        "large vocabulary", LARGE_VOCABULARY, Layout(2, PP2), length=256, micro_batches=3
    )
    found["tp2 pp2 sp, bf16"] = Measured("dense", DENSE, Layout(4, TP2 | PP2 | SP), bf16=True, micro_batches=3)
    return found


def _experts() -> dict[str, Measured]:
    found = _both("experts", "experts", SPARSE, Layout(1))
    found |= _both("ep2", "experts", SPARSE, Layout(2, EP2, EVEN))
    for name, layout in {
        # With ep 2 as many tokens are gathered as are dispatched otherwise.
        "ep8 allgather": Layout(8, EP8, EVEN | {"moe_token_dispatcher_type": "allgather"}),
        "one by one": Layout(1, experts={"moe_grouped_gemm": False}),
        "fused": _kernels(bias_activation_fusion=True),
        "ep2 etp1 tp2 sp": Layout(2, EP2 | ETP1 | TP2 | SP, EVEN),
        "tp2 sp": Layout(2, TP2 | SP),
        "padded to capacity": Layout(
            2, EP2, {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
        ),
        "moe": _selective("moe"),
        "moe_act": _selective("moe_act"),
        "layernorm": _selective("layernorm"),
        "full": Layout(1, recompute=FULL),
        "full, block, 1 layer, moe": Layout(
            1, recompute=FULL | {"recompute_method": "block", "recompute_num_layers": 1, "moe_layer_recompute": True}
        ),
    }.items():
        found[f"{name}, fp32"] = Measured("experts", SPARSE, layout)
    found["pp2, bf16"] = Measured("experts", SPARSE, Layout(2, PP2), bf16=True, micro_batches=3)
    found["1, fp32"] = Measured("shared experts", SHARED, Layout(1))
    found["shared_experts, fp32"] = Measured("shared experts", SHARED, _selective("shared_experts"))
    overlapping = Layout(2, EP2, EVEN | {"moe_shared_expert_overlap": True})
    found["ep2, overlapped, bf16"] = Measured("shared experts", SHARED, overlapping, bf16=True)
    return found


def _further() -> dict[str, Measured]:
    """A layer behind the decoder predicts a further token."""
    found = _both("1", "multi-token prediction", FURTHER, Layout(1))
    for name, layout in {"tp2 sp": Layout(2, TP2 | SP), "full": Layout(1, recompute=FULL)}.items():
        found[f"{name}, fp32"] = Measured("multi-token prediction", FURTHER, layout)
    found["pp2, bf16"] = Measured("multi-token prediction", FURTHER, Layout(2, PP2), bf16=True, micro_batches=3)
    return found


def _latent() -> dict[str, Measured]:
    found = _both("latent", "latent attention", LATENT, Layout(1))
    for name, layout in {
        "mla_up_proj": _selective("mla_up_proj"),
        "tp2 sp": Layout(2, TP2 | SP),
        "packed": Layout(1, packed=True),
        "cp2 p2p": Layout(2, CP2),
        "cp2 a2a": Layout(2, CP2 | {"cp_comm_type": "a2a"}),
        "full": Layout(1, recompute=FULL),
    }.items():
        found[f"{name}, fp32"] = Measured("latent attention", LATENT, layout)
    return found


def _norms() -> dict[str, Measured]:
    """Norms behind attention and feed-forward, with or without those before; GeGLU."""
    return {
        "gemma3, fp32": Measured("post-norms", GEMMA3, Layout(1)),
        "gemma3, layernorm, bf16": Measured("post-norms", GEMMA3, _selective("layernorm"), bf16=True),
        "gemma3, tp2 sp, fp32": Measured("post-norms", GEMMA3, Layout(2, TP2 | SP)),
        "olmo3, fp32": Measured("post-norms", OLMO3, Layout(1)),
        "olmo3, tp2 sp, bf16": Measured("post-norms", OLMO3, Layout(2, TP2 | SP), bf16=True),
    }


def _named(groups: tuple[dict[str, Measured], ...]) -> dict[str, Measured]:
    return {f"{one.model}: {name}": one for group in groups for name, one in group.items()}


def _adapters() -> dict[str, Measured]:
    """Frozen matrices need no inputs, those with adapters do."""
    found = {
        "matrices frozen, fp32": Measured(
            "dense", DENSE, Layout(1), trainable=FinetuningSettings(freeze_language_model=True)
        )
    }
    for name, layout, bf16, selection in (
        ("LoRA, fp32", Layout(1), False, {}),
        ("LoRA, bf16", Layout(1), True, {}),
        ("LoRA of q and v, fp32", Layout(1), False, {"lora_target": ["q_proj", "v_proj"]}),
        ("LoRA of q and v, bf16", Layout(1), True, {"lora_target": ["q_proj", "v_proj"]}),
        ("LoRA of gate_proj, bf16", Layout(1), True, {"lora_target": ["gate_proj"]}),
        ("LoRA of attention, fp32", Layout(1), False, {"lora_target": ["linear_qkv", "linear_proj"]}),
        ("LoRA of rank 64, and words, bf16", Layout(1), True,
         {"lora_rank": 64, "additional_target": ["embed_tokens", "lm_head"]}),
        ("DoRA of attention, bf16", Layout(1), True,
         {"use_dora": True, "lora_target": ["linear_qkv", "linear_proj"]}),
        ("LoRA with dropout, bf16", Layout(1), True, {"lora_dropout": 0.1}),
        ("LoRA with dropout, fp32", Layout(1), False, {"lora_dropout": 0.1}),
        ("LoRA, full, bf16", Layout(1, recompute=FULL), True, {}),
        ("LoRA, tp2 sp, bf16", Layout(2, TP2 | SP), True, {}),
    ):  # fmt: skip
        trainable = FinetuningSettings(finetuning_type="lora", **selection)
        found[name] = Measured("dense", DENSE, layout, bf16=bf16, trainable=trainable)
    # What is before the first adapter of all keeps nothing; it is counted.
    trainable = FinetuningSettings(finetuning_type="lora", lora_target=["linear_fc2"])
    found["LoRA of fc2, 12 layers, fp32"] = Measured(
        "dense", replace(DENSE, num_layers=12), Layout(1), trainable=trainable
    )
    return found


def _expert_adapters(model: str, architecture: Architecture) -> dict[str, Measured]:
    trainable = FinetuningSettings(finetuning_type="lora")
    found = {"LoRA, bf16": Measured(model, architecture, Layout(1), bf16=True, trainable=trainable)}
    found["LoRA, ep2, fp32"] = Measured(model, architecture, Layout(2, EP2, EVEN), trainable=trainable)
    return found


def _freezing() -> dict[str, Measured]:
    """Layers before the first trained one keep nothing, and the others need no inputs of frozen matrices."""
    found = {}
    for name, layout, layers, more in (
        ("last of 4 layers", Layout(1), 1, {}),
        ("first of 4 layers", Layout(1), -1, {}),
        ("last 2 of 4 layers, full", Layout(1, recompute=FULL), 2, {}),
        ("feed-forward of the last 3 of 4 layers", Layout(1), 3, {"freeze_trainable_modules": ["mlp"]}),
        ("last 3 of 4 layers and words", Layout(1), 3, {"freeze_extra_modules": ["embed_tokens", "lm_head"]}),
        ("last of 4 layers, pp2", Layout(2, PP2), 1, {}),
        ("first of 4 layers, pp2", Layout(2, PP2), -1, {}),
    ):
        trainable = FinetuningSettings(finetuning_type="freeze", freeze_trainable_layers=layers, **more)
        batches = 4 if layout.world_size > 1 else 1
        found[f"{name}, fp32"] = Measured("dense", DENSE, layout, micro_batches=batches, trainable=trainable)
    experts = FinetuningSettings(finetuning_type="freeze")
    found["last 2 of 4 layers, bf16"] = Measured("experts", SPARSE, Layout(1), bf16=True, trainable=experts)
    return found


def _encoder(model: str, architecture: Architecture) -> dict[str, Measured]:
    """One process, six images of 64 tokens in a row; everything is trained where nothing is said."""
    found = _both("1", model, architecture, Layout(1), trainable=WHOLE, images=6)
    for name, layout, bf16, trainable in (
        ("encoder frozen, bf16", Layout(1), True, ALL),
        ("projector trained, fp32", Layout(1), False, FinetuningSettings(freeze_multi_modal_projector=False)),
        ("full, bf16", Layout(1, recompute=FULL), True, WHOLE),
        ("LoRA, bf16", Layout(1), True, FinetuningSettings(finetuning_type="lora")),
        ("LoRA with encoder, bf16", Layout(1), True, ENCODER_ADAPTED),
        ("LoRA with encoder, fp32", Layout(1), False, ENCODER_ADAPTED),
    ):
        found[name] = Measured(model, architecture, layout, bf16, trainable=trainable, images=6)
    return found


def _dealt() -> dict[str, Measured]:
    """Three images over two ranks, of which one has two."""
    found = {
        f"{name}, fp32": Measured("qwen3_vl", QWEN3_VL, layout, trainable=WHOLE, images=3)
        for name, layout in {
            "tp2": Layout(2, TP2),
            "tp2 sp": Layout(2, TP2 | SP),
            "tp2 sp, full": Layout(2, TP2 | SP, recompute=FULL),
            "cp2": Layout(2, CP2),
        }.items()
    }
    deep = vision_language("qwen3_vl", [6, 5, 5], num_hidden_layers=8)
    shape: dict[str, Any] = {"rows": 2, "length": 256, "micro_batches": 4, "images": 2}
    found["8 layers, pp2 vpp2, fp32"] = Measured("qwen3_vl", deep, Layout(2, PP2 | VPP2), trainable=WHOLE, **shape)
    return found


_TEXT = (
    _dense(),
    _rewards(),
    _classifiers(),
    _pipelines(),
    _experts(),
    _further(),
    _latent(),
    _adapters(),
    _expert_adapters("experts", SPARSE),
    _freezing(),
    _norms(),
)
_MODELS = {"qwen2_vl": QWEN2_VL, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL, "mistral3": MISTRAL3}
_LATENT_ADAPTERS = _expert_adapters("latent attention", LATENT)
del _LATENT_ADAPTERS["LoRA, ep2, fp32"]
_PICTURES = (*(_encoder(model, architecture) for model, architecture in _MODELS.items()), _dealt())
CASES: dict[str, Measured] = _named((*_TEXT, _LATENT_ADAPTERS, *_PICTURES))
