"""AdamW with the interface that Megatron-Core's distributed optimizer expects, and optional offloading to the host.

For a parameter whose state is in host memory, gradients are copied from the device and weights back to it in pieces,
through page-locked memory, on separate streams: while the host computes one piece, the next piece's gradients and the
previous piece's weights are being copied. On a CPU the same code copies within host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatune.engine import device

# Elements of a piece; two pieces are in flight. A multiple of the kernel's block size.
PIECE = 2**24

# Parameter group, parameter, gradient (fp32, on the parameter's device), master weight (fp32, on the host; None for an
# fp32 parameter, which is its own), and both running averages, on the host.
Work = tuple[dict[str, Any], Tensor, Any, Tensor | None, Tensor, Tensor]
Kernel = Callable[[dict[str, Any], list[Any], list[Any], list[Any], list[Any]], None]


@dataclass(slots=True)
class _Slot:
    """Page-locked buffers of a piece in flight: fp32 [PIECE] of gradients, and as many bytes of weights.

    Attributes:
        arrived: recorded when the gradients, and the weights of an fp32 parameter, are on the host.
        left: recorded when the updated weights are on the device.
    """

    gradient: Tensor
    weight: Tensor
    arrived: torch.cuda.Event
    left: torch.cuda.Event

    @classmethod
    def of(cls, size: int) -> _Slot:
        gradient, weight = (torch.empty(size, dtype=torch.float32, pin_memory=device.HAS_GPU) for _ in range(2))
        return cls(gradient, weight, torch.cuda.Event(), torch.cuda.Event())

    def weights(self, values: Tensor) -> Tensor:
        """Return the weight buffer as the dtype and number of elements of `values`."""
        return self.weight.view(values.dtype)[: values.numel()]


class HostUpdates:
    """Updates parameters on the host.

    Args:
        kernel: updates fp32 tensors in place: group, weights, gradients, and both averages.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._slots: list[_Slot] = []
        self._streams: list[torch.cuda.Stream] = []

    def run(self, work: Sequence[Work]) -> None:
        """Update all of these parameters; work that the device gets afterwards waits for the updated weights."""
        pieces = list(_pieces(work))
        if not pieces:
            return
        size = max(piece[1].numel() for piece in pieces)
        if not self._slots or self._slots[0].gradient.numel() < size:
            self._slots = [_Slot.of(size) for _ in range(2)]
        if not self._streams:
            self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        fetching, sending = self._streams
        fetching.wait_stream(torch.cuda.current_stream())  # after gradients are summed and clipped
        self._fetch(pieces, 0)
        for index, (group, weight, gradient, master, *averages) in enumerate(pieces):
            self._fetch(pieces, index + 1)
            slot = self._slots[index % 2]
            slot.arrived.synchronize()
            updated = slot.weights(weight)
            fp32 = [each.float() for each in averages]
            value = updated if master is None else master
            self._kernel(group, [value], [slot.gradient[: gradient.numel()]], *([each] for each in fp32))
            for each, new in zip(averages, fp32, strict=True):
                each.copy_(new)  # for fp32 a copy onto itself
            if master is not None:
                slot.left.synchronize()  # the buffer's previous weights are sent
                updated.copy_(master)
            with torch.cuda.stream(sending):
                weight.copy_(updated, non_blocking=True)
                slot.left.record(sending)
        torch.cuda.current_stream().wait_stream(sending)

    def _fetch(self, pieces: Sequence[Any], index: int) -> None:
        """Start copying the inputs of a piece from the device."""
        if index >= len(pieces):
            return
        _, weight, gradient, master, *_ = pieces[index]
        slot, (fetching, _) = self._slots[index % 2], self._streams
        with torch.cuda.stream(fetching):
            slot.gradient[: gradient.numel()].copy_(gradient, non_blocking=True)
            if master is None:
                fetching.wait_event(slot.left)
                slot.weights(weight).copy_(weight, non_blocking=True)
            slot.arrived.record(fetching)


def _pieces(work: Sequence[Work]) -> Iterator[Work]:
    """Cut parameters into pieces."""
    for group, *tensors in work:
        flat = [None if each is None else each.view(-1) for each in tensors]
        assert flat[0] is not None
        for start in range(0, flat[0].numel(), PIECE):
            yield group, *(None if each is None else each[start : start + PIECE] for each in flat)  # type: ignore[misc]


