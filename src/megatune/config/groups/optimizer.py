"""The optimizer, its schedule, and the precision it works in."""

from __future__ import annotations

from typing import Any, Literal

from megatune.config.setting import Group, setting


class OptimizerSettings(Group):
    optimizer: Literal["adam", "sgd"] = setting(
        "adam",
        advice="adam is AdamW (weight decay apart from the gradient). sgd keeps less state, and seldom trains a "
        "language model as well.",
    )
    learning_rate: float = setting(
        5e-5,
        ge=0,
        advice="The highest learning rate. Full fine-tuning usually takes 1e-6 to 5e-5, the lower end for larger "
        "models.",
    )
    lr_scheduler_type: Literal[
        "cosine",
        "linear",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = setting(
        "linear", advice="How the learning rate changes after warm-up, as Transformers' schedulers of these names."
    )
    lr_scheduler_kwargs: dict[str, Any] = setting(
        {},
        advice="What the scheduler takes beyond its type: cosine_with_min_lr wants min_lr or min_lr_rate, "
        "warmup_stable_decay wants num_decay_steps.",
    )
    warmup_ratio: float = setting(
        0.0, unit="share of all steps", ge=0, le=1, advice="Share of the run in which the learning rate rises from 0."
    )
    warmup_steps: float = setting(
        0.0,
        unit="steps, or a share below 1",
        ge=0,
        advice="Steps in which the learning rate rises from 0; below 1, a share of the run, as in Transformers 5. Use "
        "this or warmup_ratio, not both.",
    )
    weight_decay: float = setting(
        0.0, ge=0, advice="Pulls weights towards 0 at each step, by this times the learning rate."
    )
    max_grad_norm: float = setting(
        1.0,
        ge=0,
        advice="Gradients are scaled down to this norm, over all parameters, where it is larger. 0 turns it off.",
    )
    adam_beta1: float = setting(0.9, ge=0, lt=1, advice="How slowly Adam's mean of gradients forgets.")
    adam_beta2: float = setting(
        0.999,
        ge=0,
        lt=1,
        advice="How slowly Adam's mean of squared gradients forgets. 0.95 is usual for large batches.",
    )
    adam_epsilon: float = setting(1e-8, gt=0, advice="Keeps Adam from dividing by almost nothing.")
    sgd_momentum: float = setting(0.9, ge=0, lt=1, advice="Momentum of optimizer: sgd; adam does not use it.")
    num_train_epochs: float = setting(
        3.0,
        unit="epochs",
        gt=0,
        advice="Passes over the training data; a part of one is allowed. max_steps, where set, decides instead.",
    )
    max_steps: int = setting(
        -1,
        unit="steps",
        ge=-1,
        advice="Ends training after this many steps, whatever num_train_epochs says. -1 leaves it to that.",
    )

    exp_avg_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        advice="dtype of Adam's mean of gradients. bf16 saves 2 bytes a parameter and rounds.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        advice="dtype of Adam's mean of squared gradients. bf16 saves 2 bytes a parameter and rounds.",
    )
    optimizer_cpu_offload: bool = setting(
        False,
        advice="Keep Adam's running averages in the host's memory and update there. Saves 8 bytes of GPU memory for "
        "each parameter of a process's share; steps take longer by the copies and the host's computing.",
    )
    optimizer_offload_fraction: float = setting(
        1.0, gt=0, le=1, advice="With optimizer_cpu_offload: the share of the parameters that is kept there."
    )


class PrecisionSettings(Group):
    bf16: bool = setting(
        False,
        advice="Compute in bfloat16, with master weights and gradients in float32. The right choice on GPUs since "
        "Ampere; halves the memory of activations.",
    )
    fp16: bool = setting(
        False,
        advice="Compute in float16 with loss scaling. For GPUs without bfloat16; steps that overflow are skipped.",
    )

    accumulate_allreduce_grads_in_fp32: bool = setting(
        True,
        advice="With bf16 or fp16: add and exchange gradients in float32. false does so in the model's dtype: 2 bytes "
        "a parameter and half the exchange less, with rounding at every addition.",
    )

    @property
    def params_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype that the model computes in, by its torch name."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
