"""A base in few bits under adapters: in every layout the logits and gradients of peft around the same values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from computing import LENGTHS, failures, measure_in_layout
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, Layout
from pool import RankPool
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import assemble, load_model
from megatune.bridge.export import export_weights
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.engine.layers.quantized import QuantizedMatrix, dynamic_table, quantize, table_of
from megatune.families.quantized import QuantizedForm, is_quantized, quantized_buffers
from megatune.families.weights import Role
from megatune.plan.case import PlannedModel
from megatune.plan.memory.parameters import saved_bytes
from megatune.plan.memory.tensors import held_parameters, stage_chunks
from megatune.training.train_step import train_step
from megatune.verify.measure import shard_samples
from megatune.verify.reference import load_reference_model
from megatune.verify.results import Results, check_errors, compare, write_gradients, write_logits, write_loss
from megatune.verify.samples import Sample, random_samples

OVERLAPPED = Layout(
    2,
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2,
     "expert_tensor_parallel_size": 1},
    experts={"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True},
)  # fmt: skip
ALL = {"shared experts overlap": OVERLAPPED, **LAYOUTS, **MORE_LAYOUTS, **EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}
_NEVER = re.compile(r".*((embed_tokens|lm_head|norm|mlp\.(gate|router)|shared_expert_gate)\.weight|_proj_bias)")
_OF_EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")
FORMS: dict[str, tuple[dict[str, Any], QuantizedForm]] = {
    "nf4": ({"quantization_bit": 4}, QuantizedForm("nf4", double=True)),
    "int8": ({"quantization_bit": 8}, QuantizedForm("int8")),
    "fp4, scales whole": (
        {"quantization_bit": 4, "quantization_type": "fp4", "double_quantization": False},
        QuantizedForm("fp4"),
    ),
}


def dequantized(matrix: torch.Tensor, form: QuantizedForm) -> torch.Tensor:
    """Return the values of a matrix, by the definitions; tests/engine holds the codes against bitsandbytes."""
    whole = quantize(matrix, form)
    if form.bits == 8:
        return whole.codes * whole.scales[:, None] * (1 / 127)
    scales = whole.scales
    if whole.statistics is not None:
        statistics = whole.statistics.repeat_interleave(256, 0)[: len(scales)]
        scales = dynamic_table(scales.device)[scales.int()] * statistics[:, 0] + statistics[:, 1]
    flat = table_of(form.kind, scales.device)[whole.codes.int()].view(-1)
    return (flat * scales.repeat_interleave(64)[: matrix.numel()]).view(matrix.shape)


def dequantize_checkpoint(model: Path, folder: Path, form: QuantizedForm) -> Path:
    """Write the checkpoint whose linear layers have the values of the quantized ones."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if _OF_EXPERTS.fullmatch(name):  # each expert's by itself, as a linear layer has it
            tensors[name] = torch.stack([dequantized(each.T.contiguous(), form).T for each in tensor])
        elif tensor.dim() == 2 and not _NEVER.fullmatch(name):
            tensors[name] = dequantized(tensor, form)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def dequantized_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """dequantized_model(model, "nf4"): written once."""
    made: dict[tuple[Path, str], Path] = {}

    def make(model: Path, form: str) -> Path:
        if (key := (model, form)) not in made:
            made[key] = dequantize_checkpoint(model, tmp_path_factory.mktemp("dequantized") / "model", FORMS[form][1])
        return made[key]

    return make


def with_adapters(layout: Layout, **finetuning: Any) -> Settings:
    return layout.settings().model_copy(update={"finetuning": FinetuningSettings(finetuning_type="lora", **finetuning)})


def samples() -> list[Sample]:
    return random_samples(301, LENGTHS, seed=1)


def peft_numbers(model: Any, adapter: Path, folder: Path, targets: list[str], *, use_dora: bool = False) -> Results:
    """Compute a new random adapter beside a model of Transformers, and save it."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, use_dora=use_dora)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(adapter)
    rows, logits, total = samples(), [], 0.0
    trained = sum(label >= 0 for row in rows for label in row.labels[1:])
    for row in rows:
        out = model(input_ids=torch.tensor([row.input_ids])).logits[0]
        loss = torch.nn.functional.cross_entropy(out[:-1], torch.tensor(row.labels[1:]), reduction="sum") / trained
        loss.backward()
        logits.append(out.detach())
        total += loss.item()
    gradients = {
        re.sub(r"^base_model\.model\.|(?<=vector)\.default\.weight|\.default\b", "", name): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    folder.mkdir()
    write_loss(folder, total)
    write_logits(folder, logits)
    write_gradients(folder, gradients)
    return Results(folder)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


# Of experts frozen in few bits, between adapters of attention.
TARGETS = dict.fromkeys(("qwen3_moe", "qwen2_moe", "gpt_oss"), ATTENTION)
TARGETS |= {"qwen3": EVERY, "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"]}


@pytest.fixture(scope="module")
def by_peft(model_dir, dequantized_model, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """by_peft("qwen3"): a folder with an adapter, and with what peft computes of it around the values of 4 bits."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("peft")
            reference = load_reference_model(dequantized_model(model_dir(family), "nf4"), torch.float32)
            peft_numbers(reference, made[family] / "adapter", made[family] / "truth", TARGETS[family])
        return made[family]

    return make


