"""Matrices in few bits: bitsandbytes' own numbers, whole and cut, and products with them."""

from __future__ import annotations

from math import prod

import bitsandbytes.functional as bnb
import pytest
import torch
from layouts import Layout
from live_bytes import LiveBytes
from model_sizes import tiny_config
from torch import Tensor

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.engine import groups
from megatune.engine.layers import quantized
from megatune.engine.layers.quantized import QuantizedMatrix, QuantizedTensor, dynamic_table, quantize
from megatune.engine.model import build_model
from megatune.families import FAMILIES, read_architecture
from megatune.families.quantized import QuantizedForm, is_quantized
from megatune.families.weights import WHOLE, engine_shape, layers_of

FORMS = [QuantizedForm("int8"), *(QuantizedForm(kind, double) for kind in ("nf4", "fp4") for double in (False, True))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows of whole blocks of 64, rows that begin inside of blocks, and fewer elements than a block; the last scales and the
# last elements do not fill a block.
SHAPES = [(96, 64), (301, 320), (64, 96), (301, 200), (7, 24), (3, 5)]


def by_torch(name: str, *args: object) -> tuple[Tensor, Tensor]:
    """Call bitsandbytes' kernel in torch: as on a GPU, it takes the nearest value, where that of its CPU library looks
    8-bit ones up in a coarse table."""
    operator = getattr(torch.ops.bitsandbytes, name).default
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)


def matrix(shape: tuple[int, int], dtype: torch.dtype, case: str) -> Tensor:
    torch.manual_seed(0)
    if case == "ties":  # many elements in the middle between two values
        return (torch.randint(-8, 9, shape) / 8).to(dtype)
    drawn = torch.randn(shape) * 0.1
    if case == "zeros":
        drawn.view(-1)[: min(64, drawn.numel())] = 0
        drawn[0] = 0
    return drawn.to(dtype)


def expected(values: Tensor, form: QuantizedForm) -> tuple[QuantizedTensor, Tensor]:
    """Return codes and values by bitsandbytes."""
    if form.bits == 8:
        codes, scales, _ = bnb.int8_vectorwise_quant(values.half())
        return QuantizedTensor(codes, scales), bnb.int8_vectorwise_dequant(codes, scales).to(values.dtype)
    packed, scales = by_torch("quantize_4bit", values, 64, form.kind, torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), -1).view(-1)[: values.numel()].view(values.shape)
    found = QuantizedTensor(codes, scales)
    if form.double:
        mean = scales.mean()
        scale_codes, largest = by_torch("quantize_blockwise", scales - mean, bnb.create_dynamic_map(), 256)
        found = QuantizedTensor(codes, scale_codes, torch.stack((largest, mean.expand_as(largest)), 1))
        scales = by_torch("dequantize_blockwise", scale_codes, largest, bnb.create_dynamic_map(), 256, torch.float32)
        scales = scales + mean
    # Not by dequantize_4bit, whose CPU library takes every row to begin with a block.
    table = bnb.get_4bit_type(form.kind, "cpu")
    flat = table[codes.int()].view(-1) * scales.repeat_interleave(64)[: values.numel()]
    return found, flat.to(values.dtype).view(values.shape)


