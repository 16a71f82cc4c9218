"""Settings of which parameters are trained, of the losses of tokens, and of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Mark, Needs, NonNegative, Positive
from megatune.references import ref, remove, write

_TYPE = "finetuning.finetuning_type"
_FREEZE = Needs(_TYPE, ("freeze",), "it is a setting of freeze", is_method=True, is_lenient=True)
_LORA = Needs(_TYPE, ("lora",), "it is a setting of lora", is_method=True, is_lenient=True)
_ADAPTERS = Needs(_TYPE, ("lora",), "it is a setting of lora", is_method=True)
_DECODER = Needs("finetuning.freeze_language_model", (False,), "it names parts of the language model")
_FROZEN = Needs(_TYPE, ("lora",), "quantized weights cannot be trained: updates are smaller than their resolution")
_SFT = Needs("run.stage", ("sft",), "it is defined for answers, and other stages have different losses")
_LOSS_OF_TOKENS = Needs("run.stage", ("pt", "sft"), "other stages have no loss per token")
_NO_DFT = Needs("finetuning.use_dft_loss", (False,), "a run has one token loss")
_NO_EAFT = Needs("finetuning.use_eaft_loss", (False,), "a run has one token loss")
_EAFT = Needs("finetuning.use_eaft_loss", (True,))
_TEXTS = Needs("run.stage", ("pt", "sft"), "other stages compare answers, which must not differ by random noise")
_FOUR_BITS = Needs("finetuning.quantization_bit", (4,), "it sets how 4-bit values are quantized")
_NO_DORA = Needs(
    "finetuning.use_dora",
    (False,),
    "rows are divided by their norms in the adapted matrix, which is computed without dropout",
)
_ADAM = Needs(
    "optimizer.optimizer",
    ("adam",),
    "the ratio is derived for Adam, whose updates do not depend on the scale of gradients",
)
_OLD_ADAPTERS = Needs(
    "finetuning.adapter_name_or_path",
    why="a run without adapters to start from trains a new one anyway",
    fix=f"{remove('create_new_adapter')}, or {write('adapter_name_or_path', 'FOLDER')}",
)
# Losses that need no reference model.
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
# Losses whose definition has label smoothing.
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "cpo")
_STAGE, _LOSS = "run.stage", "preference.pref_loss"
_DPO = Needs(_STAGE, ("dpo",), "it sets how answers are compared", is_method=True)
_DPO_KTO = Needs(_STAGE, ("dpo", "kto"), "it sets how answers are compared", is_method=True)
_KTO = Needs(_STAGE, ("kto",), "it sets the loss of single desirable and undesirable answers", is_method=True)
_RM = Needs(_STAGE, ("rm",), "it keeps the scores of a reward model around 0", is_method=True)
_LABELS = Needs(_LOSS, SMOOTHED, f"it is part of {', '.join(SMOOTHED)} only")
_SIMPO = Needs(_LOSS, ("simpo",), "it is a parameter of simpo only")
_DISCOPOP = Needs(_LOSS, ("discopop",), "it is a parameter of discopop only")
_BASE = Needs(
    "preference.ref_model",
    why="adapters are merged into the model that it names",
    fix=f"{write('ref_model', 'FOLDER')}, which may be that of {ref('model_name_or_path')}, or {remove('{name}')}",
)


class FinetuningSettings(Group):
    finetuning_type: Literal["full", "freeze", "lora"] = "full"
    """Which parameters are trained.
    How: full keeps weights, gradients and optimizer state of every parameter: 18 bytes each in bf16, 16 in fp32,
    sharded by the layout and the distributed optimizer. Frozen parameters take their weights only, and layers before
    the first trained one keep no activations. Adapters are fp32, 16 bytes for each of their few parameters.
    When: full learns most. lora if memory is short, or if one base model serves many tasks; freeze if time is short, or
    to change little of the model.
    - full: trains every parameter
    - freeze: trains the layers of freeze_trainable_layers, and the modules of freeze_extra_modules
    - lora: trains low-rank adapters of frozen matrices, in peft's format"""
    freeze_trainable_layers: Annotated[int, "layers", _FREEZE, _DECODER] = 2
    """With freeze: how many of the last layers are trained; a negative number trains the first ones.
    How: The other layers keep their weights, without gradients and optimizer state.
    When: Raise it until the run learns the task; the last layers cost least, since the backward pass ends at the first
    trained layer."""
    freeze_trainable_modules: Annotated[list[str], _FREEZE, _DECODER] = Field(default=["all"])
    """With freeze: the modules that are trained inside the trained layers; all trains whole layers.
    How: They are Transformers' modules directly inside a layer: self_attn, mlp, input_layernorm,
    post_attention_layernorm.
    When: mlp alone teaches facts and leaves attention unchanged; leave it at all otherwise."""
    freeze_extra_modules: Annotated[list[str], _FREEZE, _DECODER] = Field(default=[])
    """With freeze: modules outside of the layers that are also trained.
    How: They are Transformers' modules: embed_tokens, norm, lm_head; norm is the one after the last layer.
    When: Set it for new tokens, whose embeddings must be trained."""
    use_llama_pro: Annotated[bool, _FREEZE, _DECODER] = False
    """With freeze: train the evenly spread layers that LLaMA Pro's expansion added.
    How: The layers are divided into freeze_trainable_layers groups, and the last layer of each group is trained.
    When: For checkpoints that LLaMA Pro's script expanded by this many layers."""
    use_dft_loss: Annotated[bool, _SFT] = False
    """Weight the loss of each token by the probability that the model gives it (DFT, arXiv:2508.05629).
    How: The weight has no gradient. The model learns most from tokens that it finds likely, and hardly from surprising
    ones; plain cross-entropy does the opposite. Evaluation computes the same loss, which has no perplexity.
    When: For answers that need reasoning, with a model that can mostly solve the tasks; not for new facts, which are
    surprising."""
    use_eaft_loss: Annotated[bool, _SFT, _NO_DFT] = False
    """Weight the loss of each token by the entropy of the model's prediction there (EAFT, arXiv:2601.02151).
    How: The weight is the entropy of the 20 most likely tokens, divided by 3, to the power of eaft_alpha, and has no
    gradient. If the model is sure of another token than the label, it hardly learns. Evaluation computes the same loss,
    which has no perplexity.
    When: For a new domain, if the model should keep its abilities; not for facts that contradict what it knows."""
    eaft_alpha: Annotated[NonNegative, _EAFT] = 1.0
    """With use_eaft_loss: the exponent of the entropy in a token's weight.
    How: 0 weights all tokens equally; the larger it is, the less the model learns where it is sure.
    When: Leave it at 1; lower it if the loss falls too slowly."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1), _LOSS_OF_TOKENS, _NO_DFT, _NO_EAFT] = 0.0
    """Move this fraction of each label's probability evenly to the whole vocabulary.
    How: The loss of a token is (1 - ε) times its own and ε times the mean of -log p over all tokens of the vocabulary,
    as in Transformers. Evaluation computes the same loss, which has no perplexity.
    When: 0.05 to 0.1 for noisy answers, or if the model becomes overconfident; it makes every wrong token a little more
    likely."""
    neftune_noise_alpha: Annotated[Positive, _TEXTS] | None = None
    """Add uniform noise of at most this number divided by √(L · h) to word embeddings in training (NEFTune,
    arXiv:2310.05914). null adds none.
    How: L is the length of a sequence in tokens, without padding and without other sequences in the same packed row,
    and h the hidden size. The noise depends on seed, step and tokens only: it is the same in every layout and after a
    resume. Evaluation adds none.
    When: 5 for small instruction data, if answers become too short or repeat the data; 10 to 15 for longer answers."""
    freeze_vision_tower: bool = True
    """For vision-language models: freeze the vision encoder.
    How: A frozen encoder has no gradients and no optimizer state, and stores no activations.
    When: Turn it off for images that differ from those of the pretraining, with a smaller learning rate, vision_lr."""
    freeze_multi_modal_projector: bool = True
    """For vision-language models: freeze the merger between vision encoder and language model.
    How: A frozen merger has no gradients and no optimizer state.
    When: Turn it off together with freeze_vision_tower, or alone to realign encoder and language model."""
    freeze_deepstack_mergers: bool | None = None
    """For Qwen3-VL: freeze the deepstack mergers, which pass outputs of earlier vision layers to the first layers of
    the language model. null takes freeze_vision_tower.
    How: LLaMA-Factory treats them as part of the vision encoder, Megatron-SWIFT as part of the merger.
    When: Set it to false to train them with the merger while the encoder is frozen."""
    freeze_language_model: bool = False
    """For vision-language models: freeze the language model.
    How: Its weights have no gradients and no optimizer state; gradients still flow through it to encoder and merger.
    When: Turn it on to train encoder or merger alone."""
    quantization_bit: Annotated[Literal[4, 8] | None, _FROZEN] = None
    """With lora: quantize the frozen matrices of linear layers to this many bits (QLoRA). null keeps their dtype.
    How: Each Hugging Face matrix is quantized as it is loaded, before it is sharded, and dequantized to the dtype of
    the run for each product. Word embedding, output layer, norms, routers and a vision encoder are not quantized.
    When: 4 if the model does not fit otherwise: its matrices take about a quarter of the memory, and steps take longer.
    8 changes the model less, and takes half.
    - 4: 4 bits with one scale per 64 elements, see quantization_type
    - 8: 8 bits with one scale per row, as LLM.int8 stores weights; activations are not quantized"""
    quantization_type: Annotated[Literal["nf4", "fp4"], _FOUR_BITS] = "nf4"
    """With quantization_bit 4: the data type, which has 16 values.
    How: Both are those of bitsandbytes.
    When: Leave it at nf4: at the same memory its quantization error is smaller.
    - nf4: quantiles of a normal distribution, which weights roughly have
    - fp4: floating-point numbers with a sign, two bits of exponent and one of fraction"""
    double_quantization: Annotated[bool, _FOUR_BITS] = True
    """With quantization_bit 4: quantize the scales to 8 bits, too.
    How: 256 scales share one 32-bit constant; an element then takes 4.13 bits instead of 4.5.
    When: Leave it on. Without it a step is a little faster."""
    lora_rank: Annotated[Count, _LORA] = 8
    """With lora: the rank of the adapters.
    How: A matrix A of rank × in and one B of out × rank are trained for each adapted matrix; their product, scaled by
    lora_alpha / rank, is added to it.
    When: 8 to 64: raise it if the task is far from what the model knows. The memory of the adapters is proportional to
    it."""
    lora_alpha: Annotated[Count, _LORA] | None = None
    """With lora: the adapters' product is scaled by lora_alpha / lora_rank. null takes twice the rank.
    How: It acts like a learning rate of the adapters.
    When: Leave it at null, or take the value of a recipe."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1), _LORA, _NO_DORA] = 0.0
    """With lora: the dropout probability of an adapter's inputs in training.
    How: The frozen matrix gets all inputs; matrices that the engine fuses, such as those of queries, keys and values,
    share one dropout mask. Adapters of routed experts have no dropout, as in peft.
    When: 0.05 to 0.1 for little data trained for many epochs."""
    lora_target: Annotated[list[str], _LORA] = Field(default=["all"])
    """With lora: the linear layers that get adapters; all means every linear layer of attention and feed-forward.
    How: Names are those of Transformers' modules, or the ends of them (q_proj, self_attn.q_proj), Megatron-Core's layer
    names (linear_qkv, linear_proj, linear_fc1, linear_fc2), or regular expressions that match whole names. all includes
    experts' matrices, and with freeze_vision_tower: false those of the vision encoder, but not routers, embeddings and
    the output layer.
    When: all learns best. q_proj,v_proj is usual for small adapters; leave experts out if there are many."""
    additional_target: Annotated[list[str], _LORA, _DECODER] = Field(default=[])
    """With lora: modules outside of the layers that are fully trained and saved with the adapters.
    How: Names are those of Transformers' modules: embed_tokens, norm, lm_head. They have gradients and optimizer state
    as in full fine-tuning.
    When: Set it for new tokens, whose embeddings must be trained."""
    use_rslora: Annotated[bool, _LORA] = False
    """With lora: scale by lora_alpha / √rank instead of lora_alpha / rank.
    How: The size of an update then does not shrink as the rank grows.
    When: For ranks above 32."""
    use_dora: Annotated[bool, _LORA] = False
    """With lora: decompose each matrix into a magnitude per row and a direction, and train the magnitude, too (DoRA).
    How: The adapted matrix is normalized row by row and multiplied by the trained magnitudes, which start as the norms
    of the matrix's rows. Each step recomputes the rows' norms.
    When: For small ranks, at the cost of time."""
    loraplus_lr_ratio: Annotated[Positive, _LORA, _ADAM] | None = None
    """With lora: the learning rate of an adapter's second matrix, B, is this many times the learning rate (LoRA+). null
    is off.
    How: B starts at zero, and A does not; with one rate for both, B learns too slowly in wide models. Magnitudes of
    rows (use_dora) have B's rate.
    When: 16 is usual; lower learning_rate if the loss then jumps."""
    adapter_name_or_path: Annotated[list[str], Mark.NAME, _ADAPTERS] = Field(default=[])
    """With lora: folders of adapters in peft's format to start from.
    How: All but the last are merged into the model; the last one is trained further, unless create_new_adapter says
    otherwise.
    When: Set it to train an existing adapter further, or a new one on top of others."""
    create_new_adapter: Annotated[bool, _LORA, _OLD_ADAPTERS] = False
    """With adapter_name_or_path: merge all of its adapters, and train a new one.
    How: The new adapter starts at zero, on top of the merged model.
    When: To add a task to a model that already has adapters."""

    @property
    def continues_adapter(self) -> bool:
        """Whether the last of `adapter_name_or_path` is trained further; its file decides what has adapters."""
        return self.finetuning_type == "lora" and bool(self.adapter_name_or_path) and not self.create_new_adapter

    def __hash__(self) -> int:
        """Hash some of the settings only, since lists are not hashable."""
        return hash((self.finetuning_type, self.freeze_trainable_layers, self.lora_rank, *self.lora_target))


