"""Adapters against peft on Transformers: logits, loss, and the gradient of every A and B, none of which is zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from computing import LENGTHS, MORE_LENGTHS, failures, measure_in_layout
from layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    MORE_EXPERT_LAYOUTS,
    MORE_LAYOUTS,
    SEQUENCE_LAYOUTS,
    Layout,
)
from safetensors.torch import load_file
from saving import save_adapters
from test_one_step import OPTIMIZERS, TOLERANCES, step_batches, step_samples, update_errors
from test_vision import NUM_LAYERS
from test_vision import samples_of as samples_with_pictures
from torch import Tensor

from megatune.bridge.assemble import assemble
from megatune.bridge.peft_model import apply_adapter
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import step
from megatune.families import load_architecture
from megatune.verify.checkpoints import write_random_adapter
from megatune.verify.measure import measure_loss
from megatune.verify.reference import compute_reference, load_reference_model, write_reference
from megatune.verify.results import WHOLE_GRADIENT, Results, check_errors, compare
from megatune.verify.samples import Sample, random_samples

LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_alpha": 6}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True, "lora_target": ["q_proj", "v_proj", "up_proj"]},
    "DoRA": {"use_dora": True},
    "DoRA of some": {"use_dora": True, "lora_target": ["k_proj", "o_proj", "gate_proj", "down_proj"]},
    "with words": {"additional_target": ["embed_tokens", "norm", "lm_head"], "lora_target": ["o_proj", "down_proj"]},
    "of pictures": {
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "lora_target": ["all", "merger.linear_fc1"],
    },
    "of Pixtral": {
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "lora_target": ["all", "linear_1"],
    },
    "of SigLIP": {"freeze_vision_tower": False, "lora_target": ["all"]},
}

TP2, PP2, SP = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"sequence_parallel": True},
)
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
MODULES = SELECTIVE | {"recompute_modules": ["core_attn", "layernorm", "mlp"]}
OF_EXPERTS = SELECTIVE | {"recompute_modules": ["core_attn", "moe_act", "layernorm"]}
OWN: dict[str, Layout] = {
    "dp2, overlaps": Layout(2, OVERLAPS),
    "tp2 sp, recompute full": Layout(2, TP2 | SP, recompute=FULL),
    "pp2 vpp2, recompute full": Layout(2, PP2 | {"virtual_pipeline_model_parallel_size": 2}, recompute=FULL),
    "recompute selective": Layout(1, recompute=MODULES),
    "ep2, recompute selective": Layout(2, {"expert_model_parallel_size": 2}, recompute=OF_EXPERTS),
    "ep2, overlaps, recompute full": Layout(4, {"expert_model_parallel_size": 2} | OVERLAPS, recompute=FULL),
    "tp2 sp, shared experts overlap": Layout(2, TP2 | SP, experts={"moe_shared_expert_overlap": True}),
}
EVERY = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS, **LAYOUTS, **MORE_LAYOUTS, **SEQUENCE_LAYOUTS, **OWN}

DENSE = (
    "1", "tp2", "tp2 sp", "pp2 vpp2", "dp2, overlaps", "cp2 p2p", "packed", "tp2 pp2 dp2 sp", "tp2 sp, recompute full",
    "recompute selective",
)  # fmt: skip
SPARSE = (
    "1", "tp2 sp", "pp2 vpp2", "ep2", "ep2 etp2 tp2 sp", "ep2, overlaps, recompute full", "ep2, recompute selective",
    "cp2 ep2, packed",
)  # fmt: skip
CASES = [
    *(("qwen2", True, "LoRA", layout) for layout in DENSE),
    *(("llama", False, "LoRA", layout) for layout in ("tp2", "tp2 sp", "pp2 vpp2, recompute full", "cp2 tp2 sp")),
    *(("qwen3", False, kind, layout) for kind in ("DoRA", "rsLoRA") for layout in ("1", "tp2 sp", "pp2 vpp2")),
    *(("qwen3", False, "DoRA of some", layout) for layout in ("tp2", "tp4 sp")),
    *(("qwen3", False, "with words", layout) for layout in ("tp2 sp", "pp2 vpp2")),
    ("qwen3", False, "LoRA", "tp4"),
    ("qwen3", False, "LoRA", "tp2 pp2 dp2 sp, overlaps, fusions"),
    *(("qwen3_moe", False, "LoRA", layout) for layout in (*SPARSE, "tp2 pp2 dp2 sp")),
    *(("deepseek_v3", False, "LoRA", layout) for layout in (*SPARSE, "tp2 sp, shared experts overlap")),
    ("qwen2_moe", False, "LoRA", "ep2 etp2 tp2 sp"),
    ("mixtral", False, "LoRA", "etp2"),
    *(("qwen3_vl", False, "of pictures", layout) for layout in ("1", "tp2 sp", "tp2 pp2 dp2 sp", "cp2 tp2 sp")),
    ("qwen2_5_vl", False, "LoRA", "tp2 sp"),
    *(("mistral3", False, "of Pixtral", layout) for layout in ("1", "tp2 sp", "tp2 pp2 dp2 sp")),
    ("gemma3", False, "of SigLIP", "tp2 sp"),
    ("internvl", False, "of Pixtral", "tp2 sp"),
    *(("qwen3_next", False, "LoRA", layout) for layout in ("1", "ep2 etp2 tp2 sp", "cp2 ep2, packed")),
    *(("qwen3_5", False, kind, "tp2 sp, recompute full") for kind in ("LoRA", "DoRA")),
    *(
        (family, False, "LoRA", "tp2 sp")
        for family in (
            "mistral",
            "ministral3",
            "seed_oss",
            "granite",
            "smollm3",
            "phi3",
            "gemma3_text",
            "olmo3",
            "glm4",
            "olmo2",
            "ernie4_5",
            "exaone4",
        )
    ),
    *((family, False, "LoRA", "ep2 etp2 tp2 sp") for family in ("deepseek_v2", "glm4_moe", "glm4_moe_lite")),
    *(
        (family, False, "LoRA", "ep2 etp2 tp2 sp")
        for family in ("hy_v3", "ernie4_5_moe", "minimax_m2", "olmoe", "dots1")
    ),
    *(("gpt_oss", False, "LoRA", layout) for layout in ("1", "ep2 etp2 tp2 sp", "ep2, recompute selective")),
    ("kimi_k2", False, "LoRA", "ep2 etp2 tp2 sp"),
    *(("gemma4_text", False, kind, "tp2 sp") for kind in ("LoRA", "DoRA")),
    ("gemma4", False, "LoRA", "tp2 sp"),
    ("gemma4_text_moe", False, "LoRA", "ep2 etp2 tp2 sp"),
]


def finetuning(kind: str, adapter: Path) -> FinetuningSettings:
    return FinetuningSettings(**LORA, **KINDS[kind], adapter_name_or_path=[str(adapter)])


def samples_of(model: Path, lengths: Sequence[int] = LENGTHS[2:]) -> list[Sample]:
    if load_architecture(model).vision is not None:
        return samples_with_pictures(model, "mixed")
    return random_samples(301, lengths)


@pytest.fixture(scope="module")
def adapted(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path, Results]]:
    """A checkpoint, an adapter of it, and what peft computes of both; made once."""
    made: dict[tuple[str, bool, str], tuple[Path, Path, Results]] = {}

    def make(family: str, tied: bool, kind: str) -> tuple[Path, Path, Results]:
        if (key := (family, tied, kind)) not in made:
            sizes = {"num_hidden_layers": NUM_LAYERS} if family.endswith(("vl", "mistral3", "gemma3")) else {}
            model, folder = model_dir(family, tied=tied, **sizes), tmp_path_factory.mktemp("adapter")
            write_random_adapter(folder, model, load_architecture(model), finetuning(kind, folder), seed=8)
            write_reference(model, samples_of(model), folder / "numbers", adapters=[str(folder)])
            made[key] = model, folder, Results(folder / "numbers")
        return made[key]

    return make


# Linear layers of these are those of llama, or of deepseek_v3, by the same names.
_AS_OTHERS = (
    "mistral",
    "ministral3",
    "seed_oss",
    "granite",
    "smollm3",
    "olmo3",
    "glm4",  # gates and ups are one tensor, as phi3's are
    "olmo2",
    "ernie4_5",
    "exaone4",
    "olmoe",
    "dots1",
    "deepseek_v2",
    "glm4_moe_lite",
    "kimi_k2",
)


# Others that another test or case here has: names of experts qwen3_moe, mixtral and, beside shared ones, deepseek_v3;
# decoders with windows gemma3 and gemma4_text_moe; an encoder with biases qwen3_vl; the largest layout the steps below.
_HELD = (
    "glm4_moe", "hy_v3", "ernie4_5_moe", "minimax_m2", "qwen2_moe", "gemma3_text", "gemma4_text", "gemma4", "internvl",
    "qwen2_5_vl", "tp2 pp2 dp2 sp, overlaps, fusions",
)  # fmt: skip


@pytest.mark.extended("packed", "recompute selective", "rsLoRA", *_AS_OTHERS, *_HELD)
@pytest.mark.covering
@pytest.mark.parametrize(("family", "tied", "kind", "layout"), CASES)
def test_adapters_agree(
    pool: Any, adapted: Any, table: Any, tmp_path: Path, family: str, tied: bool, kind: str, layout: str
) -> None:
    model, folder, truth = adapted(family, tied, kind)
    chosen, selection = EVERY[layout], finetuning(kind, folder)
    settings = chosen.settings().model_copy(update={"finetuning": selection})
    pool.run(chosen.world_size, measure_in_layout, model, settings, samples_of(model), tmp_path)
    found = check_errors(compare(Results(tmp_path), truth))
    # Every tensor that is trained has a gradient, and on both sides the same ones do.
    names = {one.name for one in found}
    assert sum(".lora_A." in name for name in names) == sum(".lora_B." in name for name in names) > 0
    assert not failures(found)
    table.add(f"{family}, {kind}", layout, found)


def test_one_a_for_a_fused_layer_is_seen(pool: Any, adapted: Any, tmp_path: Path) -> None:
    """One A for q, k and v, as other systems train it, has another gradient than three."""
    model, folder, truth = adapted("qwen2", True, "LoRA")
    settings = LAYOUTS["1"].settings().model_copy(update={"finetuning": finetuning("LoRA", folder)})
    pool.run(1, measure_with_one_a, model, settings, samples_of(model), tmp_path)
    found = check_errors(compare(Results(tmp_path), truth))
    wrong = [one.name for one in found if not one.passes]
    assert any("q_proj.lora_A" in name for name in wrong)
    assert WHOLE_GRADIENT in wrong


def measure_with_one_a(model: Path, settings: Settings, samples: list[Sample], folder: Path) -> None:
    """The gradient that each of the A of a fused layer would have if they were one."""
    from megatune.engine.layers.adapter import Adapter

    own = Adapter.a

    def shared(self: Adapter, dtype: torch.dtype) -> Tensor:
        found = own(self, dtype)
        if self.rows is None:
            return found
        parts = found.chunk(self.rows.shape[-1])
        mean = torch.stack(parts).mean(0)
        return torch.cat([part.detach() + mean - mean.detach() for part in parts])

    Adapter.a = shared  # type: ignore[method-assign]
    try:
        measure_in_layout(model, settings, samples, folder)
    finally:
        Adapter.a = own  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------------
# Steps of an optimizer

ADAM = "adam, larger epsilon"
NUM_STEPS = 3


@pytest.fixture(scope="module")
def peft_steps(adapted: Any) -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """An adapter before and after steps by peft, Transformers and torch's AdamW."""
    made: dict[Any, Any] = {}

    def make(family: str, tied: bool, kind: str, ratio: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if (key := (family, tied, kind, ratio)) not in made:
            made[key] = _peft_steps(*adapted(family, tied, kind)[:2], OPTIMIZERS[ADAM], ratio)
        return made[key]

    return make


def _peft_steps(
    model_dir: Path, folder: Path, settings: dict[str, Any], ratio: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    architecture = load_architecture(model_dir)
    adapter = apply_adapter(load_reference_model(model_dir, torch.float32), folder, trained=True)
    model = adapter.model.eval()
    before = _adapter_copy(adapter)
    groups = [
        {
            "params": [parameter],
            "weight_decay": settings["weight_decay"] if parameter.dim() > 1 else 0.0,
            # LoRA+ (arXiv:2402.12354): B, and what has one dimension, learns faster than A.
            "lr": settings["learning_rate"] * (ratio if "lora_B" in name or parameter.dim() == 1 else 1),
        }
        for name, parameter in adapter.peft.named_parameters()
        if parameter.requires_grad
    ]
    betas = settings["adam_beta1"], settings["adam_beta2"]
    optimizer = torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["adam_epsilon"])
    parameters = [parameter for group in groups for parameter in group["params"]]
    # peft stacks gate and up of all experts in one pair, whose B would also learn to take the ranks of one for the rows
    # of the other.
    masks = {parameter: torch.zeros_like(parameter) for parameter, _ in adapter.places.values()}
    for parameter, slices in adapter.places.values():
        masks[parameter][slices].fill_(1)
    for index in range(NUM_STEPS):
        compute_reference(model, step_samples(index, architecture), adapter=adapter)
        for parameter, own in masks.items():
            assert parameter.grad is not None
            parameter.grad *= own
        torch.nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return before, _adapter_copy(adapter)


def _adapter_copy(adapter: Any) -> dict[str, Tensor]:
    return {name: parameter.detach()[slices].clone() for name, (parameter, slices) in adapter.places.items()}


def engine_steps(model_dir: Path, settings: Settings, folder: Path) -> None:
    """On every rank."""
    assembly = assemble(model_dir, settings)
    for index in range(NUM_STEPS):
        measure_loss(assembly, step_batches(index, assembly, settings))
        updated, _ = step(assembly.optimizer, settings.optimizer.learning_rate)
        assert updated
    gather_parameters(assembly.model)
    architecture, coords = assembly.architecture, assembly.coords
    save_adapters(folder, assembly.parameters, architecture, coords, settings.finetuning)


@pytest.mark.extended("ep4 dp4", "1", "kimi_k2", "gpt_oss")  # deepseek_v3 and qwen3_moe have the same kinds of adapters
@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "tied", "kind", "layout", "ratio"),
    [
        ("qwen2", True, "LoRA", "1", 1.0),
        ("qwen2", True, "LoRA", "tp2 sp", 1.0),
        ("qwen3", False, "LoRA", "tp2 pp2 dp2 sp, overlaps, fusions", 1.0),
        ("qwen3", False, "DoRA", "tp2 sp", 16.0),
        ("qwen3", False, "DoRA", "dp2, no distributed optimizer, grad overlap", 16.0),
        ("qwen3_moe", False, "LoRA", "ep2 etp2 tp2 sp", 1.0),
        ("qwen3_moe", False, "LoRA", "ep4 dp4", 16.0),
        ("deepseek_v3", False, "LoRA", "ep2 pp2", 1.0),
        ("gpt_oss", False, "LoRA", "ep2 etp2 tp2 sp", 1.0),
        ("kimi_k2", False, "LoRA", "ep2 etp2 tp2 sp", 1.0),
    ],
)
def test_three_steps_equal_pefts(
    pool: Any, adapted: Any, peft_steps: Any, tmp_path: Path, family: str, tied: bool, kind: str, layout: str,
    ratio: float,
) -> None:  # fmt: skip
    model, folder, _ = adapted(family, tied, kind)
    selection = finetuning(kind, folder).model_copy(update={"loraplus_lr_ratio": None if ratio == 1 else ratio})
    chosen = EVERY[layout]
    settings = chosen.settings(optimizer=OPTIMIZERS[ADAM]).model_copy(update={"finetuning": selection})
    pool.run(chosen.world_size, engine_steps, model, settings, tmp_path)
    found = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    errors = update_errors(*peft_steps(family, tied, kind, ratio), found)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= TOLERANCES[ADAM]}


