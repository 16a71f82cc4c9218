"""What a step computes on, the optimizer, its schedule, and the precision it works in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import OR_SHARE, STEPS, Count, Group, Limit, Needs, NonNegative, Positive

_MICRO_BATCH = Limit(10**6, "a micro-batch is in memory as a whole")
_ACCUMULATED = Limit(10**6, "a step is computed micro-batch by micro-batch before it learns")
_EPOCHS = Limit(10**6, "nobody sees a million epochs")
_EVALUATED = Needs("evaluation.eval_strategy", ("steps", "epoch"))
_ADAM = Needs("optimizer.optimizer", ("adam", "muon"))
_MUON = Needs("optimizer.optimizer", ("muon",))
_WHOLE = Needs(
    "finetuning.finetuning_type", ("full", "freeze"), "Muon updates whole matrices of the model, no factors",
    "write `optimizer: adam`", of=("muon",),
)  # fmt: skip
_STATE = Needs("optimizer.optimizer", ("adam",), "it is of Adam's state")
_SHARDED = Needs(
    "parallel.use_distributed_optimizer", (True,), "every replica would keep all of the state, on the device"
)
_OFFLOADED = Needs("optimizer.optimizer_cpu_offload", (True,), "nothing is offloaded")
_NO_BF16 = Needs(
    "precision.bf16", (False,), "the model computes in one of them", "remove `fp16`: bf16 needs no loss scaling"
)
_16_BITS = "gradients have the dtype of the model, which is fp32"
_SHORT = Needs("precision.bf16", (True,), _16_BITS, otherwise=Needs("precision.fp16", (True,)))
_BF16 = Needs("precision.bf16", (True,), "what 8-bit products give and take is bf16")
_NOT_QUANTIZED = Needs(
    "finetuning.quantization_bit",
    (None,),
    "quantized matrices are multiplied in bf16",
    "remove `fp8` or `quantization_bit`",
)


class BatchSettings(Group):
    per_device_train_batch_size: Annotated[Count, "rows", _MICRO_BATCH] = 8
    """Rows of one micro-batch: what one process computes at once. With stages dpo and rm a row is a pair, of two
    sequences.
    How: Activations grow in proportion to it. The global batch is this times gradient_accumulation_steps times the
    data-parallel size.
    When: Raise it while memory lasts and rows are short: larger products use a GPU better. With packed or long rows 1
    is usual."""
    gradient_accumulation_steps: Annotated[Count, "micro-batches", _ACCUMULATED] = 1
    """Micro-batches of one step, computed one after the other before the optimizer updates the weights.
    How: Gradients are added up, so memory stays what one micro-batch takes. With a pipeline, stages idle for about
    (stages − 1) / micro-batches of a step's computing.
    When: Raise it for a larger global batch at the same memory. With a pipeline use several times
    pipeline_model_parallel_size; with virtual stages a multiple of it."""
    per_device_eval_batch_size: Annotated[Count, "rows", _MICRO_BATCH, _EVALUATED] = 8
    """Rows of one micro-batch in evaluation.
    How: An evaluation keeps no activations for a backward pass, so larger ones fit than in training. It changes no
    result.
    When: Raise it where evaluation takes long."""


class OptimizerSettings(Group):
    optimizer: Annotated[Literal["adam", "muon", "sgd"], _WHOLE] = "adam"
    """How gradients become updates of the weights.
    How: adam keeps two averages of each parameter, 8 bytes in fp32; muon keeps one of each matrix of a linear layer, 4
    bytes, and orthogonalizes it at each step; sgd keeps its momentum, 4 bytes, or nothing with sgd_momentum: 0.
    When: adam for language models. muon for models that were pretrained with it, and where Adam's state does not fit;
    sgd keeps less state, and seldom trains one as well.
    - adam: AdamW: weight decay apart from the gradient
    - muon: Muon for the matrices of linear layers, AdamW for embeddings, output layer, routers, norms and biases
    - sgd: gradient descent with momentum"""
    learning_rate: NonNegative = 5e-5
    """The highest learning rate, reached after warm-up.
    How: lr_scheduler_type says how it falls from there.
    When: Full fine-tuning usually takes 1e-6 to 5e-5, the lower end for larger models. Lower it if the loss jumps,
    raise it with the global batch."""
    vision_lr: Positive | None = None
    """Of a vision-language model: the highest learning rate of the vision encoder. null takes learning_rate.
    How: It rises and falls with learning_rate, at a fixed ratio to it. The encoder must be trained:
    freeze_vision_tower: false.
    When: A fifth to a tenth of learning_rate keeps what the encoder knows; see also merger_lr."""
    merger_lr: Positive | None = None
    """Of a vision-language model: the highest learning rate of the mergers between vision encoder and language model.
    null takes learning_rate.
    How: It rises and falls with learning_rate, at a fixed ratio to it; deepstack mergers have it, too. One of them must
    be trained: freeze_multi_modal_projector: false.
    When: Raise it above learning_rate to align a frozen encoder and a frozen language model quickly."""
    lr_scheduler_type: Literal[
        "cosine",
        "linear",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "polynomial",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = "linear"
    """How the learning rate changes after warm-up; the rates are those of Transformers' schedulers of these names.
    How: The rate is a pure function of the step and of the number of all steps, so a resume continues as if it had
    never stopped.
    When: cosine and linear are usual. warmup_stable_decay suits runs whose length is not known when they begin.
    - cosine: falls to 0 along half a cosine
    - linear: falls to 0 in a line
    - constant: stays, without warm-up
    - constant_with_warmup: stays after the warm-up
    - inverse_sqrt: falls with the square root of the steps
    - polynomial: falls to lr_end as the power of what is left of the run; power 1 is a line
    - cosine_with_restarts: falls to 0 along half a cosine num_cycles times, from the highest rate each time
    - cosine_with_min_lr: a cosine that ends at min_lr, or at min_lr_rate of the highest
    - warmup_stable_decay: stays, and falls in the last num_decay_steps"""
    lr_scheduler_kwargs: dict[str, Any] = Field(default={})
    """What the scheduler takes beyond its type: cosine_with_min_lr wants min_lr or min_lr_rate, warmup_stable_decay
    wants num_decay_steps.
    How: The names are those of Transformers; what a scheduler does not take is refused.
    When: Set it with those two types; polynomial takes lr_end and power, cosine_with_restarts num_cycles."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1), "share of all steps"] = 0.0
    """Share of the run in which the learning rate rises from 0.
    How: The number of steps is the share of all steps, rounded up; the first step has a rate of 0.
    When: 0.03 to 0.1 is usual: Adam's averages are not yet reliable in the first steps. Use this or warmup_steps, not
    both."""
    warmup_steps: Annotated[NonNegative, OR_SHARE, STEPS] = 0.0
    """Steps in which the learning rate rises from 0; below 1, a share of the run, as in Transformers 5.
    How: The first step has a rate of 0, the highest comes after this many.
    When: Set it where warm-up should not depend on the length of the run. Use this or warmup_ratio, not both."""
    weight_decay: NonNegative = 0.0
    """Pulls weights towards 0 at each step, by this times the learning rate.
    How: Norms, biases and all other vectors are left out, such as attention sinks.
    When: 0 to 0.1. It matters in long runs, and little in a few epochs of fine-tuning."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm, over all parameters, where it is larger. 0 turns it off.
    How: The norm is taken over all processes after gradients are summed; the log shows it before scaling.
    When: 1 is usual. Look at the logged norm before changing it: a run whose norm is always above learns more slowly
    than its learning rate says."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1), _ADAM] = 0.9
    """How slowly Adam's mean of gradients forgets.
    How: The mean is over about 1 / (1 − beta1) steps.
    When: Leave it at 0.9."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1), _ADAM] = 0.999
    """How slowly Adam's mean of squared gradients forgets.
    How: The mean is over about 1 / (1 − beta2) steps.
    When: 0.95 is usual for large batches and long runs: it forgets a spike of gradients sooner."""
    adam_epsilon: Annotated[Positive, _ADAM] = 1e-8
    """Keeps Adam from dividing by almost nothing.
    How: It is added to the square root of the mean of squared gradients.
    When: Leave it; some raise it to 1e-6 against spikes in 16 bits."""
    sgd_momentum: Annotated[float, Field(ge=0, lt=1), Needs("optimizer.optimizer", ("sgd",))] = 0.9
    """Momentum of optimizer: sgd; others do not use it.
    How: Each update is this share of the last one plus the new gradient. 0 keeps no state.
    When: 0.9 is usual."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1), _MUON] = 0.95
    """Decay of the running average of gradients that optimizer: muon orthogonalizes.
    How: The average is over about 1 / (1 − momentum) steps.
    When: Leave it at 0.95."""
    muon_nesterov: Annotated[bool, _MUON] = True
    """With optimizer: muon: add the new gradient once more to the average that is orthogonalized (Nesterov's momentum).
    How: What is orthogonalized is momentum times the average plus (1 − momentum) times the gradient. false takes the
    average itself.
    When: Leave it at true, as torch.optim.Muon has it."""
    muon_scale: Annotated[Positive, _MUON] = 0.2
    """Size of the updates of optimizer: muon, relative to the learning rate.
    How: An orthogonal matrix is multiplied by this and by the square root of its longer side, so that the root mean
    square of an update's elements is this times the learning rate.
    When: 0.2 makes updates as large as AdamW's, whose learning rate and weight decay then suit both. Megatron-Core's
    own default is 1."""
    num_train_epochs: Annotated[Positive, "epochs", _EPOCHS, Needs("optimizer.max_steps", (-1, 0))] = 3.0
    """Passes over the training data; a part of one is allowed. max_steps, where set, decides instead.
    How: Every epoch has an order of its own, and its last batch may be short. The learning rate's schedule ends with
    the last step.
    When: 1 to 3 for fine-tuning. Watch the evaluation loss: more passes learn rows by heart."""
    max_steps: Annotated[int, Field(ge=-1), "steps", STEPS] = -1
    """Ends training after this many steps, whatever num_train_epochs says. -1 leaves it to that.
    How: The learning rate's schedule is that of a run of this many steps.
    When: Set it with streaming, and to try a run out."""

    exp_avg_dtype: Annotated[Literal["fp32", "bf16"], _STATE] = "fp32"
    """dtype of Adam's mean of gradients.
    How: The update is computed in fp32 and the mean stored in this dtype.
    When: bf16 where memory is short and a little rounding does no harm; first share the state out with
    use_distributed_optimizer.
    - fp32: 4 bytes a parameter
    - bf16: 2 bytes a parameter, rounded at each step"""
    exp_avg_sq_dtype: Annotated[Literal["fp32", "bf16"], _STATE] = "fp32"
    """dtype of Adam's mean of squared gradients.
    How: The update is computed in fp32 and the mean stored in this dtype. With a beta2 near 1 a step changes the mean
    by less than bf16 can hold, so it follows the gradients late.
    When: Keep fp32 unless memory is short; lower adam_beta2 with bf16.
    - fp32: 4 bytes a parameter
    - bf16: 2 bytes a parameter, rounded at each step"""
    optimizer_cpu_offload: Annotated[bool, _STATE, _SHARDED] = False
    """Keep Adam's running averages and the master weights in the host's memory, and update there.
    How: Saves 8 bytes of GPU memory for each parameter of a process's share, 12 in bf16 or fp16; the host needs as many
    for all its processes together. Each step sends gradients to the host and weights back, piece by piece, while the
    host computes. It needs use_distributed_optimizer.
    When: When nothing else makes the run fit. Use many micro-batches in a step, so that the update is a small part of
    it; `megatune plan` says how long it takes."""
    optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1), _OFFLOADED] = 1.0
    """With optimizer_cpu_offload: the share of the parameters whose state is kept on the host.
    How: Parameters are taken in their order until the share is reached; the rest is updated on the GPU.
    When: Lower it to what the memory needs: each part on the GPU makes steps shorter."""


class PrecisionSettings(Group):
    bf16: bool = False
    """Compute in bfloat16, with master weights and, by default, gradients in float32.
    How: Weights take 2 bytes, gradients 4, master weights 4 and Adam's averages 8 a parameter. bfloat16 has float32's
    range, so that no loss scaling is needed.
    When: Leave it unset: it is true on GPUs since Ampere, where it halves the memory of activations and makes matrix
    products several times faster; elsewhere it is false."""
    fp16: Annotated[bool, _NO_BF16] = False
    """Compute in float16 with loss scaling.
    How: The loss is multiplied by a scale that halves when gradients overflow and grows while they do not; steps that
    overflow are skipped.
    When: For GPUs without bfloat16 (V100, T4). Use bf16 elsewhere."""

    accumulate_allreduce_grads_in_fp32: Annotated[bool, _SHORT] = True
    """With bf16 or fp16: add and exchange gradients in float32. false does so in the model's dtype.
    How: Gradients of all micro-batches are added in one buffer, 4 bytes a parameter in float32 and 2 otherwise, which
    data-parallel processes then sum.
    When: false where memory is short and a step has few micro-batches: it rounds at every addition, and halves the
    exchange."""
    fp8: Annotated[Literal["tensorwise", "rowwise"] | None, _BF16, _NOT_QUANTIZED] = None
    """With bf16: multiply in 8-bit floats in the linear layers of attention and dense feed-forwards. null does not.
    How: Inputs and weights are scaled by their largest values and rounded to E4M3 for each product, and so are
    gradients of outputs (E5M2 with tensorwise). Weight gradients, experts, router, norms, embedding, output layer and
    vision encoder stay in bf16; weights and what is saved, too. It needs a GPU since Ada or Hopper.
    When: Leave it unset: no GPU has shown yet how fast it is, and that the loss falls as in bf16. To try it, compare
    the losses of some hundred steps with those of bf16.
    - tensorwise: one scale for a whole matrix: fewer passes over memory, coarser where a few values are large
    - rowwise: one scale for each token and each row of a weight"""

    @property
    def params_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype that the model computes in, by its torch name."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def params_itemsize(self) -> int:
        """Bytes of a number of that dtype."""
        return 2 if self.bf16 or self.fp16 else 4
