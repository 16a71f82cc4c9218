"""AdamW in the shape that Megatron-Core's distributed optimizer expects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) through torch's fused kernel, on CPU and GPU.

    Megatron-Core knows Transformer Engine's and Apex's FusedAdam, which keep one step count in each parameter group;
    torch's AdamW keeps one in each parameter's state, which the distributed optimizer cannot save before the first
    step nor load after it. State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape.

    State that is not fp32, or that lies in the host's memory, is brought into shape for the kernel one parameter at a
    time: the update itself is always computed in fp32.

    Args:
        betas: decay of the running averages of the gradient and of its square.
        adam_w_mode: always true; here because Megatron-Core passes it to FusedAdam.
        exp_avg_dtype, exp_avg_sq_dtype: what the running averages are kept in.
        host_fraction: the share of the elements whose state is kept, and whose update is computed, on the host.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        host_fraction: float = 0.0,
    ) -> None:
        assert adam_w_mode, "weight decay is decoupled"
        self.state_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.host_fraction = host_fraction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def init_state(self) -> None:
        """Give every parameter its state, so that it can be loaded into before the first step."""
        everything = [param for group in self.param_groups for param in group["params"]]
        left = self.host_fraction * sum(param.numel() for param in everything)
        for param in everything:
            on_host = left > 0
            left -= param.numel()
            for name, dtype in self.state_dtypes.items():
                if name not in self.state[param]:
                    self.state[param][name] = _zeros_like(param.data, dtype, on_host)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self.init_state()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            group["step"] += 1
            ready = [param for param in params if self._is_ready(param)]
            if ready:
                averages = ([self.state[param][name] for param in ready] for name in self.state_dtypes)
                _update(group, ready, [param.grad for param in ready], *averages)
            for param in params:
                if not self._is_ready(param):
                    self._update_elsewhere(group, param)

    def _is_ready(self, param: Tensor) -> bool:
        """Return whether the kernel can take the parameter's state as it is."""
        return all(value.dtype == param.dtype and value.device == param.device for value in self._averages(param))

    def _averages(self, param: Tensor) -> list[Tensor]:
        return [self.state[param][name] for name in self.state_dtypes]

    def _update_elsewhere(self, group: dict[str, Any], param: Tensor) -> None:
        assert param.grad is not None
        averages = self._averages(param)
        # Copies even where nothing is converted: what the kernel writes is put back below.
        inputs = (param, param.grad, *averages)
        work = [value.to(averages[0].device, torch.float32, copy=True) for value in inputs]
        _update(group, *([tensor] for tensor in work))
        param.copy_(work[0])
        for value, updated in zip(averages, work[2:], strict=True):
            value.copy_(updated)


def _zeros_like(values: Tensor, dtype: torch.dtype, on_host: bool) -> Tensor:
    if not on_host or values.device.type == "cpu":
        return torch.zeros_like(values, dtype=dtype)
    return torch.zeros(values.shape, dtype=dtype, pin_memory=True)


_Tensors: TypeAlias = list[Tensor]


def _update(group: dict[str, Any], params: _Tensors, grads: _Tensors, exp_avg: _Tensors, exp_avg_sq: _Tensors) -> None:
    """Take one step of the fused kernel; all tensors fp32, on one device."""
    # The kernel adds 1 to the step it is given; all parameters of a group share one count.
    steps = torch.full((len(params),), group["step"] - 1, dtype=torch.float32, device=params[0].device)
    beta1, beta2 = group["betas"]
    adamw(
        params, grads, exp_avg, exp_avg_sq, [], list(steps.unbind()), fused=True, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