# Every other layer of qwen3_moe is dense.
@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.extended), "qwen3_moe"])
def test_bf16_beside_pefts(pool: Any, adapted: Any, table: Any, tmp_path: Path, family: str) -> None:
    """As the proof of text models, tests/parity/test_parity.py. Adapters are fp32 on both sides; peft computes with
    them in fp32, too, this engine in bf16, as peft does where torch's autocast is on."""
    model, folder, _ = adapted(family, False, "LoRA")
    samples, layout = samples_of(model, MORE_LENGTHS), LAYOUTS["tp2 sp"]
    settings = layout.settings(precision={"bf16": True}).model_copy(update={"finetuning": finetuning("LoRA", folder)})
    pool.run(2, measure_in_layout, model, settings, samples, tmp_path)
    numbers = {}
    for dtype in ("float32", "bfloat16"):
        dtypes = {"weights_dtype": torch.bfloat16, "dtype": getattr(torch, dtype)}
        write_reference(model, samples, tmp_path / dtype, **dtypes, adapters=[str(folder)])
        numbers[dtype] = Results(tmp_path / dtype)
    truth = numbers["float32"]
    errors = (compare(each, truth, experts_together=True) for each in (Results(tmp_path), numbers["bfloat16"]))
    found = check_errors(*errors)
    assert not failures(found)
    table.add_sixteen_bits(f"{family}, LoRA", "tp2 sp", found)
