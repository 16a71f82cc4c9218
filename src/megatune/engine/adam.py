"""AdamW in the shape that Megatron-Core's distributed optimizer expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) through torch's fused kernel, on CPU and GPU.

    Megatron-Core knows Transformer Engine's and Apex's FusedAdam, which keep one step count in each parameter group;
    torch's AdamW keeps one in each parameter's state, which the distributed optimizer cannot save before the first
    step nor load after it. State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape and dtype.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        adam_w_mode: always true; here because Megatron-Core passes it to FusedAdam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode, "weight decay is decoupled"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def init_state(self) -> None:
        """Give every parameter its state, so that it can be loaded into before the first step."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param.data)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "the gradients are ready when the optimizer steps"
        self.init_state()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            group["step"] += 1
            if not params:
                continue
            # The kernel adds 1 to the step it is given; all parameters of a group share one count.
            step = torch.tensor(group["step"] - 1, dtype=torch.float32, device=params[0].device)
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [step.clone() for _ in params],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
