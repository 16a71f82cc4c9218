"""Which parameters are trained: all, some layers or adapters beside them; and tokens' weights. LLaMA-Factory's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Mark, Needs, Positive

_TYPE = "finetuning.finetuning_type"
_FREEZE = Needs(_TYPE, ("freeze",), "it says what freeze trains", is_method=True, is_lenient=True)
_LORA = Needs(_TYPE, ("lora",), "it says what lora trains", is_method=True, is_lenient=True)
_ADAPTERS = Needs(_TYPE, ("lora",), "it says what lora trains", is_method=True)
_FROZEN = Needs(_TYPE, ("lora",), "an update is much smaller than a step between values of so few bits")
_SFT = Needs("run.stage", ("sft",), "the paper derives it for answers, and other stages have losses of their own")
_FOUR_BITS = Needs("finetuning.quantization_bit", (4,), "it says how values of 4 bits are made")
_NO_DORA = Needs(
    "finetuning.use_dora",
    (False,),
    "rows are divided by the lengths of the whole adapted matrix, which sees all inputs",
)
_ADAM = Needs(
    "optimizer.optimizer",
    ("adam",),
    "the ratio is derived for Adam, whose steps do not depend on how large gradients are",
)
_OLD_ADAPTERS = Needs(
    "finetuning.adapter_name_or_path",
    why="a run without adapters to start from trains a new one anyway",
    fix="remove `create_new_adapter`, or write `adapter_name_or_path: FOLDER`",
)


class FinetuningSettings(Group):
    finetuning_type: Literal["full", "freeze", "lora"] = "full"
    """Which parameters are trained.
    How: full keeps weights, gradients and optimizer state of every parameter: 18 bytes each in bf16, 16 in fp32,
    sharded by the layout and the distributed optimizer. Frozen parameters are weights only, and layers before the first
    one that is trained keep no activations. Adapters are fp32, 16 bytes for each of their few parameters.
    When: full learns most. lora where memory is short, or where one model is to serve many tasks; freeze where time is
    short, or to change little of the model.
    - full: trains every parameter
    - freeze: trains the layers of freeze_trainable_layers, and what freeze_extra_modules names
    - lora: trains low-rank adapters beside frozen matrices, in peft's format"""
    freeze_trainable_layers: Annotated[int, "layers", _FREEZE] = 2
    """With freeze: the layers that are trained, the last ones; a negative number trains the first ones.
    How: The other layers keep their weights, and have no gradients and no optimizer state.
    When: Raise it until the run learns what it should; the last ones cost least, since gradients end at the first layer
    that is trained."""
    freeze_trainable_modules: Annotated[list[str], _FREEZE] = Field(default=["all"])
    """With freeze: the modules of the trained layers that are trained; all trains them whole.
    How: They are Transformers' modules directly inside a layer: self_attn, mlp, input_layernorm,
    post_attention_layernorm.
    When: Name mlp alone to teach facts and leave attention as it is; leave it at all otherwise."""
    freeze_extra_modules: Annotated[list[str], _FREEZE] = Field(default=[])
    """With freeze: modules outside of the layers that are trained as well.
    How: They are Transformers' modules: embed_tokens, norm, lm_head; the norm is the one behind the last layer.
    When: Set it for new tokens, whose embeddings must be learnt."""
    use_llama_pro: Annotated[bool, _FREEZE] = False
    """With freeze: train layers spread evenly over the model, those that LLaMA Pro's expansion added.
    How: Layers are counted in as many groups as freeze_trainable_layers says, and the last layer of each is trained.
    When: For checkpoints that LLaMA Pro's script expanded by as many layers."""
    use_dft_loss: Annotated[bool, _SFT] = False
    """Weigh each token of the loss by the probability that the model gives it (DFT, arXiv:2508.05629).
    How: The weight has no gradient. Tokens that the model finds likely are learnt most, and surprising ones hardly;
    plain cross-entropy does the opposite. Evaluation computes the same loss, which has no perplexity.
    When: For answers that need reasoning, of a model that mostly knows how; not for new facts, which are surprising."""
    freeze_vision_tower: bool = True
    """Of a vision-language model: leave the vision encoder as it is.
    How: A frozen encoder has no gradients and no optimizer state, and keeps no activations.
    When: Turn it off for images unlike those of the pretraining, with a smaller learning rate of its own, vision_lr."""
    freeze_multi_modal_projector: bool = True
    """Of a vision-language model: leave the merger between vision encoder and language model as it is.
    How: A frozen merger has no gradients and no optimizer state.
    When: Turn it off together with freeze_vision_tower, or alone to align encoder and language model anew."""
    freeze_deepstack_mergers: bool | None = None
    """Of Qwen3-VL: leave the mergers as they are that bring earlier layers of the vision encoder to the first layers of
    the language model. null does as freeze_vision_tower says.
    How: LLaMA-Factory counts them to the vision encoder, Megatron-SWIFT to the merger.
    When: Set it to false to train them with the merger, beside a frozen encoder."""
    freeze_language_model: bool = False
    """Of a vision-language model: leave the language model as it is.
    How: Its weights have no gradients and no optimizer state; gradients still pass through it to encoder and merger.
    When: Turn it on to train encoder or merger alone."""
    quantization_bit: Annotated[Literal[4, 8] | None, _FROZEN] = None
    """With lora: keep the frozen matrices of linear layers in so many bits (QLoRA). null keeps them as they are.
    How: Each Hugging Face matrix is quantized as it is loaded, before it is cut, and a matrix is made again in the
    dtype of the run for each product. Word embedding, output layer, norms, routers and a vision encoder are not
    quantized.
    When: 4 where the model does not fit otherwise: its matrices take about a quarter of the memory, and steps take
    longer. 8 changes the model less, and takes half.
    - 4: 4 bits with a scale for each 64 elements, see quantization_type
    - 8: 8 bits with a scale for each row, as LLM.int8 keeps weights; activations are not quantized"""
    quantization_type: Annotated[Literal["nf4", "fp4"], _FOUR_BITS] = "nf4"
    """With quantization_bit 4: the 16 values that elements have.
    How: Both are those of bitsandbytes.
    When: Leave it at nf4: for the same memory the model changes less.
    - nf4: quantiles of a normal distribution, which weights are near to
    - fp4: floating-point numbers with a sign, two bits of exponent and one of fraction"""
    double_quantization: Annotated[bool, _FOUR_BITS] = True
    """With quantization_bit 4: keep scales in 8 bits as well.
    How: 256 of them share a statistic in 32 bits; an element then takes 4.13 bits instead of 4.5.
    When: Leave it on. Off, a step is a little faster."""
    lora_rank: Annotated[Count, _LORA] = 8
    """With lora: the rank of the adapters.
    How: A matrix A of rank × in and one B of out × rank are trained for each adapted matrix; their product, scaled by
    lora_alpha / rank, is added to it.
    When: 8 to 64: raise it where the task is far from what the model knows. Memory of the adapters is in proportion."""
    lora_alpha: Annotated[Count, _LORA] | None = None
    """With lora: the adapters' product is scaled by lora_alpha / lora_rank. null takes twice the rank.
    How: It works like a learning rate of the adapters.
    When: Leave it at null, or write what a recipe says."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1), _LORA, _NO_DORA] = 0.0
    """With lora: the share of an adapter's inputs that are dropped in training.
    How: The frozen matrix sees all inputs; matrices that the engine stacks, as those of queries, keys and values, drop
    the same ones. Adapters of routed experts take none, as in peft.
    When: 0.05 to 0.1 for little data trained for many epochs."""
    lora_target: Annotated[list[str], _LORA] = Field(default=["all"])
    """With lora: the linear layers with adapters; all takes every one of attention and feed-forward.
    How: Names are those of Transformers' modules, or ends of them (q_proj, self_attn.q_proj), Megatron-Core's of its
    layers (linear_qkv, linear_proj, linear_fc1, linear_fc2), or regular expressions of whole names. Experts' matrices
    are among them, and with freeze_vision_tower: false those of the vision encoder; routers, embeddings and the output
    layer are not.
    When: all learns best. q_proj,v_proj is what small adapters usually have; leave experts out where they are many."""
    additional_target: Annotated[list[str], _LORA] = Field(default=[])
    """With lora: modules outside of the layers that are trained whole and saved with the adapters.
    How: Names are those of Transformers' modules: embed_tokens, norm, lm_head. They have gradients and optimizer state
    as in full fine-tuning.
    When: Set it for new tokens, whose embeddings must be learnt."""
    use_rslora: Annotated[bool, _LORA] = False
    """With lora: scale by lora_alpha / √rank instead of lora_alpha / rank.
    How: The size of an update then does not shrink as the rank grows.
    When: For ranks above 32."""
    use_dora: Annotated[bool, _LORA] = False
    """With lora: train a length for each row of a matrix beside its direction.
    How: The adapted matrix is normalized row by row and multiplied by the trained lengths, which start as the matrix's
    own. Each step computes the rows' lengths anew.
    When: For small ranks, at the cost of time."""
    loraplus_lr_ratio: Annotated[Positive, _LORA, _ADAM] | None = None
    """With lora: B, the second of an adapter's matrices, learns at this many times the learning rate (LoRA+). null is
    off.
    How: B starts at zero, and A does not; with one rate for both, B is too slow in wide models. Lengths of rows
    (use_dora) learn at B's rate.
    When: 16 is usual; lower learning_rate where the loss then jumps."""
    adapter_name_or_path: Annotated[list[str], Mark.NAME, _ADAPTERS] = Field(default=[])
    """With lora: folders of adapters, in peft's format, to start from.
    How: All but the last are merged into the model; the last one is trained further, unless create_new_adapter says
    otherwise.
    When: Set it to train an adapter further, or a new one on top of others."""
    create_new_adapter: Annotated[bool, _LORA, _OLD_ADAPTERS] = False
    """With adapter_name_or_path: merge all of its adapters, and train a new one.
    How: The new adapter starts at zero beside the merged model.
    When: To add a task to a model that adapters changed before."""

    def __hash__(self) -> int:
        """Hash some of the settings: lists have no hash of their own, and equal settings have the same one."""
        return hash((self.finetuning_type, self.freeze_trainable_layers, self.lora_rank, *self.lora_target))
