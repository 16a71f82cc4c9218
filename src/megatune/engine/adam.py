"""AdamW in the shape that Megatron-Core's distributed optimizer expects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatune.engine.host_adam import HostUpdates

# Of a 16-bit parameter whose master weight the optimizer holds: fp32, in its state.
MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) through torch's fused kernel, on CPU and GPU.

    Megatron-Core knows Transformer Engine's and Apex's FusedAdam, which keep one step count in each parameter group;
    torch's AdamW keeps one in each parameter's state, which the distributed optimizer cannot save before the first
    step nor load after it. State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape; with `holds_masters` of a
    16-bit parameter also `master_param`, and gradients are in `decoupled_grad`, fp32, as with Transformer Engine's.

    The update itself is always computed in fp32: averages of another dtype are brought into shape for the kernel one
    parameter at a time.

    Args:
        betas: decay of the running averages of the gradient and of its square.
        adam_w_mode: always true; here because Megatron-Core passes it to FusedAdam.
        capturable: always false; newer versions of Megatron-Core pass it, for an optimizer in a CUDA graph.
        exp_avg_dtype, exp_avg_sq_dtype: what the running averages are kept in.
        holds_masters: parameters are the model's own, of whatever dtype.
        host_fraction: with `holds_masters` the share of the elements whose state, master weights among it, is in the
            host's memory, and whose update is computed there.

    Attributes:
        elsewhere: parameters that have no state here, and that a subclass updates.
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
        assert holds_masters or not host_fraction, "a gradient is where its parameter is, unless it is decoupled"
        self.state_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.holds_masters, self.host_fraction = holds_masters, host_fraction
        self._host = HostUpdates(_update)
        self._on_host: set[Tensor] = set()
        self.elsewhere: set[Tensor] = set()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def init_state(self) -> None:
        """Give every parameter its state, so that it can be loaded into before the first step. Master weights begin as
        the parameters are."""
        everything = [param for group in self.param_groups for param in group["params"] if param not in self.elsewhere]
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
            if self._gradient(param) is not None and param.numel() and param not in self.elsewhere
        ]  # fmt: skip
        # What the device computes goes first: it is only launched here, and runs beside the host's.
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
        """Update parameters where they are."""
        values = {param: self.state[param].get(MASTER, param) for param in params}
        is_ready = {param: all(one.dtype == torch.float32 for one in self._averages(param)) for param in params}
        if ready := [param for param in params if is_ready[param]]:
            state = ([self.state[param][name] for param in ready] for name in self.state_dtypes)
            _update(group, [values[param] for param in ready], [self._gradient(param) for param in ready], *state)
        for param in (param for param in params if not is_ready[param]):
            averages = self._averages(param)
            wide = [value.float() for value in averages]
            _update(group, [values[param]], [self._gradient(param)], *([each] for each in wide))
            for value, updated in zip(averages, wide, strict=True):
                value.copy_(updated)
        for param, value in values.items():
            if value is not param:
                param.copy_(value)


def _like(values: Tensor, dtype: torch.dtype, on_host: bool) -> Tensor:
    """Return memory for state, of the shape of `values`. Page-locked it need not be: nothing of it is transferred."""
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
