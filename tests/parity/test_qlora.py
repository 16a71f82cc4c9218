"""A base in few bits under adapters: in every layout the logits and gradients of peft around the same values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from computing import LENGTHS, failures, measure_in_layout
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, MORE_LAYOUTS, Layout
from pool import RankPool
from safetensors.torch import load_file, save_file

from megatune.bridge.assemble import load_model
from megatune.bridge.export import export_weights
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.engine.layers.quantized import QuantizedMatrix
from megatune.engine.quantization import dynamic_table, quantize, table_of
from megatune.families.quantized import QuantizedForm, is_quantized, quantized_buffers
from megatune.plan.memory.quantized import saved_bytes
from megatune.plan.memory.tensors import stage_chunks
from megatune.verify.compare import compare, judge
from megatune.verify.numbers import Numbers, write_gradients, write_logits, write_loss
from megatune.verify.reference import load_reference_model
from megatune.verify.samples import Sample, random_samples

peft = pytest.importorskip("peft")

ALL = {**LAYOUTS, **MORE_LAYOUTS, **EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS}
_NEVER = re.compile(r".*(embed_tokens|lm_head|norm|mlp\.gate|shared_expert_gate)\.weight")
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
        if tensor.dim() == 2 and not _NEVER.fullmatch(name):
            tensors[name] = dequantized(tensor, form)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


def with_adapters(layout: Layout, **finetuning: Any) -> Settings:
    return layout.settings().model_copy(update={"finetuning": FinetuningSettings(finetuning_type="lora", **finetuning)})


def samples() -> list[Sample]:
    return random_samples(301, LENGTHS, seed=1)


def peft_numbers(base: Path, adapter: Path, folder: Path, targets: list[str], *, use_dora: bool = False) -> Numbers:
    """Compute a new random adapter beside the base, and save it."""
    model = load_reference_model(base, torch.float32)
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
    return Numbers(folder)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "names"),
    [
        ("qwen3", EVERY, ("1", "tp2", "tp2 sp", "pp2", "tp4")),
        # Frozen experts in few bits, between adapters of attention.
        ("qwen3_moe", ATTENTION, ("1", "tp2 sp", "ep2", "pp2", "ep2 etp1 tp2 sp")),
        ("qwen2_moe", ATTENTION, ("tp2 sp",)),
        ("deepseek_v3", ["q_b_proj", "kv_b_proj", "o_proj"], ("1", "tp2 sp")),
    ],
)
def test_logits_and_gradients_are_those_of_peft_around_the_same_values(
    family, targets, names, pool: RankPool, model_dir, tmp_path
):
    model = model_dir(family)
    written, form = FORMS["nf4"]
    base = dequantize_checkpoint(model, tmp_path / "base", form)
    truth = peft_numbers(base, tmp_path / "adapter", tmp_path / "truth", targets)
    own = {"lora_rank": 4, "lora_alpha": 6, "lora_target": targets, "adapter_name_or_path": [str(tmp_path / "adapter")]}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        settings = with_adapters(ALL[name], **own, **written)
        pool.run(ALL[name].world_size, measure_in_layout, model, settings, samples(), folder)
        assert not failures(judge(compare(Numbers(folder), truth))), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "name"), [("qwen3", "tp2 sp"), ("qwen3_moe", "ep2"), ("qwen3_moe", "tp2 sp")])
def test_computing_is_bit_for_bit_that_with_the_same_values_in_full(family, name, form, pool, model_dir, tmp_path):
    model = model_dir(family)
    written, as_form = FORMS[form]
    base = dequantize_checkpoint(model, tmp_path / "base", as_form)
    found = []
    for folder, checkpoint, keys in (("few", model, written), ("full", base, {})):
        (tmp_path / folder).mkdir()
        settings = with_adapters(ALL[name], lora_rank=4, **keys)
        pool.run(ALL[name].world_size, measure_in_layout, checkpoint, settings, samples(), tmp_path / folder)
        found.append(Numbers(tmp_path / folder))
    few, full = found
    assert few.loss == full.loss
    assert all(torch.equal(few.logits(index), full.logits(index)) for index in range(full.num_samples))
    assert few.names == full.names
    assert all(torch.equal(few.gradient(each), full.gradient(each)) for each in full.names)


def test_lengths_of_dora_are_of_the_quantized_rows(pool, model_dir, tmp_path):
    model, (written, form) = model_dir("qwen3"), FORMS["nf4"]
    base = dequantize_checkpoint(model, tmp_path / "base", form)
    truth = peft_numbers(base, tmp_path / "adapter", tmp_path / "truth", EVERY, use_dora=True)
    own = {"lora_rank": 4, "lora_alpha": 6, "use_dora": True, "adapter_name_or_path": [str(tmp_path / "adapter")]}
    for name in ("1", "tp2 sp"):
        (tmp_path / name).mkdir()
        settings = with_adapters(ALL[name], **own, **written)
        pool.run(ALL[name].world_size, measure_in_layout, model, settings, samples(), tmp_path / name)
        assert not failures(judge(compare(Numbers(tmp_path / name), truth))), name
    # A new one begins as the quantized model itself.
    for name, checkpoint, keys in (("few", model, {"use_dora": True, **written}), ("full", base, {})):
        (tmp_path / name).mkdir()
        pool.run(1, measure_in_layout, checkpoint, with_adapters(ALL["1"], **keys), samples(), tmp_path / name)
    few, full = Numbers(tmp_path / "few"), Numbers(tmp_path / "full")
    assert few.loss == pytest.approx(full.loss, rel=1e-6)


def held_in_layout(model: Path, settings: Settings) -> tuple[dict[str, torch.Tensor], int, int, int]:
    """Return all values; bytes of this rank's quantized matrices; in full; and what a plan says that they save."""
    place = groups.build(settings.parallel, seed=1, timeout=settings.run.ddp_timeout)
    loaded = load_model(model, settings, place)
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
    chunks = stage_chunks(settings.parallel, loaded.architecture, settings.finetuning)[place.pp_rank]
    saved = saved_bytes(loaded.architecture, settings.finetuning, settings.parallel, chunks, 4)
    return dict(export_weights(loaded)), held, full, saved


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3", ("1", "tp2", "tp4", "tp2 sp", "pp2", "tp2 pp2 dp2 sp")),
        ("qwen3_moe", ("1", "tp2 sp", "ep2", "etp2", "ep2 etp2 tp2 sp", "pp2")),
    ],
)
def test_every_layout_has_the_same_values_in_fewer_bytes(family, names, pool, model_dir, tmp_path):
    model, (written, form) = model_dir(family), FORMS["nf4"]
    expected = load_file(dequantize_checkpoint(model, tmp_path / "base", form) / "model.safetensors")
    for name in names:
        answers = pool.run(ALL[name].world_size, held_in_layout, model, with_adapters(ALL[name], **written))
        for values, held, full, saved in answers:
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[each], expected[each]) for each in expected), name
            assert full - held == saved
            # Matrices this small have many rows of few blocks.
            assert held < 0.2 * full
