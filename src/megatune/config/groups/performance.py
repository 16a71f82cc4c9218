"""Settings that trade memory for time, and of kernels. None of them changes what is learned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import EXPERTS, Count, Group, Needs
from megatune.references import remove, write

_FULL = Needs("recompute.recompute_granularity", ("full",), "it sets how whole layers are recomputed")
_SELECTIVE = Needs("recompute.recompute_granularity", ("selective",))


class RecomputeSettings(Group):
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass instead of storing them. null stores all.
    How: A recomputed module stores only its inputs, and its forward pass runs once more. Results are the same bit for
    bit.
    When: If a run does not fit, try selective with `recompute_modules` first, then full. A run that fits without
    recomputation is faster without it.
    - full: stores only the inputs of layers: the least memory, about a third more time
    - selective: recomputes recompute_modules only; their default saves next to nothing"""
    recompute_method: Annotated[Literal["uniform", "block"] | None, _FULL] = None
    """With full: which layers are recomputed. null takes uniform.
    How: uniform stores one input for each group of recompute_num_layers layers; block recomputes the first
    recompute_num_layers of each stage and stores all activations of the others.
    When: block if memory is left: lower recompute_num_layers until it is used.
    - uniform: recomputes all layers, in groups
    - block: recomputes the first layers of each stage only"""
    recompute_num_layers: Annotated[Count, "layers", _FULL] | None = None
    """With full: layers of one recomputed group (uniform) or recomputed layers of each stage (block). null takes 1 with
    uniform, and all with block.
    How: A larger group stores fewer inputs, but its backward pass needs the activations of the whole group at once.
    When: With uniform leave it at 1; with block take as many layers as memory requires."""
    recompute_modules: Annotated[
        list[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts"]], _SELECTIVE
    ] = Field(default=["core_attn"])
    """With selective: the modules that are recomputed.
    How: Each module stores its inputs and runs its forward pass once more. mla_up_proj, moe, moe_act and shared_experts
    are for models that have them. The default, core_attn, costs time and saves hardly any memory: only torch's own
    attention, on GPUs without flash attention (V100, T4, fp32), stores attention scores.
    When: Add modules until the run fits, the cheap ones first: layernorm, moe_act and mla_up_proj, then mlp,
    shared_experts and moe.
    - core_attn: attention without its projections; saves hardly any memory
    - layernorm: the two norms of a layer
    - mlp: the dense feed-forward
    - moe: the sparse feed-forward, dispatching tokens included
    - moe_act: the experts' activation; needs moe_grouped_gemm
    - mla_up_proj: the up-projections of multi-head latent attention
    - shared_experts: the shared experts"""
    moe_layer_recompute: Annotated[bool, Needs(EXPERTS, why="the model has none")] = False
    """Recompute whole expert layers in the backward pass: selective with the module moe.
    How: Tokens are dispatched to their experts a second time. With full and block it applies to the layers that are not
    fully recomputed.
    When: Use it if the activations of experts do not fit, especially if their load is unbalanced."""

    @property
    def selective_modules(self) -> tuple[str, ...]:
        """The recomputed modules, with that of moe_layer_recompute; none if whole layers are recomputed."""
        if self.recompute_granularity == "full":
            return ()
        modules = self.recompute_modules if self.recompute_granularity == "selective" else []
        return tuple(dict.fromkeys((*modules, *(("moe",) if self.moe_layer_recompute else ()))))


_NOT_CUDNN = Needs(
    "performance.attention_backend", ("auto", "flash", "unfused", "local"),
    "the backward pass of cuDNN's attention is not deterministic",
    f"{write('attention_backend', 'auto')}, or {remove('{name}')}",
)  # fmt: skip


class PerformanceSettings(Group):
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """The attention kernel.
    How: The banner shows which one is used. Kernels that never store all scores need memory proportional to the length
    of a row, the others to its square.
    When: Leave it at auto; name one to compare kernels, or to have the run refused if it is missing.
    - auto: the fastest that device and shapes support
    - flash: flash attention; needs bf16 or fp16 on a GPU
    - fused: cuDNN's kernel, for rows of one sequence
    - unfused: plain matrix products, with all scores in memory
    - local: the same as unfused"""
    transformer_impl: Literal["native", "auto", "transformer_engine", "local"] = "native"
    """The implementation of linear layers and of the norms before them: the engine's own, or Transformer Engine's.
    How: Weights and checkpoints are the same, and results differ by rounding only. Attention, router and experts remain
    the engine's. The banner shows what is used.
    When: Leave it unset: native needs no further package, and no measurement on a GPU has shown yet that the other one
    is faster.
    - native: the engine's own
    - auto: Transformer Engine's on a GPU, if it is installed and the model and its training support it
    - transformer_engine: Transformer Engine's; the run is refused if that is not possible
    - local: the same as native"""
    bias_activation_fusion: bool = False
    """Compute the feed-forward's activation (SwiGLU) in one pass over memory.
    How: It stores only its input for the backward pass, instead of input and silu(gate).
    When: Leave it unset: it is true on GPUs, where it saves memory and time. Results differ in the last bits."""
    apply_rope_fusion: bool = False
    """Compute rotary embeddings in one pass over memory if possible.
    How: It replaces several small operators on queries and keys, and stores nothing more for the backward pass.
    When: Leave it unset: it is true on GPUs."""
    cross_entropy_loss_fusion: bool = True
    """Compute the output layer and the loss together, a chunk of tokens at a time.
    How: The logits of all tokens are never in memory at once; the backward pass recomputes each chunk's. false computes
    all logits first: several times tokens × vocabulary × 4 bytes.
    When: Leave it on: with vocabularies of 150,000 and micro-batches of many tokens it saves gigabytes at hardly any
    cost in time."""
    rms_norm_fusion: bool = True
    """Compute RMSNorm in one pass over memory each way, and store one number per token for the backward pass.
    How: false computes it operator by operator and stores an fp32 copy of the input.
    When: Leave it on."""
    compile_operators: bool = True
    """On a GPU: compile each of the engine's fused operators to one kernel with torch.compile: norms that torch has no
    kernel for, SwiGLU, rotary embeddings, quantization to 8 bits, and parts of the loss.
    How: It takes some seconds in the first steps. Without Triton and a C compiler, and on a CPU, they always run
    operator by operator; the banner says so.
    When: Leave it on; turn it off to find out whether the compiler causes a failure."""
    deterministic_mode: Annotated[bool, _NOT_CUDNN] = False
    """Make results reproducible bit for bit on GPUs, too, for runs in the same layout.
    How: On a CPU they always are. On a GPU some kernels add numbers in a varying order, above all the backward pass of
    flash attention. With this setting torch uses deterministic kernels, which are slower; a run that needs an operator
    without one stops with its name.
    When: Turn it on to compare two runs, or a resumed run with an uninterrupted one, bit for bit."""
    gradient_accumulation_fusion: bool = False
    """Add weight gradients directly to the gradient buffer, without a copy in between.
    How: The matrix product that computes a weight's gradient adds to the buffer, in its dtype. It saves a pass over
    memory for each weight, and a rounding to 16 bits. In return the products of experts run one after the other.
    When: Leave it unset: it is true on GPUs. Set it to false if a rank has many small experts and its GPU waits for the
    host."""
    manual_gc: bool = False
    """Run Python's garbage collection at the same steps on all processes, instead of at any time on each.
    How: A collection takes tens of milliseconds, and all processes wait for the one that runs it.
    When: Turn it on for runs with many processes."""
    manual_gc_interval: Annotated[Count, "steps", Needs("performance.manual_gc", (True,))] = 50
    """With manual_gc: steps from one collection to the next.
    How: Between collections only objects in reference cycles stay in host memory.
    When: Raise it if steps are short."""