# State key of the fp32 master weight of a 16-bit parameter.
MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) through torch's fused kernel, on CPU and GPU.

    Megatron-Core expects Transformer Engine's or Apex's FusedAdam, which keep one step count in each parameter group.
    torch's AdamW keeps one in each parameter's state, which the distributed optimizer can neither save before the first
    step nor load after it. State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape. With `holds_masters`, 16-bit
    parameters also have `master_param`, and gradients are in `decoupled_grad`, fp32, as with Transformer Engine.

    The update is always computed in fp32: averages of another dtype are converted one parameter at a time.

    Args:
        betas: decay rates of the first and second moment.
        adam_w_mode: always true; Megatron-Core passes it to FusedAdam.
        capturable: always false; newer versions of Megatron-Core pass it, for an optimizer in a CUDA graph.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the running averages.
        holds_masters: the parameters are the model's own, of any dtype, and the optimizer holds the master weights.
        host_fraction: with `holds_masters` the fraction of elements whose state, including master weights, is in host
            memory, and which are updated there.

    Attributes:
        excluded: parameters that have no state here, because a subclass updates them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        holds_masters: bool = False,
        host_fraction: float = 0.0,
    ) -> None:
        assert adam_w_mode, "weight decay is decoupled"
        assert not capturable, "steps are counted on the host"
        assert holds_masters or not host_fraction, "offloading needs decoupled gradients"
        self.state_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.holds_masters, self.host_fraction = holds_masters, host_fraction
        self._host = HostUpdates(_update)
        self._on_host: set[Tensor] = set()
        self.excluded: set[Tensor] = set()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def init_state(self) -> None:
        """Allocate the state of every parameter, so that it can be loaded before the first step. Master weights start
        as copies of the parameters."""
        everything = [param for group in self.param_groups for param in group["params"] if param not in self.excluded]
        left = self.host_fraction * sum(param.numel() for param in everything)
        for param in everything:
            on_host = left > 0
            left -= param.numel()
            if on_host:
                self._on_host.add(param)
            for name, dtype in self.state_dtypes.items():
                if name not in self.state[param]:
                    self.state[param][name] = _like(param.data, dtype, on_host).zero_()
            if self.holds_masters and param.dtype != torch.float32 and MASTER not in self.state[param]:
                self.state[param][MASTER] = _like(param.data, torch.float32, on_host).copy_(param.data)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self.init_state()
        for group in self.param_groups:
            group["step"] += 1
        updated = [
            (group, param) for group in self.param_groups for param in group["params"]
            if self._gradient(param) is not None and param.numel() and param not in self.excluded
        ]  # fmt: skip
        # The device's updates come first: they are only launched here, and run while the host computes.
        for group in self.param_groups:
            self._update_here(group, [param for its, param in updated if its is group and param not in self._on_host])
        self._host.run([
            (group, param, self._gradient(param), self.state[param].get(MASTER), *self._averages(param))
            for group, param in updated if param in self._on_host
        ])  # fmt: skip

    def _gradient(self, param: Tensor) -> Tensor | None:
        return getattr(param, "decoupled_grad", None) if self.holds_masters else param.grad

    def _averages(self, param: Tensor) -> list[Tensor]:
        return [self.state[param][name] for name in self.state_dtypes]

    def _update_here(self, group: dict[str, Any], params: _Tensors) -> None:
        """Update parameters whose state is on the device."""
        values = {param: self.state[param].get(MASTER, param) for param in params}
        is_ready = {param: all(one.dtype == torch.float32 for one in self._averages(param)) for param in params}
        if ready := [param for param in params if is_ready[param]]:
            state = ([self.state[param][name] for param in ready] for name in self.state_dtypes)
            _update(group, [values[param] for param in ready], [self._gradient(param) for param in ready], *state)
        for param in (param for param in params if not is_ready[param]):
            averages = self._averages(param)
            fp32 = [value.float() for value in averages]
            _update(group, [values[param]], [self._gradient(param)], *([each] for each in fp32))
            for value, updated in zip(averages, fp32, strict=True):
                value.copy_(updated)
        for param, value in values.items():
            if value is not param:
                param.copy_(value)


def _like(values: Tensor, dtype: torch.dtype, on_host: bool) -> Tensor:
    """Allocate state with the shape of `values`. It is not page-locked, since it is never transferred."""
    return torch.empty(values.shape, dtype=dtype, device="cpu" if on_host else values.device)


_Tensors: TypeAlias = list[Any]


def _update(group: dict[str, Any], params: _Tensors, grads: _Tensors, exp_avg: _Tensors, exp_avg_sq: _Tensors) -> None:
    """Take one step of the fused kernel; all tensors fp32, on one device."""
    # The kernel adds 1 to the step it is given; all parameters of a group share one count.
    steps = torch.full((len(params),), group["step"] - 1, dtype=torch.float32, device=params[0].device)
    beta1, beta2 = group["betas"]
    adamw(
        params, grads, exp_avg, exp_avg_sq, [], list(steps.unbind()), fused=True, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
