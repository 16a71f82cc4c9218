"""Which kernels the engine computes with, chosen without torch: the planner counts what they keep.

The limits of attention are those of torch.nn.functional.scaled_dot_product_attention and of torch's flash attention
with variable lengths.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Literal

from megatune.architecture import Architecture
from megatune.config.settings import Settings

AttentionKernel = Literal["plain", "varlen", "flash", "cudnn", "efficient", "math"]
Capability = tuple[int, int]
CPU: Capability = (0, 0)
PLAIN_BACKENDS = ("unfused", "local")
# torch's flash attention on GPUs, for varlen, too.
_FLASH_DTYPES, _FLASH_CHANNELS, _FLASH_SINCE = ("float16", "bfloat16"), 256, (8, 0)
# Bytes of the logits that the fused loss has in memory at once, were they fp32. On a GPU few and large products are
# faster: each passes over the gradient of the whole output weight.
LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_ON_CPU = 2**30, 2**28


def te_obstacle(settings: Settings, architecture: Architecture) -> str:
    """Return why the decoder's layers cannot be Transformer Engine's; "" where they can."""
    return next(_reasons(settings, architecture), "")


def _reasons(settings: Settings, architecture: Architecture) -> Iterator[str]:
    if architecture.mla is not None:
        yield "latent attention has narrow projections that each process holds whole"
    if architecture.delta is not None:
        yield "gated delta nets have weights of their own beside their projections"
    if architecture.global_heads is not None:
        yield "layers without a window have heads of another size, and values of all layers a norm"
    if architecture.mtp_num_layers:
        yield "a layer that predicts a further token is of the engine's own layers"
    if not architecture.pre_norms:
        yield "its layers join a projection with the norm before it, and the model has none there"
    if settings.finetuning.finetuning_type == "lora":
        yield "adapters are next to the engine's own layers"
    if settings.precision.fp8 is not None:
        yield "fp8 is of the engine's own layers"


def c_compiler(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the C compiler that Triton builds what launches its kernels with, found as it does; None without one."""
    names = [env["CC"]] if env.get("CC") else ["gcc", "clang"]
    return next(filter(None, (shutil.which(name, path=env.get("PATH")) for name in names)), None)


def attention_kernels(
    capability: Capability, backend: str, dtype: str, channels: int, *, in_runs: bool, grouped: bool = False
) -> tuple[AttentionKernel, ...]:
    """Choose the kernels that may compute attention, the best first.

    Args:
        capability: compute capability of the GPU, (9, 0) for Hopper; `CPU` for a CPU.
        backend: the setting attention_backend.
        dtype: torch's name for the dtype of queries.
        channels: the most that a head of queries, keys or values has.
        in_runs: see `attends_in_runs`.
        grouped: several query heads share a key/value head.

    Returns:
        One of the engine's own kernels: "plain" matrix products with all scores in memory, or "varlen", flash attention
        with variable lengths. Or kernels of scaled_dot_product_attention, which takes the first that it can use.
    """
    on_cpu = capability == CPU
    has_flash = on_cpu or (dtype in _FLASH_DTYPES and channels <= _FLASH_CHANNELS and capability >= _FLASH_SINCE)
    if backend in PLAIN_BACKENDS or (in_runs and not has_flash):
        return ("plain",)
    if in_runs:
        return ("varlen",)
    if on_cpu:
        return "flash", "math"
    if grouped and not has_flash:
        return ("math",)  # the others take no groups of queries
    if backend == "flash":
        return ("flash",)
    if backend == "fused":
        return ("cudnn",)
    # cuDNN plans anew for each length of rows, and those of a run have hundreds.
    return "flash", "cudnn", "efficient", "math"


def attends_in_runs(settings: Settings) -> bool:
    """Return whether queries attend to runs of keys, which cuDNN's kernels in torch do not do: documents of a packed
    row, or parts of a document that other context-parallel ranks hold."""
    parallel = settings.parallel
    across = parallel.context_parallel_size > 1 and parallel.cp_comm_type != "a2a"
    return across or settings.packing
