"""Preference training: how the two answers of a pair are compared. LLaMA-Factory's keys and defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Group, Mark, Needs, NonNegative, Positive

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