# Values of these layouts are compared below, for both kinds of models.
@pytest.mark.extended("1", "tp2", "pp2")
@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3", name) for name in ("1", "tp2", "tp2 sp", "pp2", "tp4")),
        *(("qwen3_moe", name) for name in ("1", "tp2 sp", "ep2", "pp2", "ep2 etp1 tp2 sp")),
        ("qwen2_moe", "tp2 sp"),
        *(("deepseek_v3", name) for name in ("1", "tp2 sp")),
        *(("gpt_oss", name) for name in ("1", "tp2 sp", "ep2 etp2 tp2 sp")),
    ],
)
def test_logits_and_gradients_are_those_of_peft_around_the_same_values(
    family, name, pool: RankPool, model_dir, by_peft, tmp_path
):
    adapter = {"lora_target": TARGETS[family], "adapter_name_or_path": [str(by_peft(family) / "adapter")]}
    settings = with_adapters(ALL[name], lora_rank=4, lora_alpha=6, **adapter, **FORMS["nf4"][0])
    pool.run(ALL[name].world_size, measure_in_layout, model_dir(family), settings, samples(), tmp_path)
    assert not failures(check_errors(compare(Results(tmp_path), Results(by_peft(family) / "truth"))))


# Rows of whole blocks: what bitsandbytes' CPU library makes of others is no matrix of its own codes.
WHOLE_BLOCKS = {"head_dim": 32, "intermediate_size": 128}