class PreferenceSettings(Group):
    pref_loss: Annotated[
        list[Literal[
            "sigmoid", "hinge", "ipo", "robust", "simpo", "orpo", "cpo", "apo_zero", "apo_down", "bco_pair",
            "sppo_hard", "nca_pair", "exo_pair", "discopop",
        ]],
        _DPO,
    ] = Field(default=["sigmoid"])  # fmt: skip
    """With stage dpo: the loss of a pair; several names give their weighted sum, see pref_loss_weights.
    How: Most compare the log-probability of each answer with that of a reference model, which is computed for all
    answers in one forward pass before the first step. simpo, orpo and cpo have no reference and compare the answers'
    own log-probabilities, simpo and orpo as means over tokens.
    When: Start with sigmoid, which is DPO. ipo or robust if labels are noisy, apo_zero or nca_pair if chosen answers
    must not become less likely, simpo or orpo to avoid a reference.
    - sigmoid: DPO; cDPO with dpo_label_smoothing
    - hinge: the loss of SLiC-HF and RSO; pairs that are far enough apart have no loss
    - ipo: IPO, with means over tokens; moves the difference to 1 / (2 × pref_beta) and no further
    - robust: DPO for labels that are wrong with probability dpo_label_smoothing
    - simpo: SimPO, with the margin simpo_gamma; no reference
    - orpo: ORPO, the chosen answer's own loss and pref_beta times the odds ratio; no reference
    - cpo: CPO's comparison; pref_ftx: 1 adds its other term; no reference
    - apo_zero: chosen answers become more likely, rejected ones less; for answers better than the model's own
    - apo_down: both become less likely, rejected answers more so; for answers worse than the model's own
    - bco_pair: BCO, a binary classifier of single answers, with the mean reward so far as baseline
    - sppo_hard: SPPO, moves the log-ratio of each single answer to ±1 / (2 × pref_beta)
    - nca_pair: NCA, prevents chosen answers from becoming less likely
    - exo_pair: EXO, a reverse KL divergence to labels smoothed by dpo_label_smoothing, which must be above 0
    - discopop: DiscoPOP, a mix of a logistic and an exponential loss"""
    pref_loss_weights: Annotated[list[float], _DPO] | None = None
    """With several losses in pref_loss: the weight of each, in their order. null weights each with 1.
    How: The loss is the weighted sum, and is not divided by the sum of the weights.
    When: Set it to mix losses, as in MPO: sigmoid and bco_pair with 0.8 and 0.2, and pref_ftx: 1."""
    pref_beta: Annotated[Positive, _DPO_KTO] = 0.1
    """With stages dpo and kto: β, the factor of log-ratios before they are compared.
    How: The smaller it is, the further the model may move away from the reference. Rewards in the logs are multiplied
    by it, too.
    When: 0.1 is usual for sigmoid, 0.01 to 0.5 for others; simpo takes 2 to 10, since means over tokens are small."""
    pref_ftx: Annotated[NonNegative, _DPO_KTO] = 0.0
    """With stages dpo and kto: weight of the supervised fine-tuning loss of chosen answers, in addition to the
    preference loss.
    How: For each pair, or each desirable answer, the mean over the answer's tokens is added, times this. orpo already
    has this term with weight 1.
    When: 0.1 to 1 keeps chosen answers likely if logps/chosen falls; 1 with cpo is CPO as published."""
    pref_bco_weight: Annotated[NonNegative, _DPO] = 0.0
    """With stage dpo: weight w of the loss bco_pair in addition to pref_loss.
    How: The sum of the losses in pref_loss and w times bco_pair is divided by 1 + w.
    When: Use it for LLaMA-Factory's recipes. bco_pair can also be one of several losses in pref_loss."""
    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5), _DPO, _LABELS] = 0.0
    """With sigmoid, robust, exo_pair, simpo or cpo: the assumed fraction of pairs whose labels are wrong.
    How: robust corrects for it, so that its loss is unbiased if labels are flipped at random; exo_pair trains towards
    labels smoothed by it; the others weight the reversed pair with it.
    When: 0.1 to 0.3 for noisy preferences. exo_pair needs a value above 0, such as 0.001."""
    simpo_gamma: Annotated[NonNegative, _DPO, _SIMPO] = 0.5
    """With simpo: γ, the target margin between the two answers' mean log-probabilities times pref_beta.
    How: It is subtracted from the difference before the loss is taken.
    When: 0.2 to 0.5 times pref_beta; raise it if the scores of the two answers stay close."""
    discopop_tau: Annotated[Positive, _DPO, _DISCOPOP] = 0.05
    """With discopop: the temperature of the mix of its two losses.
    How: The smaller it is, the more abruptly the mix changes from one to the other where the difference changes its
    sign.
    When: Leave it: the loss was discovered with this value."""
    ld_alpha: Annotated[float, Field(ge=0, le=1), _DPO] | None = None
    """With stage dpo: the weight of the longer answer's tokens beyond the length of the shorter one (LD-DPO). null
    weights all tokens equally.
    How: It applies to the log-probabilities of the trained model, not to those of the reference.
    When: 0.3 to 0.6 if answers become longer in training without becoming better."""
    kto_loss: Annotated[Literal["kto", "apo_zero_unpaired"], _KTO] = "kto"
    """With stage kto: the loss of a desirable or undesirable answer.
    How: Each answer is scored by its log-ratio to the reference. kto subtracts the mean log-ratio of prompts with
    answers to other prompts, an estimate of the KL divergence from the reference: one more forward pass in each step.
    When: Start with kto. apo_zero_unpaired if desirable answers are better than the model's own; it is faster.
    - kto: KTO, relative to the divergence of the model from its reference
    - apo_zero_unpaired: APO-zero of single answers, relative to 0"""
    kto_chosen_weight: Annotated[Positive, _KTO] = 1.0
    """With stage kto: weight of the loss of desirable answers.
    How: It multiplies their loss; the sum is divided by the number of answers, regardless of the weights.
    When: Raise it if there are fewer of them than undesirable ones, so that weight times number of one kind is 1 to
    1.33 times that of the other."""
    kto_rejected_weight: Annotated[Positive, _KTO] = 1.0
    """With stage kto: weight of the loss of undesirable answers.
    How: It multiplies their loss; the sum is divided by the number of answers, regardless of the weights.
    When: Raise it if there are fewer of them than desirable ones, as with kto_chosen_weight. Change one of the two."""
    ref_model: Annotated[str, Mark.NAME, _DPO_KTO] | None = None
    """With stages dpo and kto: the reference, a folder with a Hugging Face checkpoint or the id of a model on a hub.
    null is the model that training starts from; with lora, that model without the trained adapter.
    How: It is loaded before the trained model, in the same layout, and freed once its log-probabilities are computed,
    so there are never two models in memory. It must have the same vocabulary.
    When: Set it if the reference is not the model that training starts from."""
    ref_model_adapters: Annotated[list[str], Mark.NAME, _DPO_KTO, _BASE] = Field(default=[])
    """With ref_model: folders of adapters, in peft's format, that are merged into the reference.
    How: They are merged in their order, like those of adapter_name_or_path.
    When: To train an adapter further, with the original adapter as reference: name the base in ref_model, and the
    adapter here."""

    center_rewards_coefficient: Annotated[NonNegative, _RM] = 0.0
    """With stage rm: weight of the squared sum of a pair's two scores, in addition to the loss of their difference.
    How: The loss depends on differences only, so scores may drift; this keeps the mean of a pair's scores near 0.
    When: 0.01 if scores are used as rewards and should be comparable between prompts."""

    @property
    def losses(self) -> dict[str, float]:
        """The weight of each loss, by its name."""
        weights = self.pref_loss_weights or [1.0] * len(self.pref_loss)
        return dict(zip(self.pref_loss, weights, strict=True))

    @property
    def has_reference(self) -> bool:
        """Whether any of the losses compares the model with a reference."""
        return not set(self.pref_loss) <= set(WITHOUT_REFERENCE)
