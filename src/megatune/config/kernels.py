"""Choice of the engine's kernels, without torch: the planner counts the memory that they use.

The limits of attention are those of torch.nn.functional.scaled_dot_product_attention and of torch's flash attention
with variable lengths.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Literal

from megatune.architecture import Architecture
from megatune.config.settings import Settings

AttentionKernel = Literal["plain", "varlen", "flash", "cudnn", "efficient", "math"]
Capability = tuple[int, int]
CPU: Capability = (0, 0)
PLAIN_BACKENDS = ("unfused", "local")
# torch's flash attention on GPUs, for varlen, too.
_FLASH_DTYPES, _FLASH_CHANNELS, _FLASH_SINCE = ("float16", "bfloat16"), 256, (8, 0)
# Bytes of fp32 logits that the fused loss has in memory at once. On a GPU few large products are faster, since each
# passes over the gradient of the whole output weight.
LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_ON_CPU = 2**30, 2**28


def te_obstacle(settings: Settings, architecture: Architecture) -> str:
    """Return why the decoder cannot use Transformer Engine's layers; "" if it can."""
    return next(_reasons(settings, architecture), "")


def _reasons(settings: Settings, architecture: Architecture) -> Iterator[str]:
    if architecture.mla is not None:
        yield "latent attention has narrow projections that are replicated on each process"
    if architecture.delta is not None:
        yield "gated delta nets have further weights next to their projections"
    if architecture.global_heads is not None:
        yield "layers without a window have heads of another size, and all layers normalize values"
    if architecture.mtp_num_layers:
        yield "multi-token prediction layers are built from the engine's own layers"
    if not architecture.pre_norms:
        yield "its layers fuse a projection with the norm before it, and the model has no such norm"
    if settings.finetuning.finetuning_type == "lora":
        yield "adapters are supported by the engine's own layers only"
    if settings.precision.fp8 is not None:
        yield "fp8 is supported by the engine's own layers only"


def c_compiler() -> str | None:
    """Return the C compiler of Triton's kernel launchers, found as Triton does; None without one."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def attention_kernels(
    capability: Capability, backend: str, dtype: str, channels: int, *, varlen: bool, grouped: bool = False
) -> tuple[AttentionKernel, ...]:
    """Return the kernels that can compute attention, the best first.

    Args:
        capability: compute capability of the GPU, (9, 0) for Hopper; `CPU` for a CPU.
        backend: the setting attention_backend.
        dtype: the name of the torch dtype of queries.
        channels: the largest head dimension of queries, keys or values.
        varlen: see `needs_varlen`.
        grouped: whether several query heads share a key/value head.

    Returns:
        Either one of the engine's own kernels: "plain", matrix products with all scores in memory, or "varlen", flash
        attention with variable lengths; or kernels of scaled_dot_product_attention, which uses the first available one.
    """
    on_cpu = capability == CPU
    has_flash = on_cpu or (dtype in _FLASH_DTYPES and channels <= _FLASH_CHANNELS and capability >= _FLASH_SINCE)
    if backend in PLAIN_BACKENDS or (varlen and not has_flash):
        return ("plain",)
    if varlen:
        return ("varlen",)
    if on_cpu:
        return "flash", "math"
    if grouped and not has_flash:
        return ("math",)  # the others do not support grouped queries
    if backend == "flash":
        return ("flash",)
    if backend == "fused":
        return ("cudnn",)
    # cuDNN makes a new plan for each row length, and a run has hundreds of them.
    return "flash", "cudnn", "efficient", "math"


def needs_varlen(settings: Settings) -> bool:
    """Return whether attention needs variable lengths, which cuDNN's kernels in torch do not support: for packed
    sequences, or chunks of a sequence that other context-parallel ranks hold."""
    parallel = settings.parallel
    across = parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a"
    return across or settings.packing
