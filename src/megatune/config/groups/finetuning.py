"""Which parameters are trained: all, some layers or adapters beside them; and tokens' weights. LLaMA-Factory's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Mark, Needs, NonNegative, Positive

_TYPE = "finetuning.finetuning_type"
_FREEZE = Needs(_TYPE, ("freeze",), "it says what freeze trains", is_method=True, is_lenient=True)
_LORA = Needs(_TYPE, ("lora",), "it says what lora trains", is_method=True, is_lenient=True)
_ADAPTERS = Needs(_TYPE, ("lora",), "it says what lora trains", is_method=True)
_DECODER = Needs("finetuning.freeze_language_model", (False,), "what it names is of the language model")
_FROZEN = Needs(_TYPE, ("lora",), "an update is much smaller than a step between values of so few bits")
_SFT = Needs("run.stage", ("sft",), "the paper derives it for answers, and other stages have losses of their own")
_LOSS_OF_TOKENS = Needs("run.stage", ("pt", "sft"), "other stages have losses of their own, not of tokens")
_NO_DFT = Needs("finetuning.use_dft_loss", (False,), "a run has one loss of tokens")
_NO_EAFT = Needs("finetuning.use_eaft_loss", (False,), "a run has one loss of tokens")
_EAFT = Needs("finetuning.use_eaft_loss", (True,))
_TEXTS = Needs("run.stage", ("pt", "sft"), "other stages compare answers, which must not differ by chance")
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
# They compare the answers of the model that is trained, and nothing else.
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
# Label smoothing is part of their definition.
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "cpo")
_STAGE, _LOSS = "run.stage", "preference.pref_loss"
_DPO = Needs(_STAGE, ("dpo",), "it says how the two answers of a pair are compared", is_method=True)
_DPO_KTO = Needs(_STAGE, ("dpo", "kto"), "it says how the two answers of a pair are compared", is_method=True)
_KTO = Needs(_STAGE, ("kto",), "it says how answers are weighed that are wanted or not, one by one", is_method=True)
_RM = Needs(_STAGE, ("rm",), "it holds the scores of a reward model around 0", is_method=True)
_LABELS = Needs(_LOSS, SMOOTHED, f"it is part of {', '.join(SMOOTHED)}, and of no other loss")
_SIMPO = Needs(_LOSS, ("simpo",), "it is a number of simpo, and of no other loss")
_DISCOPOP = Needs(_LOSS, ("discopop",), "it is a number of discopop, and of no other loss")
_BASE = Needs(
    "preference.ref_model",
    why="adapters are merged into the model that it names",
    fix="write `ref_model: FOLDER`, which may be that of `model_name_or_path`, or remove `ref_model_adapters`",
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
    freeze_trainable_layers: Annotated[int, "layers", _FREEZE, _DECODER] = 2
    """With freeze: the layers that are trained, the last ones; a negative number trains the first ones.
    How: The other layers keep their weights, and have no gradients and no optimizer state.
    When: Raise it until the run learns what it should; the last ones cost least, since gradients end at the first layer
    that is trained."""
    freeze_trainable_modules: Annotated[list[str], _FREEZE, _DECODER] = Field(default=["all"])
    """With freeze: the modules of the trained layers that are trained; all trains them whole.
    How: They are Transformers' modules directly inside a layer: self_attn, mlp, input_layernorm,
    post_attention_layernorm.
    When: Name mlp alone to teach facts and leave attention as it is; leave it at all otherwise."""
    freeze_extra_modules: Annotated[list[str], _FREEZE, _DECODER] = Field(default=[])
    """With freeze: modules outside of the layers that are trained as well.
    How: They are Transformers' modules: embed_tokens, norm, lm_head; the norm is the one behind the last layer.
    When: Set it for new tokens, whose embeddings must be learnt."""
    use_llama_pro: Annotated[bool, _FREEZE, _DECODER] = False
    """With freeze: train layers spread evenly over the model, those that LLaMA Pro's expansion added.
    How: Layers are counted in as many groups as freeze_trainable_layers says, and the last layer of each is trained.
    When: For checkpoints that LLaMA Pro's script expanded by as many layers."""
    use_dft_loss: Annotated[bool, _SFT] = False
    """Weigh each token of the loss by the probability that the model gives it (DFT, arXiv:2508.05629).
    How: The weight has no gradient. Tokens that the model finds likely are learnt most, and surprising ones hardly;
    plain cross-entropy does the opposite. Evaluation computes the same loss, which has no perplexity.
    When: For answers that need reasoning, of a model that mostly knows how; not for new facts, which are surprising."""
    use_eaft_loss: Annotated[bool, _SFT, _NO_DFT] = False
    """Weigh each token of the loss by how open the model's choice is there (EAFT, arXiv:2601.02151).
    How: The weight is the entropy of the 20 likeliest tokens, divided by 3, to the power of eaft_alpha, and has no
    gradient. Where the model is sure of another token than the label, it hardly learns. Evaluation computes the same
    loss, which has no perplexity.
    When: For a new domain, where the model is to keep what it can do; not for facts that contradict what it knows."""
    eaft_alpha: Annotated[NonNegative, _EAFT] = 1.0
    """With use_eaft_loss: the power of the entropy in a token's weight.
    How: 0 weighs all tokens alike; the larger it is, the less is learnt where the model is sure.
    When: Leave it at 1; lower it where the loss falls too slowly."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1), _LOSS_OF_TOKENS, _NO_DFT, _NO_EAFT] = 0.0
    """Take this share of each label's probability, and spread it evenly over the vocabulary.
    How: The loss of a token is (1 - ε) times its own and ε times the mean of -log p over all tokens of the vocabulary,
    as in Transformers. Evaluation computes the same loss, which has no perplexity.
    When: 0.05 to 0.1 for noisy answers, or where the model becomes too sure; it makes every wrong token a little
    likelier."""
    neftune_noise_alpha: Annotated[Positive, _TEXTS] | None = None
    """Add noise to word embeddings in training (NEFTune, arXiv:2310.05914): up to this number by √(L · h). null adds
    none.
    How: L is the length of a text in tokens, without padding and without those that it shares a row with, and h the
    hidden size. A text's noise follows from seed, step and tokens: it is the same in every layout and after a resume.
    Evaluation has none.
    When: 5 for small data of instructions, where answers are too short or repeat the data; 10 to 15 for longer
    ones."""
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
    additional_target: Annotated[list[str], _LORA, _DECODER] = Field(default=[])
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

    @property
    def continues_adapter(self) -> bool:
        """Whether the last of `adapter_name_or_path` is trained further: its file says what has adapters."""
        return self.finetuning_type == "lora" and bool(self.adapter_name_or_path) and not self.create_new_adapter

    def __hash__(self) -> int:
        """Hash some of the settings: lists have no hash of their own, and equal settings have the same one."""
        return hash((self.finetuning_type, self.freeze_trainable_layers, self.lora_rank, *self.lora_target))


class PreferenceSettings(Group):
    pref_loss: Annotated[
        list[
            Literal[
                "sigmoid",
                "hinge",
                "ipo",
                "robust",
                "simpo",
                "orpo",
                "cpo",
                "apo_zero",
                "apo_down",
                "bco_pair",
                "sppo_hard",
                "nca_pair",
                "exo_pair",
                "discopop",
            ]
        ],
        _DPO,
    ] = Field(default=["sigmoid"])
    """With stage dpo: the loss of a pair, by its name; of several names the weighted sum, see pref_loss_weights.
    How: Most compare how much likelier each answer is than under a reference, whose log-probabilities of all answers
    are computed before the first step: a forward pass, once. simpo, orpo and cpo have no reference and compare the
    answers' own log-probabilities, simpo and orpo with means over tokens.
    When: sigmoid is DPO, and where to start. ipo or robust where labels are noisy, apo_zero or nca_pair where chosen
    answers must not become less likely, simpo or orpo to do without a reference.
    - sigmoid: DPO, with dpo_label_smoothing cDPO
    - hinge: of SLiC-HF and RSO; pairs that are far enough apart are left alone
    - ipo: IPO, with means over tokens; drives the difference to 1 / (2 × pref_beta) and no further
    - robust: DPO for labels that are wrong with probability dpo_label_smoothing
    - simpo: SimPO, with the margin simpo_gamma; no reference
    - orpo: ORPO, the chosen answer's own loss and pref_beta times the odds ratio; no reference
    - cpo: CPO's comparison; pref_ftx: 1 adds its other term; no reference
    - apo_zero: chosen answers become likelier, rejected ones less likely; for answers better than the model's own
    - apo_down: both become less likely, rejected ones more so; for answers worse than the model's own
    - bco_pair: BCO, a classifier of chosen and rejected answers, each by itself, against the mean reward so far
    - sppo_hard: SPPO, drives each answer by itself to ±1 / (2 × pref_beta)
    - nca_pair: NCA, keeps chosen answers from becoming less likely
    - exo_pair: EXO, a reverse KL divergence to labels smoothed by dpo_label_smoothing, which must be above 0
    - discopop: DiscoPOP, a mix of a logistic and an exponential loss"""
    pref_loss_weights: Annotated[list[float], _DPO] | None = None
    """With several losses in pref_loss: the weight of each, in their order. null weighs each with 1.
    How: The loss is the sum of the terms times their weights, and is not divided by their sum.
    When: Set it to mix losses, as in MPO: sigmoid and bco_pair with 0.8 and 0.2, and pref_ftx: 1."""
    pref_beta: Annotated[Positive, _DPO_KTO] = 0.1
    """With stages dpo and kto: β, by which log-ratios are multiplied before they are compared.
    How: The smaller it is, the further the model may go from the reference. Rewards in the logs are multiplied by it,
    too.
    When: 0.1 is usual for sigmoid, 0.01 to 0.5 for others; simpo takes 2 to 10, since means over tokens are small."""
    pref_ftx: Annotated[NonNegative, _DPO_KTO] = 0.0
    """With stages dpo and kto: weight of a chosen answer's own loss, as in supervised fine-tuning, beside the others.
    How: It is the mean over the answer's tokens, times this, of each pair or of each desirable answer. orpo has this
    term with weight 1 already.
    When: 0.1 to 1 keeps chosen answers likely, where logps/chosen falls; 1 with cpo is CPO as published."""
    pref_bco_weight: Annotated[NonNegative, _DPO] = 0.0
    """With stage dpo: weight w of the loss bco_pair beside pref_loss.
    How: The sum of the losses in pref_loss and w times bco_pair is divided by 1 + w.
    When: Set it as a recipe for LLaMA-Factory says. pref_loss takes bco_pair as one of several losses, too."""
    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5), _DPO, _LABELS] = 0.0
    """With sigmoid, robust, exo_pair, simpo or cpo: the share of pairs whose labels are taken to be wrong.
    How: robust corrects for it, and is then right on average where labels are wrong by chance; exo_pair aims at labels
    smoothed by it; the others weigh the reversed pair with it.
    When: 0.1 to 0.3 for noisy preferences. exo_pair needs a value above 0, such as 0.001."""
    simpo_gamma: Annotated[NonNegative, _DPO, _SIMPO] = 0.5
    """With simpo: γ, by how much the chosen answer must be ahead, of mean log-probabilities times pref_beta.
    How: It is subtracted from the difference before the loss is taken.
    When: 0.2 to 0.5 times pref_beta; raise it where answers stay close."""
    discopop_tau: Annotated[Positive, _DPO, _DISCOPOP] = 0.05
    """With discopop: the temperature of the mix of its two losses.
    How: The smaller it is, the more abruptly one takes over from the other as the difference changes its sign.
    When: Leave it: the loss was found with this value."""
    ld_alpha: Annotated[float, Field(ge=0, le=1), _DPO] | None = None
    """With stage dpo: what the tokens of the longer answer count beyond the length of the shorter one (LD-DPO). null
    counts all tokens alike.
    How: It weighs the log-probabilities of the model that is trained, and not those of the reference.
    When: 0.3 to 0.6 where answers become longer in training without becoming better."""
    kto_loss: Annotated[Literal["kto", "apo_zero_unpaired"], _KTO] = "kto"
    """With stage kto: the loss of an answer that is wanted or not.
    How: Each answer is measured by how much likelier it is than under the reference. kto measures that from the mean
    of prompts with answers to other prompts, an estimate of how far the model has gone at all: one more forward pass in
    each step.
    When: kto is where to start. apo_zero_unpaired where desirable answers are better than the model's own; it is
    faster.
    - kto: KTO, from the divergence of the model from its reference
    - apo_zero_unpaired: APO-zero of single answers, from 0"""
    kto_chosen_weight: Annotated[Positive, _KTO] = 1.0
    """With stage kto: weight of the loss of desirable answers.
    How: It multiplies their loss; the sum is divided by the number of answers, whatever the weights.
    When: Where there are fewer of them than of undesirable ones: so that weight times number of one kind is 1 to 1.33
    times that of the other."""
    kto_rejected_weight: Annotated[Positive, _KTO] = 1.0
    """With stage kto: weight of the loss of undesirable answers.
    How: It multiplies their loss; the sum is divided by the number of answers, whatever the weights.
    When: Where there are fewer of them than of desirable ones, as with kto_chosen_weight. Change one of the two."""
    ref_model: Annotated[str, Mark.NAME, _DPO_KTO] | None = None
    """With stages dpo and kto: the reference, a folder with a Hugging Face checkpoint or the id of a model on a hub.
    null is the model that training starts from; with lora, that model without the adapter that is trained.
    How: It is loaded before the model that is trained, in the same layout, and only until its log-probabilities are
    computed, so at no time are there two models in memory. It must have the same vocabulary.
    When: Set it to start from another model than the one that pairs are compared with."""
    ref_model_adapters: Annotated[list[str], Mark.NAME, _DPO_KTO, _BASE] = Field(default=[])
    """With ref_model: folders of adapters, in peft's format, that are merged into the reference.
    How: They are merged in their order, as those of adapter_name_or_path.
    When: To train an adapter further, against the adapter as it was: name the base in ref_model, and the adapter
    here."""

    center_rewards_coefficient: Annotated[NonNegative, _RM] = 0.0
    """With stage rm: weight of the squared sum of a pair's two scores, beside the loss of their difference.
    How: The loss sees differences alone, so scores may drift; this holds the mean of a pair's scores at 0.
    When: 0.01 where scores are used as rewards and are to be comparable between prompts."""

    @property
    def losses(self) -> dict[str, float]:
        """Weights of the losses, by name."""
        weights = self.pref_loss_weights or [1.0] * len(self.pref_loss)
        return dict(zip(self.pref_loss, weights, strict=True))

    @property
    def has_reference(self) -> bool:
        """Whether any of the losses compares the model with a reference."""
        return not set(self.pref_loss) <= set(WITHOUT_REFERENCE)
