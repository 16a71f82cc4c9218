"""What trades memory for time, and which kernels compute. None of it changes what is learned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import EXPERTS, Count, Group, Needs

_FULL = Needs("recompute.recompute_granularity", ("full",), "it says how whole layers are recomputed")
_SELECTIVE = Needs("recompute.recompute_granularity", ("selective",))


class RecomputeSettings(Group):
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in the backward pass instead of keeping them. null keeps all.
    How: What is recomputed keeps only its inputs, and its forward pass runs once more. The numbers stay the same, bit
    for bit.
    When: selective with modules that save something (`recompute_modules`) first, where a run does not fit; full where
    that is not enough. A run that fits without is faster without.
    - full: keeps only the inputs of layers: the least memory, about a third more time
    - selective: recomputes recompute_modules only; their default saves next to nothing"""
    recompute_method: Annotated[Literal["uniform", "block"] | None, _FULL] = None
    """With full: which layers are recomputed. null takes uniform.
    How: uniform keeps one input for each group of recompute_num_layers layers; block recomputes the first
    recompute_num_layers of each stage and keeps the rest whole.
    When: block where memory is left: lower recompute_num_layers until it is used.
    - uniform: recomputes all layers, in groups
    - block: recomputes the first layers of each stage only"""
    recompute_num_layers: Annotated[Count, "layers", _FULL] | None = None
    """With full: layers of one recomputed group (uniform) or recomputed layers of each stage (block). null takes 1 with
    uniform, and all with block.
    How: A larger group keeps fewer inputs, and needs the activations of the whole group at once in its backward pass.
    When: With uniform leave it at 1; with block set as many as the memory needs."""
    recompute_modules: Annotated[
        list[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"]], _SELECTIVE
    ] = Field(default=["core_attn"])
    """With selective: what is recomputed.
    How: Each module keeps its inputs and runs its forward pass once more. mla_up_proj, moe, moe_act and shared_experts
    are of the models that have them. The default, core_attn, costs time and saves next to nothing: no kernel keeps
    attention's scores but torch's own on GPUs without flash attention (V100, T4, fp32).
    When: Add modules until the run fits, the cheap ones first: layernorm, moe_act and mla_up_proj, then mlp,
    shared_experts and moe.
    - core_attn: attention between its inputs and its output; frees hardly anything
    - layernorm: the two norms of a layer
    - mlp: the dense feed-forward
    - moe: the sparse feed-forward, dispatching tokens included
    - moe_act: the experts' activation; needs moe_grouped_gemm
    - mla_up_proj: the up-projections of multi-latent attention
    - shared_experts: the shared experts"""
    moe_layer_recompute: Annotated[bool, Needs(EXPERTS, why="the model has none")] = False
    """Recompute whole expert layers in the backward pass: selective with the module moe.
    How: Tokens are dispatched to their experts a second time. With full and block it holds for the layers that are not
    recomputed as a whole.
    When: Where the activations of experts do not fit, above all when experts are unevenly busy."""

    @property
    def selective_modules(self) -> tuple[str, ...]:
        """What is recomputed inside of layers, moe_layer_recompute among it; nothing where layers are as a whole."""
        if self.recompute_granularity == "full":
            return ()
        modules = self.recompute_modules if self.recompute_granularity == "selective" else []
        return tuple(dict.fromkeys((*modules, *(("moe",) if self.moe_layer_recompute else ()))))


_NOT_CUDNN = Needs(
    "performance.attention_backend",
    ("auto", "flash", "unfused", "local"),
    "cuDNN's attention adds gradients in the order in which they arrive",
    "write `attention_backend: auto`, or remove {name}",
)


class PerformanceSettings(Group):
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Which kernel attends.
    How: The banner says which one runs. Kernels that never hold all scores take memory in proportion to the length of a
    row, the others to its square.
    When: Leave it at auto; name one to compare kernels, or to have the run refused where it is missing.
    - auto: the fastest that device and shapes allow
    - flash: flash attention; needs bf16 or fp16 on a GPU
    - fused: cuDNN's kernel, for rows of one document
    - unfused: plain matrix products, with all scores in memory
    - local: the same as unfused"""
    transformer_impl: Literal["native", "auto", "transformer_engine", "local"] = "native"
    """Whose linear layers a layer is made of, with the norms before them: the engine's, or Transformer Engine's.
    How: The same weights, checkpoints and results but for rounding. Attention, router and experts stay the engine's.
    The banner says what is used.
    When: Leave it unset: native needs nothing, and no GPU has shown yet that the other one is faster.
    - native: the engine's own
    - auto: Transformer Engine's where it is installed, on a GPU, if the model and its training allow it
    - transformer_engine: Transformer Engine's; the run is refused where that cannot be
    - local: the same as native"""
    bias_activation_fusion: bool = False
    """Compute the feed-forward's activation (SwiGLU) in one pass over memory.
    How: It keeps only its input for the backward pass, instead of input and silu(gate).
    When: Leave it unset: it is true on GPUs, for less memory and time. Results differ in the last bits."""
    apply_rope_fusion: bool = False
    """Compute rotary embeddings in one pass over memory where that is possible.
    How: It replaces several small operators on queries and keys, and keeps nothing more for the backward pass.
    When: Leave it unset: it is true on GPUs."""
    cross_entropy_loss_fusion: bool = True
    """Compute the output layer and the loss together, a chunk of tokens at a time.
    How: The logits of all tokens are never in memory; the backward pass computes each chunk's again. false computes all
    logits first: several times tokens × vocabulary × 4 bytes.
    When: Leave it on: with vocabularies of 150,000 and micro-batches of many tokens it saves gigabytes for hardly any
    time."""
    rms_norm_fusion: bool = True
    """Normalize in one pass over memory each way, keeping one number a token for the backward pass.
    How: false computes it operator by operator and keeps an fp32 copy of the input.
    When: Leave it on."""
    compile_operators: bool = True
    """On a GPU, let torch.compile make one kernel of each of the engine's fused operators: norms that torch has none
    for, SwiGLU, rotary embeddings, roundings to 8 bits, and parts of the loss.
    How: It takes some seconds in the first steps. Without Triton and a C compiler, and on a CPU, they run operator by
    operator in any case; the banner says so.
    When: Leave it on; turn it off to find out whether a failure is the compiler's."""
    deterministic_mode: Annotated[bool, _NOT_CUDNN] = False
    """On GPUs, too, let every run of one layout compute the same bits.
    How: A CPU does in any case. On a GPU some kernels add numbers in the order in which they arrive, above all flash
    attention in its backward pass. With this setting torch takes others, which are slower; a run that needs an operator
    of which torch has no other ends with its name.
    When: Turn it on to compare two runs, or a resumed run and an uninterrupted one, bit for bit."""
    gradient_accumulation_fusion: bool = False
    """Add weight gradients straight into the gradient buffer, without a copy in between.
    How: The matrix product that makes a weight's gradient adds to the buffer, in its dtype. It saves a pass over memory
    for each weight, and a rounding to 16 bits. The products of experts run one after the other for that.
    When: Leave it unset: it is true on GPUs. Set false where a rank has many small experts and its GPU waits for the
    host."""
    manual_gc: bool = False
    """Collect Python's garbage at the same steps on all processes, instead of whenever each process does.
    How: A collection takes tens of milliseconds, and all wait for the process that does it.
    When: Turn it on for runs of many processes."""
    manual_gc_interval: Annotated[Count, "steps", Needs("performance.manual_gc", (True,))] = 50
    """With manual_gc: steps from one collection to the next.
    How: Between collections only what is in reference circles stays in the host's memory.
    When: Raise it where steps are short."""
