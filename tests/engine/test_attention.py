"""Attention in one process, against its definition: rows of one document, packed rows, every kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import reference_attention
from torch import Tensor

from megatune.config.groups.performance import PerformanceSettings
from megatune.config.settings import DataSettings, ParallelSettings, PrecisionSettings, Settings
from megatune.engine import device
from megatune.engine.layers.attention.choice import describe, require
from megatune.engine.layers.attention.core import CoreAttention
from megatune.engine.layers.attention.kernels import FlashOnGPU, Kernel, MathKernel, pick
from megatune.engine.layers.attention.spans import Spans
from megatune.errors import ExitCode, MegatuneError

pytestmark = pytest.mark.usefixtures("computing_device")

# Of a multiple: the runs of all three kinds of spans, uneven ones.
SPANS = {
    "documents": Spans((0, 3, 4, 9), (0, 3, 4, 9), causal=True),
    "prefixes": Spans((0, 2, 5, 9), (0, 7, 10, 20), causal=True),
    "windows": Spans((0, 3, 4, 9), (0, 3, 4, 9), causal=True, window=2),
    "prefixes in a window": Spans((0, 2, 5, 9), (0, 7, 10, 20), causal=True, window=3),
    "everything": Spans((0, 2, 5, 9), (0, 1, 9, 12), causal=False),
}


def attention(
    backend: str = "auto", scale: float | None = None, window: int | None = None, sinks: Tensor | None = None
) -> CoreAttention:
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType

    config = SimpleNamespace(
        context_parallel_size=1,
        attention_backend=AttnBackend[backend],
        windows=[window],
        softmax_type="vanilla",
        bidirectional_images=False,
    )
    module = CoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=scale)
    module.softmax_offset = None if sinks is None else torch.nn.Parameter(sinks)
    return module


def attend(module: CoreAttention, *tensors: Tensor, boundaries: tuple[int, ...] | None = None) -> Tensor:
    return module(*tensors, packed_seq_params=SimpleNamespace(boundaries=boundaries or (0, len(tensors[0]))))


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator(device.current()).manual_seed(seed)
    return torch.randn(*sizes, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    channels=st.sampled_from([(8, 8), (12, 8), (6, 10)]),
    scale=st.sampled_from([None, 0.7]),
    window=st.sampled_from([None, 1, 3, 20]),
    has_sinks=st.booleans(),
    backend=st.sampled_from(["auto", "flash", "unfused", "local"]),
)
def test_attention_is_its_definition(lengths, rows, groups, repeats, channels, scale, window, has_sinks, backend):
    """Causal, grouped, inside documents, within a window, with sinks, with values narrower and wider than keys."""
    boundaries = tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
    s, (d, e) = boundaries[-1], channels
    inputs = [
        random(s, rows, groups * repeats, d, seed=1),
        random(s, rows, groups, d, seed=2),
        random(s, rows, groups, e, seed=3),
    ]
    module = attention(backend, scale, window, random(groups * repeats, seed=5) if has_sinks else None)
    sinks = module.softmax_offset
    ours = attend(module, *inputs, boundaries=boundaries)
    expected = reference_attention(*inputs, boundaries, scale, window, sinks)
    torch.testing.assert_close(ours, expected)
    inputs += [sinks] if has_sinks else []
    weights = random(*ours.shape, seed=4).detach()
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(expected, inputs, weights)
    )


def test_a_window_is_small_against_a_long_document():
    """Whole blocks of the kernel's keys are unseen."""
    inputs = [random(1300, 1, 2, 8, seed=seed) for seed in (1, 2, 3)]
    ours, expected = attend(attention(window=40), *inputs), reference_attention(*inputs, window=40)
    torch.testing.assert_close(ours, expected)
    found, gradients = (torch.autograd.grad(each.square().sum(), inputs) for each in (ours, expected))
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("boundaries", [(0, 6), (0, 2, 6)])
def test_no_token_sees_a_later_one(boundaries):
    query, key, value = torch.randn(3, 6, 1, 2, 8).unbind()
    before = attend(attention(), query, key, value, boundaries=boundaries)
    key[4:], value[4:] = 0, 0
    assert torch.equal(attend(attention(), query, key, value, boundaries=boundaries)[:4], before[:4])


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_a_document_does_not_see_its_neighbours(backend):
    """Whatever stands before it and after it: bit-equal outputs and gradients."""
    before, after = (
        torch.randn(3, 12, 1, 2, 8, generator=torch.Generator(device.current()).manual_seed(seed)) for seed in (0, 1)
    )
    after[:, 3:8] = before[:, 3:8]
    found = []
    for inputs in (before, after):
        inputs.requires_grad_()
        output = attend(attention(backend), *inputs.unbind(), boundaries=(0, 3, 8, 12))[3:8]
        (gradient,) = torch.autograd.grad(output.square().sum(), inputs)
        assert not gradient[:, :3].any()
        assert not gradient[:, 8:].any()
        found.append((output, gradient[:, 3:8]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_sixteen_bits_round_like_sixteen_bits():
    inputs = [random(64, 1, heads, 32, seed=heads, dtype=torch.bfloat16) for heads in (4, 2, 3)]
    inputs[2] = random(64, 1, 2, 32, seed=5, dtype=torch.bfloat16)
    expected = reference_attention(*(tensor.double() for tensor in inputs), (0, 20, 64))
    for backend in ("auto", "unfused"):
        ours = attend(attention(backend), *inputs, boundaries=(0, 20, 64))
        assert ours.dtype == torch.bfloat16
        # One rounding of the weights and one of the output, of 8 bits each.
        assert (ours - expected).norm() < 2**-8 * expected.norm()


@pytest.mark.parametrize("channels", [(32, 32), (24, 16), (20, 28)], ids=str)
@pytest.mark.parametrize("spans", SPANS)
def test_flash_kernel_equals_plain_products(spans, channels):
    """This device's flash kernel, with its log-sum-exp, in a dtype that it takes."""
    from megatron.core.transformer.enums import AttnBackend

    dtype, tolerance = (torch.bfloat16, 2**-7) if device.HAS_GPU else (torch.float64, 1e-12)
    where, (d, e) = SPANS[spans], channels
    t, u = where.queries[-1], where.keys[-1]
    tensors = [random(t, 4, d, seed=1, dtype=dtype), random(u, 2, d, seed=2, dtype=dtype),
               random(u, 2, e, seed=3, dtype=dtype)]  # fmt: skip
    tensors = [each.detach() for each in tensors]
    kernel, plain = pick(tensors[0], tensors[2], AttnBackend.auto), MathKernel()
    assert not isinstance(kernel, MathKernel)
    grad_output = random(t, 4, e, seed=4, dtype=dtype)
    found, expected = (both(one, *tensors, grad_output, where) for one in (kernel, plain))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


def both(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, spans: Spans) -> list[Tensor]:
    """Output, log-sum-exp and gradients."""
    output, lse = kernel.forward(query, key, value, spans, 0.3)
    return [output, lse, *kernel.backward(grad_output, (query, key, value, output, lse), spans, 0.3)]


@pytest.mark.skipif(device.HAS_GPU, reason="the bounds of spans would be on it")
@pytest.mark.parametrize("spans", SPANS)
def test_gpu_kernel_is_called_as_torch_declares_it(spans):
    """No GPU is needed to see that arguments and shapes are right: meta tensors go through torch's own checks."""
    where = SPANS[spans]
    sizes = (where.queries[-1], 4, 24), (where.keys[-1], 2, 24), (where.keys[-1], 2, 16), (where.queries[-1], 4, 16)
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    output, lse, *gradients = both(FlashOnGPU(), *tensors, where)
    assert output.shape == tensors[3].shape
    assert lse.shape == (4, where.queries[-1])
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors[:3]]


HEADS = SimpleNamespace(kv_channels=64)
ARCHITECTURE = SimpleNamespace(kv_channels=64, of_heads=lambda _: HEADS, mla=None, merges_attention=False)


def choice(backend: str, cp: str | None = None, packing: bool = False, bf16: bool = device.HAS_GPU) -> Settings:
    return Settings(
        performance=PerformanceSettings(attention_backend=backend),
        parallel=ParallelSettings(context_parallel_size=2 if cp else 1, cp_comm_type=cp or "p2p"),
        data=DataSettings(packing=packing),
        precision=PrecisionSettings(bf16=bf16),
    )


@pytest.mark.skipif(device.HAS_GPU, reason="what a CPU has")
def test_cudnn_is_refused_without_a_gpu():
    for backend in ("auto", "flash", "unfused", "local"):
        require(choice(backend), ARCHITECTURE)
    with pytest.raises(MegatuneError) as refusal:
        require(choice("fused"), ARCHITECTURE)
    assert refusal.value.exit_code == ExitCode.SETTINGS
    assert str(refusal.value) == (
        "attention_backend fused is not available here\n"
        "    why: fused attention is cuDNN's, and there is no GPU\n"
        "    fix: write attention_backend: auto, which takes the fastest available kernel"
    )


def test_cudnn_is_refused_with_sinks():
    with pytest.raises(MegatuneError, match="attention sinks need the kernel's log-sum-exp"):
        require(
            choice("fused"), SimpleNamespace(**vars(ARCHITECTURE) | {"merges_attention": True, "attention_sinks": True})
        )


@pytest.mark.skipif(not device.HAS_GPU, reason="what a GPU refuses")
@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_single_precision_is_refused_on_a_gpu(backend):
    require(choice(backend), ARCHITECTURE)
    with pytest.raises(MegatuneError, match="computes in bf16 or fp16, but the run uses float32"):
        require(choice(backend, bf16=False), ARCHITECTURE)


@pytest.mark.skipif(device.HAS_GPU, reason="what a CPU has")
def test_the_banner_says_which_kernel():
    assert describe(choice("auto"), ARCHITECTURE) == "torch's flash kernel for CPUs"
    assert describe(choice("flash", packing=True), ARCHITECTURE) == (
        "torch's flash kernel for CPUs, sequence by sequence"
    )
    assert describe(choice("local", cp="all_gather"), ARCHITECTURE) == (
        "plain matrix products, as attention_backend requires; keys and values gathered from context-parallel ranks"
    )
