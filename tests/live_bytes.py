"""Live bytes of all tensors that operators make, operator by operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_ATEN = torch.ops.aten
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
# A processor without instructions for bf16 takes several times as long for these as in fp32; each makes tensors of the
# same sizes either way, whatever their values.
_PRODUCTS = (_ATTENTION.default, _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make until the last tensor that uses them is gone.

    What was there before (parameters, gradient buffers, the optimizer) never counts, nor does what a kernel allocates
    and frees inside of itself. Both passes run in the thread that enters this.

    Attributes:
        live, peak: bytes now and at most so far.
        at_peak: where asked for, bytes at the fullest moment, by the operator that made them.
    """

    def __init__(self, by_operator: bool = False) -> None:
        super().__init__()
        self._by_operator = by_operator
        self.live = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._makers: dict[int, str] = {}
        self._finalizers: dict[int, Any] = {}
        self._stock_resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        live, stock = self, self._stock_resize

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            answer = stock(storage, size)
            live._resized(storage)
            return answer

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._stock_resize  # type: ignore[method-assign]
        super().__exit__(kind, error, traceback)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, None)
        found = _computed(func, args, kwargs)
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, str(func))
        self._look()
        return found

    def _note(self, tensor: torch.Tensor, maker: str | None) -> None:
        """A storage seen for the first time: made by this operator, or, as an argument, before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = 0 if maker is None else storage.nbytes()
        self._sizes[key], self._makers[key] = size, maker or ""
        self._finalizers[key] = weakref.finalize(storage, self._gone, key)
        self.live += size

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._makers[key], self._finalizers[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if self._makers.get(key):
            self.live += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self._look()

    def _look(self) -> None:
        if self.live > self.peak:
            self.peak = self.live
            if self._by_operator:
                self._snapshot()

    def _snapshot(self) -> None:
        self.at_peak = Counter()
        for key, size in self._sizes.items():
            self.at_peak[self._makers[key]] += size


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator; what is allocated here beside its results is not counted."""
    is_half = any(isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 for one in tree_leaves(args))
    if func not in _PRODUCTS or not is_half:
        return func(*args, **kwargs)
    found = func(*tree_map_only(torch.Tensor, _widened, args), **tree_map_only(torch.Tensor, _widened, kwargs))
    if func is _ATTENTION.default:  # the logarithms of its sums are in fp32
        return found[0].bfloat16(), *found[1:]
    return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, found)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