def test_logits_and_gradients_are_those_of_bitsandbytes_in_transformers(pool, model_dir, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = model_dir("qwen3", **WHOLE_BLOCKS)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )  # scales whole: on a CPU it rounds them otherwise
    quantized = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.float32)
    assert type(quantized.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"
    quantized.train()  # else its CPU library computes in bf16
    truth = peft_numbers(quantized, tmp_path / "adapter", tmp_path / "truth", EVERY)
    adapter = {"lora_rank": 4, "lora_alpha": 6, "adapter_name_or_path": [str(tmp_path / "adapter")]}
    for name in ("1", "tp2 sp"):
        (tmp_path / name).mkdir()
        settings = with_adapters(ALL[name], quantization_bit=4, double_quantization=False, **adapter)
        pool.run(ALL[name].world_size, measure_in_layout, model, settings, samples(), tmp_path / name)
        assert not failures(check_errors(compare(Results(tmp_path / name), truth))), name


@pytest.mark.parametrize("bits", [4, 8])
def test_transformers_loads_the_same_codes(bits, model_dir):
    """Scales of double quantization, too, but for a few that bitsandbytes' CPU library rounds to a neighbour."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = model_dir("qwen3", **WHOLE_BLOCKS)
    keys = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(**(keys if bits == 4 else {"load_in_8bit": True}))
    loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.float32)
    tensors = load_file(model / "model.safetensors")
    names = {name for name, tensor in tensors.items() if tensor.dim() == 2 and not _NEVER.fullmatch(name)}
    scales = same = 0
    for name in names:
        found = quantize(tensors[name], QuantizedForm("nf4", double=True) if bits == 4 else QuantizedForm("int8"))
        kept = loaded.get_parameter(name)
        if bits == 8:
            assert torch.equal(found.codes, kept.CB)
            assert torch.equal(found.scales, kept.SCB)
            continue
        packed = kept.data.view(-1)
        assert torch.equal(found.codes.view(-1), torch.stack((packed >> 4, packed & 15), -1).view(-1))
        scales, same = scales + len(found.scales), same + int((found.scales == kept.quant_state.absmax).sum())
    assert same >= 0.99 * scales
    quantized = {name for name, parameter in loaded.named_parameters() if parameter.dtype in (torch.uint8, torch.int8)}
    assert quantized == names


def train_in_layout(model: Path, settings: Settings) -> None:
    """Take two steps; copies stay equal, the base as it is, and adapters do not."""
    assembly = assemble(model, settings)
    kept = [local for local in assembly.parameters if isinstance(local.parameter, QuantizedMatrix)]
    adapters = [local.parameter for local in assembly.parameters if local.weight.role is Role.ADAPTER]
    base = [one.clone() for local in kept for one in local.parameter.buffers()]
    before = [one.detach().clone() for one in adapters]
    for number in (1, 2):
        batches = shard_samples(samples(), assembly.coords, settings.parallel)
        result = train_step(assembly, batches, learning_rate=1e-2, checked_step=number)
        assert result.updated
    assert all(map(torch.equal, base, (one for local in kept for one in local.parameter.buffers())))
    assert not any(map(torch.equal, before, adapters))


@pytest.mark.extended("tp2 pp2 dp2 sp")  # every other layer of qwen3_moe is dense
@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "tp2 pp2 dp2 sp"), ("qwen3_moe", "ep2 etp1 tp2 sp"), ("qwen3_moe", "ep2 dp4")]
)
def test_steps_leave_the_base_as_it_is(family, name, pool, model_dir):
    settings = with_adapters(ALL[name], quantization_bit=4)
    pool.run(ALL[name].world_size, train_in_layout, model_dir(family), settings)


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "tp2 sp"), ("qwen3_moe", "ep2"), ("qwen3_moe", "tp2 sp"), ("qwen2_moe", "shared experts overlap")],
)
def test_computing_is_bit_for_bit_that_with_the_same_values_in_full(
    family, name, form, pool, model_dir, dequantized_model, tmp_path
):
    model, found = model_dir(family), []
    for folder, checkpoint, keys in (("few", model, FORMS[form][0]), ("full", dequantized_model(model, form), {})):
        (tmp_path / folder).mkdir()
        settings = with_adapters(ALL[name], lora_rank=4, **keys)
        pool.run(ALL[name].world_size, measure_in_layout, checkpoint, settings, samples(), tmp_path / folder)
        found.append(Results(tmp_path / folder))
    few, full = found
    assert few.loss == full.loss
    assert all(torch.equal(few.logits(index), full.logits(index)) for index in range(full.num_samples))
    assert few.names == full.names
    assert all(torch.equal(few.gradient(each), full.gradient(each)) for each in full.names)


def test_lengths_of_dora_are_of_the_quantized_rows(pool, model_dir, dequantized_model, tmp_path):
    model, written = model_dir("qwen3"), FORMS["nf4"][0]
    base = dequantized_model(model, "nf4")
    reference = load_reference_model(base, torch.float32)
    truth = peft_numbers(reference, tmp_path / "adapter", tmp_path / "truth", EVERY, use_dora=True)
    own = {"lora_rank": 4, "lora_alpha": 6, "use_dora": True, "adapter_name_or_path": [str(tmp_path / "adapter")]}
    for name in ("1", "tp2 sp"):
        (tmp_path / name).mkdir()
        settings = with_adapters(ALL[name], **own, **written)
        pool.run(ALL[name].world_size, measure_in_layout, model, settings, samples(), tmp_path / name)
        assert not failures(check_errors(compare(Results(tmp_path / name), truth))), name
    # A new one begins as the quantized model itself.
    for name, checkpoint, keys in (("few", model, {"use_dora": True, **written}), ("full", base, {})):
        (tmp_path / name).mkdir()
        pool.run(1, measure_in_layout, checkpoint, with_adapters(ALL["1"], **keys), samples(), tmp_path / name)
    few, full = Results(tmp_path / "few"), Results(tmp_path / "full")
    assert few.loss == pytest.approx(full.loss, rel=1e-6)


def held_in_layout(model: Path, settings: Settings) -> tuple[dict[str, torch.Tensor], int, int, int]:
    """Return all values; bytes of this rank's quantized matrices; in full; and what a plan says that they save."""
    coords = groups.build(settings.parallel, seed=1, timeout=settings.run.ddp_timeout)
    loaded = load_model(model, settings, coords)
    form = FORMS["nf4"][1]
    held = full = 0
    for local in loaded.parameters:
        assert isinstance(local.parameter, QuantizedMatrix) == is_quantized(local.weight, settings.finetuning)
        if isinstance(local.parameter, QuantizedMatrix):
            kept = quantized_buffers(local.weight, loaded.architecture, form, local.slice)
            assert {each: tuple(one.shape) for each, one in local.parameter.named_buffers()} == {
                each: shape for each, (_, shape) in kept.items()
            }
            held += sum(one.nbytes for one in local.parameter.buffers())
            full += local.parameter.numel() * local.parameter.dtype.itemsize
    parallel, trainable = settings.parallel, settings.finetuning
    sizes = parallel.tensor_model_parallel_size, parallel.expert_tensor_size, parallel.expert_model_parallel_size
    planned = held_parameters(PlannedModel(name="x", architecture=loaded.architecture), trainable, *sizes, False)
    saved = saved_bytes(planned, stage_chunks(parallel, loaded.architecture, trainable)[coords.pp_rank], 4)
    base = [local for local in loaded.parameters if local.weight.role is not Role.ADAPTER]
    return dict(export_weights(replace(loaded, parameters=base))), held, full, saved


@pytest.mark.extended("1", "tp2", "ep2", "etp2", "tp2 pp2 dp2 sp")  # the others cut the same
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3", name) for name in ("1", "tp2", "tp4", "tp2 sp", "pp2", "tp2 pp2 dp2 sp")),
        *(("qwen3_moe", name) for name in ("1", "tp2 sp", "ep2", "etp2", "ep2 etp2 tp2 sp", "pp2")),
    ],
)
def test_every_layout_has_the_same_values_in_fewer_bytes(family, name, pool, model_dir, dequantized_model):
    model = model_dir(family)
    expected = load_file(dequantized_model(model, "nf4") / "model.safetensors")
    settings = with_adapters(ALL[name], **FORMS["nf4"][0])
    for values, held, full, saved in pool.run(ALL[name].world_size, held_in_layout, model, settings):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[each], expected[each]) for each in expected)
        assert full - held == saved
        # Matrices this small have many rows of few blocks.
        assert held < 0.2 * full
