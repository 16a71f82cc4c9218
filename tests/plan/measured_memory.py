"""What a forward and backward pass of the engine really holds: live bytes of all tensors, operator by operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.data.batches import Batch
from megatune.engine import step
from megatune.engine.groups import build
from megatune.engine.model import build_model
from megatune.objectives.language_model import token_sum

DOCUMENTS = 4  # of a packed row


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
        found = func(*args, **kwargs)
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


def measure_step(architecture: Architecture, settings: Settings, trainable: FinetuningSettings) -> int:
    """On every rank: a step's most live bytes, with random weights, and every token trained."""
    build(settings.parallel, seed=0, timeout=settings.run.ddp_timeout)
    model = build_model(architecture, settings)
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    adapters = _freeze(model, trainable)
    batches = [_batch(architecture, settings, index) for index in range(settings.batch.gradient_accumulation_steps)]
    with LiveBytes() as found:
        step.forward_backward(model, batches, token_sum)
    del adapters
    return found.peak


def _freeze(model: Sequence[torch.nn.Module], trainable: FinetuningSettings) -> list[torch.nn.Parameter]:
    """Leave training to norms where the language model is frozen, and to adapters where they are asked for: one beside
    each target, which the engine has none of yet. Hidden states have a gradient from the embedding on, as PEFT's
    enable_input_require_grads makes it: recomputation asks for that. Answers the adapters' matrices."""
    matrices: list[torch.nn.Parameter] = []
    if trainable.finetuning_type == "full" and not trainable.freeze_language_model:
        return matrices
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.requires_grad = trainable.finetuning_type == "full" and parameter.dim() == 1
        for name, module in chunk.named_modules():
            if trainable.finetuning_type == "lora" and name.rpartition(".")[2] in trainable.lora_layers:
                matrices += _adapt(module, trainable.lora_rank)
            if name.rpartition(".")[2] == "embedding":
                module.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return matrices


def _adapt(linear: Any, rank: int) -> list[torch.nn.Parameter]:
    """Add B · A · input to the output of a linear layer [out, in]."""
    weight = linear.weight
    down = torch.nn.Parameter(torch.full((rank, weight.shape[1]), 0.01, dtype=weight.dtype))
    up = torch.nn.Parameter(torch.full((weight.shape[0], rank), 0.01, dtype=weight.dtype))

    def add(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: Any) -> Any:
        return outputs[0] + inputs[0] @ down.t() @ up.t(), *outputs[1:]

    linear.register_forward_hook(add)
    return [down, up]


def _batch(architecture: Architecture, settings: Settings, seed: int) -> Batch:
    """Rows of cutoff_len tokens; packed, all rows of the micro-batch in one, as four documents each."""
    rows, length = settings.batch.per_device_train_batch_size, settings.data.cutoff_len
    generator = torch.Generator().manual_seed(seed)
    shape = (1, rows * length) if settings.packing else (rows, length)
    tokens = torch.randint(architecture.vocab_size, shape, generator=generator)
    if not settings.packing:
        return Batch(tokens, tokens, torch.arange(length).repeat(rows, 1), (length,) * rows)
    document = length // DOCUMENTS
    count = rows * DOCUMENTS
    starts = torch.arange(count + 1, dtype=torch.int32) * document
    positions = torch.arange(document).repeat(count)[None]
    return Batch(tokens, tokens, positions, (document,) * count, starts)
