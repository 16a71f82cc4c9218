"""Matrix products in bf16 and fp16 on CPUs without instructions for them.

There torch's kernels are five to a hundred times slower than those for fp32. Nothing changes if there is a GPU.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_FEW_ROWS = 8
_REGISTERED: list[torch.library.Library] = []  # kernels are unregistered when their library is deleted


@functools.cache
def multiply_in_fp32(dtype: torch.dtype) -> None:
    """Compute this process's bf16 and fp16 matrix products in fp32 and round them, if the CPU has no instructions for
    `dtype`, which is one of the two.

    Products with a few rows still use torch's kernels: they take no longer than reading the weights.
    """
    if dtype not in _HALF or _has_instructions(dtype) or torch.accelerator.is_available() or _REGISTERED:
        return
    aten, library = torch.ops.aten, torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            library.impl(operator.default, functools.partial(_product, operator), "CPU")
        library.impl(aten._grouped_mm.default, _grouped_product, "CPU")
    _REGISTERED.append(library)


def _has_instructions(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has kernels for a dtype on this CPU; True if torch is built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return True
    onednn = torch.ops.mkldnn
    asked = onednn._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else onednn._is_mkldnn_fp16_supported
    return bool(asked())


def _product(operator: Any, *tensors: Tensor, **scales: Any) -> Tensor:
    """Multiply the last two tensors, [..., n, k] and [..., k, m], and add the one before them, if any."""
    rows, columns = tensors[-2:]
    if rows.dtype in _HALF and rows.shape[-2] >= _FEW_ROWS and {each.dtype for each in tensors} == {rows.dtype}:
        wide: Tensor = operator(*(each.float() for each in tensors), **scales)
        return wide.to(rows.dtype)
    # The out overload is not replaced, so this is torch's own kernel.
    out = rows.new_empty(*rows.shape[:-1], columns.shape[-1])
    return operator.out(*tensors, **scales, out=out)  # type: ignore[no-any-return]


def _grouped_product(rows: Tensor, columns: Tensor, *runs: Tensor) -> Tensor:
    """Multiply groups of rows by one matrix each, see `torch.nn.functional.grouped_mm`."""
    call = torch.ops.aten._grouped_mm.default._op_dk
    torch_kernel = functools.partial(call, torch.DispatchKey.CompositeExplicitAutograd)
    if rows.dtype in _HALF and columns.dtype == rows.dtype:
        wide: Tensor = torch_kernel(rows.float(), columns.float(), *runs)
        return wide.to(rows.dtype)
    return torch_kernel(rows, columns, *runs)  # type: ignore[no-any-return]
