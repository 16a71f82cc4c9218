"""Settings of the batch, the optimizer, its schedule, and the precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import OR_SHARE, STEPS, Count, Group, Limit, Needs, NonNegative, Positive
from megatune.references import remove, write

_MICRO_BATCH = Limit(10**6, "a micro-batch is in memory as a whole")
_ACCUMULATED = Limit(10**6, "all micro-batches are computed before the weights are updated")
_EPOCHS = Limit(10**6, "no training needs a million epochs")
_EVALUATED = Needs("evaluation.eval_strategy", ("steps", "epoch"))
_ADAM = Needs("optimizer.optimizer", ("adam", "muon"))
_MUON = Needs("optimizer.optimizer", ("muon",))
_WHOLE = Needs(
    "finetuning.finetuning_type", ("full", "freeze"), "Muon updates whole matrices of the model, not adapters",
    write("optimizer", "adam"), of=("muon",),
)  # fmt: skip
_STATE = Needs("optimizer.optimizer", ("adam",), "it applies to Adam's state")
_SHARDED = Needs(
    "parallel.use_distributed_optimizer",
    (True,),
    "without it every replica keeps the whole optimizer state on the device",
)
_OFFLOADED = Needs("optimizer.optimizer_cpu_offload", (True,), "nothing is offloaded")
_NO_BF16 = Needs(
    "precision.bf16", (False,), "the model computes in one of them", f"{remove('fp16')}: bf16 needs no loss scaling"
)
_16_BITS = "gradients have the dtype of the model, which is fp32"
_SHORT = Needs("precision.bf16", (True,), _16_BITS, otherwise=Needs("precision.fp16", (True,)))
_BF16 = Needs("precision.bf16", (True,), "inputs and outputs of 8-bit products are bf16")
_NOT_QUANTIZED = Needs(
    "finetuning.quantization_bit", (None,), "quantized matrices are multiplied in bf16",
    remove("fp8", "quantization_bit"),
)  # fmt: skip


class BatchSettings(Group):
    per_device_train_batch_size: Annotated[Count, "rows", _MICRO_BATCH] = 8
    """Rows of one micro-batch, which one process computes at once. With stages dpo and rm a row is a pair, of two
    sequences.
    How: Activations grow in proportion to it. The global batch is this times gradient_accumulation_steps times the
    data-parallel size.
    When: Raise it as long as rows are short and memory suffices: larger matrix products use a GPU better. With packed
    or long rows 1 is usual."""
    gradient_accumulation_steps: Annotated[Count, "micro-batches", _ACCUMULATED] = 1
    """Micro-batches of one step, computed one after the other before the optimizer updates the weights.
    How: Gradients are accumulated, so memory stays that of one micro-batch. With a pipeline, stages idle for about
    (stages − 1) / micro-batches of a step's computing.
    When: Raise it for a larger global batch in the same memory. With a pipeline use several times
    pipeline_model_parallel_size; with virtual stages a multiple of it."""
    per_device_eval_batch_size: Annotated[Count, "rows", _MICRO_BATCH, _EVALUATED] = 8
    """Rows of one micro-batch in evaluation.
    How: Evaluation keeps no activations for a backward pass, so larger micro-batches fit than in training. The results
    do not depend on it.
    When: Raise it if evaluation takes long."""


class OptimizerSettings(Group):
    optimizer: Annotated[Literal["adam", "muon", "sgd"], _WHOLE] = "adam"
    """The optimizer.
    How: adam keeps two moments of each parameter, 8 bytes in fp32; muon keeps one for each element of a linear layer's
    matrix, 4 bytes, and orthogonalizes it at each step; sgd keeps its momentum, 4 bytes, or nothing with sgd_momentum:
    0.
    When: adam for language models. muon for models that were pretrained with it, and if Adam's state does not fit; sgd
    keeps less state, but rarely trains language models as well.
    - adam: AdamW, with decoupled weight decay
    - muon: Muon for the matrices of linear layers, AdamW for embeddings, output layer, routers, norms and biases
    - sgd: gradient descent with momentum"""
    learning_rate: NonNegative = 5e-5
    """The peak learning rate, reached after warm-up.
    How: lr_scheduler_type decides how it decays from there.
    When: Full fine-tuning usually needs 1e-6 to 5e-5, the lower end for larger models. Lower it if the loss jumps,
    raise it with the global batch."""
    vision_lr: Positive | None = None
    """For vision-language models: the peak learning rate of the vision encoder. null takes learning_rate.
    How: It follows the schedule of learning_rate, at a fixed ratio. The encoder must be trained: freeze_vision_tower:
    false.
    When: A fifth to a tenth of learning_rate keeps what the encoder knows; see also merger_lr."""
    merger_lr: Positive | None = None
    """For vision-language models: the peak learning rate of the mergers between vision encoder and language model. null
    takes learning_rate.
    How: It follows the schedule of learning_rate, at a fixed ratio; deepstack mergers use it, too. One of them must be
    trained: freeze_multi_modal_projector: false.
    When: Raise it above learning_rate to align a frozen encoder and a frozen language model quickly."""
    lr_scheduler_type: Literal[
        "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial", "cosine_with_restarts",
        "cosine_with_min_lr", "warmup_stable_decay",
    ] = "linear"  # fmt: skip
    """How the learning rate changes after warm-up, as in Transformers' schedulers of these names.
    How: The rate is a pure function of the step and of the total number of steps, so a resumed run continues as if it
    had not stopped.
    When: cosine and linear are usual. warmup_stable_decay suits runs whose length is not known at their start.
    - cosine: decays to 0 along half a cosine
    - linear: decays linearly to 0
    - constant: stays constant, without warm-up
    - constant_with_warmup: stays constant after the warm-up
    - inverse_sqrt: decays with the inverse square root of the step
    - polynomial: decays to lr_end with a power of the remaining fraction of the run; power 1 is linear
    - cosine_with_restarts: decays to 0 along half a cosine num_cycles times, each time from the peak
    - cosine_with_min_lr: a cosine that ends at min_lr, or at min_lr_rate times the peak
    - warmup_stable_decay: stays constant, and decays in the last num_decay_steps"""
    lr_scheduler_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the scheduler: cosine_with_min_lr requires min_lr or min_lr_rate, warmup_stable_decay requires
    num_decay_steps.
    How: The names are those of Transformers; arguments that a scheduler does not have are refused.
    When: Set it with those two types; polynomial takes lr_end and power, cosine_with_restarts num_cycles."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1), "share of all steps"] = 0.0
    """Fraction of the run in which the learning rate rises from 0.
    How: The number of warm-up steps is this fraction of all steps, rounded up; the first step has a rate of 0.
    When: 0.03 to 0.1 is usual: Adam's moments are not yet reliable in the first steps. Use this or warmup_steps, not
    both."""
    warmup_steps: Annotated[NonNegative, OR_SHARE, STEPS] = 0.0
    """Steps in which the learning rate rises from 0; below 1, a fraction of the run, as in Transformers 5.
    How: The first step has a rate of 0; the peak is reached after this many steps.
    When: Set it if warm-up should not depend on the length of the run. Use this or warmup_ratio, not both."""
    weight_decay: NonNegative = 0.0
    """Pulls weights towards 0 at each step, by this times the learning rate.
    How: It is not applied to norms, biases and other vectors, such as attention sinks.
    When: 0 to 0.1. It matters in long runs, but little in a few epochs of fine-tuning."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this norm over all parameters. 0 turns it off.
    How: The norm is computed over all processes after gradients are reduced; the log shows it before clipping.
    When: 1 is usual. Look at the logged norm before changing it: a run whose norm is always above this learns more
    slowly than its learning rate suggests."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1), _ADAM] = 0.9
    """Decay rate of Adam's first moment, the running mean of gradients.
    How: The mean is over about 1 / (1 − beta1) steps.
    When: Leave it at 0.9."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1), _ADAM] = 0.999
    """Decay rate of Adam's second moment, the running mean of squared gradients.
    How: The mean is over about 1 / (1 − beta2) steps.
    When: 0.95 is usual for large batches and long runs: it recovers from a spike of gradients sooner."""
    adam_epsilon: Annotated[Positive, _ADAM] = 1e-8
    """Added to Adam's denominator, so that it is not almost zero.
    How: The denominator is the square root of the second moment.
    When: Leave it; 1e-6 may help against spikes in 16-bit precision."""
    sgd_momentum: Annotated[float, Field(ge=0, lt=1), Needs("optimizer.optimizer", ("sgd",))] = 0.9
    """With optimizer: sgd: its momentum; others do not use it.
    How: Each update is this fraction of the last one plus the new gradient. 0 keeps no state.
    When: 0.9 is usual."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1), _MUON] = 0.95
    """Decay rate of the running mean of gradients that optimizer: muon orthogonalizes.
    How: The mean is over about 1 / (1 − momentum) steps.
    When: Leave it at 0.95."""
    muon_nesterov: Annotated[bool, _MUON] = True
    """With optimizer: muon: add the new gradient once more to the mean that is orthogonalized (Nesterov momentum).
    How: Momentum times the mean plus (1 − momentum) times the gradient is orthogonalized. false orthogonalizes the mean
    itself.
    When: Leave it at true, the default of torch.optim.Muon."""
    muon_scale: Annotated[Positive, _MUON] = 0.2
    """Scale of the updates of optimizer: muon, relative to the learning rate.
    How: An orthogonal matrix is multiplied by this and by the square root of its longer side, so that the root mean
    square of an update's elements is this times the learning rate.
    When: 0.2 makes updates as large as AdamW's, whose learning rate and weight decay then suit both. Megatron-Core's
    own default is 1."""
    num_train_epochs: Annotated[Positive, "epochs", _EPOCHS, Needs("optimizer.max_steps", (-1, 0))] = 3.0
    """Number of passes over the training data, which may be a fraction. If max_steps is set, it decides instead.
    How: Every epoch has a different order, and its last batch may be short. The learning-rate schedule ends with the
    last step.
    When: 1 to 3 for fine-tuning. Watch the evaluation loss: with more passes the model memorizes the rows."""
    max_steps: Annotated[int, Field(ge=-1), "steps", STEPS] = -1
    """Ends training after this many steps, regardless of num_train_epochs. With -1 that decides.
    How: The learning-rate schedule is that of a run of this many steps.
    When: Set it with streaming, and for short test runs."""

    exp_avg_dtype: Annotated[Literal["fp32", "bf16"], _STATE] = "fp32"
    """dtype of Adam's first moment.
    How: The update is computed in fp32 and the moment is stored in this dtype.
    When: bf16 if memory is short and a little rounding does no harm; shard the state with use_distributed_optimizer
    first.
    - fp32: 4 bytes per parameter
    - bf16: 2 bytes per parameter, rounded at each step"""
    exp_avg_sq_dtype: Annotated[Literal["fp32", "bf16"], _STATE] = "fp32"
    """dtype of Adam's second moment.
    How: The update is computed in fp32 and the moment is stored in this dtype. With a beta2 near 1 a step changes the
    moment by less than bf16 can represent, so it follows the gradients late.
    When: Keep fp32 unless memory is short; lower adam_beta2 with bf16.
    - fp32: 4 bytes per parameter
    - bf16: 2 bytes per parameter, rounded at each step"""
    optimizer_cpu_offload: Annotated[bool, _STATE, _SHARDED] = False
    """Keep Adam's moments and the master weights in host memory, and update there.
    How: It saves 8 bytes of GPU memory for each parameter of a process's shard, 12 in bf16 or fp16; the host needs as
    many for all its processes together. Each step sends gradients to the host and weights back, chunk by chunk, while
    the host computes. It needs use_distributed_optimizer.
    When: Use it if nothing else makes the run fit. Use many micro-batches in a step, so that the update is a small part
    of it; `megatune plan` estimates its time."""
    optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1), _OFFLOADED] = 1.0
    """With optimizer_cpu_offload: the fraction of the parameters whose state is kept on the host.
    How: Parameters are taken in their order until the fraction is reached; the others are updated on the GPU.
    When: Lower it as far as memory allows: the more state is on the GPU, the shorter the steps."""