def stored(whole: QuantizedTensor, form: QuantizedForm, dtype: torch.dtype, rows: slice, columns: slice) -> Tensor:
    """Keep a slice, and return its values."""
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    kept = QuantizedMatrix(shape, dtype, form)
    first = 3  # of the statistics, behind those of another matrix
    kept.allocate(whole.codes.shape[1], first + (0 if whole.statistics is None else len(whole.statistics)))
    kept.store(0, whole, (rows, columns), first)
    buffers = dict(kept.named_buffers())
    assert not list(kept.parameters())
    assert {name: (str(one.dtype), tuple(one.shape)) for name, one in buffers.items()} == {
        name: (f"torch.{kind}", shape)
        for name, (kind, shape) in form.buffers(
            *(shape[0], whole.codes.shape[1], shape[1]),
            0 if whole.statistics is None else first + len(whole.statistics),
        ).items()
    }
    return kept.dequantized()


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.covering
@pytest.mark.parametrize("case", ["normal", "zeros", "ties"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_codes_scales_and_statistics_are_those_of_bitsandbytes(form, dtype, case, monkeypatch):
    monkeypatch.setattr(quantized, "CHUNK", 1 << 10)  # several parts, too
    for shape in SHAPES:
        values = matrix(shape, dtype, case)
        found, (codes, _) = quantize(values, form), expected(values, form)
        assert all(one is other or same(one, other) for one, other in zip(found, codes, strict=True)), shape


def test_the_table_of_scales_is_that_of_bitsandbytes():
    assert same(dynamic_table(torch.device("cpu")), bnb.create_dynamic_map())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_that_its_cpu_library_makes(kind, dtype):
    values, form = matrix((96, 192), dtype, "normal"), QuantizedForm(kind)
    found = stored(quantize(values, form), form, dtype, slice(0, 96), slice(0, 192))
    assert same(found, bnb.dequantize_4bit(*bnb.quantize_4bit(values, quant_type=kind)))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_slices_have_the_values_of_the_whole(form, dtype):
    for shape in SHAPES:
        values = matrix(shape, dtype, "normal")
        whole, (_, all_values) = quantize(values, form), expected(values, form)
        rows, columns = shape
        cuts = [
            (slice(0, rows), slice(0, columns)),
            (slice(rows // 3, rows), slice(0, columns)),
            (slice(0, rows), slice(columns // 2, columns)),
            (slice(1, rows - 1), slice(columns // 3, 2 * columns // 3)),
        ]
        for cut in cuts:
            assert same(stored(whole, form, dtype, *cut), all_values[cut]), (shape, cut)


@pytest.mark.parametrize("form", FORMS)
def test_products_and_gradients_are_exactly_those_of_the_values(form):
    kept = QuantizedMatrix((40, 96), torch.float32, form)
    whole = quantize(matrix((40, 96), torch.float32, "normal"), form)
    kept.allocate(96, 0 if whole.statistics is None else len(whole.statistics))
    kept.store(0, whole, (slice(0, 40), slice(0, 96)), 0)
    x = torch.randn(5, 3, 96, requires_grad=True)
    weight = kept.data
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        output = kept.multiply(x)
    assert not saved  # neither the matrix nor x
    grad = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, x, grad)
    reference = torch.matmul(x, weight.t())
    assert same(output, reference)
    assert same(found, torch.autograd.grad(reference, x, grad)[0])


def test_it_takes_as_few_bytes_as_it_says():
    form = QuantizedForm("nf4", double=True)
    values = matrix((512, 1024), torch.bfloat16, "normal")
    kept = QuantizedMatrix((512, 1024), torch.bfloat16, form)
    kept.allocate(1024, form.num_statistics((512, 1024)))
    kept.store(0, quantize(values, form), (slice(0, 512), slice(0, 1024)), 0)
    size = sum(one.nbytes for one in kept.buffers())
    # Codes, a byte for 64 elements, 4 for each row, 8 for 64 · 256 elements.
    assert size == values.numel() // 2 + values.numel() // 64 + 4 * 512 + 8 * values.numel() // (64 * 256)


def peak_of_building(family_config: dict[str, object], bits: int | None) -> tuple[int, int]:
    """Return the most bytes while a model is built, and those of the matrices that may have few bits."""
    architecture = read_architecture(family_config, "config.json")
    finetuning = FinetuningSettings(finetuning_type="lora", lora_rank=1, quantization_bit=bits)
    settings = Layout(1).settings().model_copy(update={"finetuning": finetuning})
    groups.build(settings.parallel, seed=0, timeout=30)
    quantized = finetuning.model_copy(update={"quantization_bit": 4})
    matrices = sum(
        4 * prod(engine_shape(weight, architecture, WHOLE)) * len(layers_of(weight, architecture))
        for weight in FAMILIES[architecture.model_type].weight_map(architecture)
        if is_quantized(weight, quantized)
    )
    with LiveBytes() as found:
        build_model(architecture, settings)
    return found.peak, matrices


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_model_is_never_built_in_full(family, pool):
    config = tiny_config(family, num_hidden_layers=8).to_dict()
    ((full, matrices),) = pool.run(1, peak_of_building, config, None)
    ((few, _),) = pool.run(1, peak_of_building, config, 4)
    # A matrix or two at a time.
    assert full - few > 0.75 * matrices