class PrecisionSettings(Group):
    bf16: bool = False
    """Compute in bfloat16, with master weights and, by default, gradients in float32.
    How: Weights take 2 bytes per parameter, gradients 4, master weights 4 and Adam's moments 8. bfloat16 has float32's
    range, so no loss scaling is needed.
    When: Leave it unset: it is true on GPUs since Ampere, where it halves the memory of activations and makes matrix
    products several times faster, and false elsewhere."""
    fp16: Annotated[bool, _NO_BF16] = False
    """Compute in float16 with loss scaling.
    How: The loss is multiplied by a scale that halves when gradients overflow and grows while they do not; steps that
    overflow are skipped.
    When: For GPUs without bfloat16 (V100, T4). Use bf16 elsewhere."""

    accumulate_allreduce_grads_in_fp32: Annotated[bool, _SHORT] = True
    """With bf16 or fp16: accumulate and reduce gradients in float32. false does so in the model's dtype.
    How: Gradients of all micro-batches are added in one buffer, 4 bytes per parameter in float32 and 2 otherwise, which
    is then reduced over data-parallel processes.
    When: false if memory is short and a step has few micro-batches: it rounds at every addition, and halves the
    communication."""
    fp8: Annotated[Literal["tensorwise", "rowwise"] | None, _BF16, _NOT_QUANTIZED] = None
    """With bf16: compute the matrix products of attention's linear layers and dense feed-forwards in 8-bit floats. null
    does not.
    How: Inputs and weights are scaled by their largest absolute values and rounded to E4M3 for each product, and so are
    gradients of outputs (E5M2 with tensorwise). Weight gradients, experts, router, norms, embedding, output layer and
    vision encoder stay in bf16, and so do the weights and stored activations. It needs an Ada or Hopper GPU, or a newer
    one.
    When: Leave it unset: its speed and its losses have not been measured on a GPU yet. To try it, compare the losses of
    some hundred steps with those of bf16.
    - tensorwise: one scale for a whole matrix: fewer passes over memory, coarser if a few values are large
    - rowwise: one scale for each token and each row of a weight"""

    @property
    def params_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The name of the torch dtype that the model computes in."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def params_itemsize(self) -> int:
        """Bytes per element of that dtype."""
        return 2 if self.bf16 or self.fp16 else 4
