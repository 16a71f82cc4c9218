"""Keys of the algorithm: advantages, rewards, losses, masks, and what corrects for two engines that differ."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Needs, NonNegative, Positive

Norm = Literal["batch", "group", "running"]
Level = Literal["token", "segment", "geometric", "sequence"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
_Share = Annotated[float, Field(ge=0, le=1)]
_PURE = Needs("AlgorithmSettings.is_pure_opd", (True,), "with rewards the loss is the policy gradient")
_JSD = Needs("AlgorithmSettings.opd_loss", ("jsd",), "the policy gradient takes sampled tokens alone")


class IsWeight(Group):
    enabled: bool = False
    """Weigh tokens by the trainer's probability over that of the engine that sampled them.
    How: exp(log-probability of the trainer before its updates − that of the engine), bounded above by upper_bound.
    When: With engines of another precision, with top_p or top_k, and with async_generation_ratio."""
    weight_type: Level = "token"
    """What the weight is of.
    How: Sums and means are over the tokens of the response that count.
    When: token is the mildest.
    - token: each token's own
    - segment: of each stretch between masked tokens
    - geometric: the mean log-ratio of the response
    - sequence: the sum of the response's log-ratios"""
    upper_bound: Positive | None = 1.2
    """The largest weight. null is no bound.
    How: Larger ones are cut to it.
    When: 2 is usual; without a bound single tokens decide the step."""
    detach: bool = True
    """Whether weights are constants.
    How: They are computed before training, and so always are.
    When: Leave it at true."""


class CorrectionFilter(Group):
    enabled: bool = False
    """Leave tokens out of the loss whose two probabilities are too far apart.
    How: What is left out leaves the denominators, too.
    When: With models of experts and with low precision, where a few tokens are far off."""
    agg_type: Level = "token"
    """What is judged, and left out whole.
    How: As weight_type of is_weight.
    When: geometric judges responses whatever their length.
    - token: each token
    - segment: each stretch between masked tokens
    - geometric: the response, by its mean log-ratio
    - sequence: the response, by the sum of its log-ratios"""
    ratio_enabled: bool = True
    """Judge by the ratio of the two probabilities.
    How: It must lie between ratio_low and ratio_high.
    When: Leave it on."""
    ratio_low: float = 0.8
    """The lowest ratio that is kept.
    How: See ratio_enabled.
    When: 0.99 with agg_type: geometric."""
    ratio_high: float = 1.2
    """The highest ratio that is kept.
    How: See ratio_enabled.
    When: 1.01 with agg_type: geometric."""
    diff_enabled: bool = False
    """Judge by the difference of the two probabilities.
    How: It must lie between diff_low and diff_high.
    When: Where ratios of unlikely tokens should not matter."""
    diff_low: float = -0.2
    """The lowest difference that is kept.
    How: See diff_enabled.
    When: With diff_enabled."""
    diff_high: float = 0.2
    """The highest difference that is kept.
    How: See diff_enabled.
    When: With diff_enabled."""


class TrainInferCorrection(Group):
    is_weight: IsWeight = IsWeight()
    filters: list[CorrectionFilter] = Field(default=[])

    @property
    def active(self) -> list[CorrectionFilter]:
        return [each for each in self.filters if each.enabled]

    @property
    def corrects(self) -> bool:
        return self.is_weight.enabled or bool(self.active)


class AlgorithmSettings(Group):
    algorithm_preset: Literal["dapo"] | None = None
    """The published settings of an algorithm, all at once. null sets nothing.
    How: It sets keys that are not written, and says which; one that is written with another value is refused. Lengths,
    batch sizes and learning rates are yours.
    When: To begin from what was published; write single keys to depart from it.
    - dapo: arXiv 2503.14476: grpo with pg_clip_low 0.2 and pg_clip_high 0.28, token-mean, no divergence, truncated
      responses masked, and other prompts for groups of equal rewards"""
    adv_estimator: Literal["gae", "reinforce", "grpo", "rloo", "reinforce_plus_plus"] = "gae"
    """How rewards become advantages of tokens.
    How: All but gae need no critic. Dr.GRPO is reinforce with norm_mean_type: group, norm_std_type: null and
    loss_agg_mode: seq-mean-token-sum-norm.
    When: grpo is usual with rewards that can be verified.
    - gae: generalised advantage estimation of PPO, with the values of a critic
    - reinforce: the discounted return of the normalised reward
    - grpo: the reward less the mean of its group, divided by the group's standard deviation
    - rloo: the reward less the mean of the others of its group
    - reinforce_plus_plus: the reward less the mean of its group, normalised over the batch"""
    advantage_function: str | None = None
    """A function of your own that computes advantages, package.module.function, in place of adv_estimator.
    How: It gets the samples of a step (scores, lengths, groups, domains), and returns a number or an array of tokens
    for each. Masks, whiten_advantages and advantage_clip follow. docs/rl-algorithms.md describes it.
    When: To try an estimator that is not here."""
    loss_function: str | None = None
    """A function of your own that computes the policy's loss of each token, package.module.function.
    How: It gets log_probs, log_ratio and advantages as tensors of one shape, and returns another. loss_agg_mode, the
    divergence and the entropy are as ever.
    When: To try a loss that is not here."""
    ppo_epochs: Annotated[Count, "passes"] = 1
    """Passes over the responses of a step.
    How: Each pass makes as many updates as there are mini-batches; from the second update on the policy is no longer
    the one that sampled, which the clipped ratio bounds.
    When: 1; more where sampling is what takes the time."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm where it is larger. 0 turns it off.
    How: The norm is over all parameters, after gradients are summed.
    When: 1 is usual."""
    lambd: _Share = 0.95
    """How far gae looks: 0 trusts the critic, 1 the rewards.
    How: An advantage is the sum of later surprises, each discounted by gamma times this.
    When: 1 with one reward at the end and a critic that is still weak."""
    gamma: _Share = 1.0
    """Discount of later rewards, by token.
    How: 1 counts the reward at the end in full for every token.
    When: Leave it at 1."""
    pg_clip: Positive = 0.2
    """How far the ratio of new to old probability may go before it has no more gradient.
    How: The ratio is clipped to 1 − this and 1 + this; use_pg_clip_range takes two numbers instead. dual_clip_loss is
    made from it, too.
    When: 0.2 is usual; it matters with several updates a step."""
    use_pg_clip_range: bool = False
    """Whether pg_clip_low and pg_clip_high count in place of pg_clip.
    How: Clip-higher of DAPO lets unlikely tokens rise further than others fall.
    When: With pg_clip_high: 0.28, where entropy falls too soon."""
    pg_clip_low: Positive = 0.2
    """The ratio is clipped to 1 − this from below, with use_pg_clip_range.
    How: See pg_clip.
    When: 0.2 is usual."""
    pg_clip_high: Positive = 0.2
    """The ratio is clipped to 1 + this from above, with use_pg_clip_range.
    How: See pg_clip.
    When: 0.28 for clip-higher."""
    dual_clip_loss: bool = False
    """Bound the loss of responses with a negative advantage, too.
    How: Where the advantage A is negative, the loss is at most dual_clip_bound × |A|.
    When: Against single tokens whose probability rose many times over."""
    dual_clip_bound: Annotated[float, Field(gt=1)] | None = None
    """How many times |A| dual_clip_loss allows. null is 1 + 2 × pg_clip, as in ROLL.
    How: The bound of responses with a negative advantage A.
    When: 3 is usual elsewhere."""
    value_clip: Positive | None = None
    """How far the critic's value may move from the one of the rollout before it has no more gradient. null is no bound.
    How: As pg_clip does for the policy.
    When: 0.2 to 0.5 with adv_estimator: gae."""
    kl_penalty: Literal["kl", "abs", "mse", "full", "k3"] = "kl"
    """The estimate of the divergence from the reference that rewards and metrics have.
    How: d is the log-probability of the token less the reference's.
    When: kl in rewards.
    - kl: d, also called k1
    - abs: its absolute value
    - mse: d² / 2, also called k2
    - full: the same as kl: the whole distribution is not kept
    - k3: exp(−d) − 1 + d, never negative"""
    init_kl_coef: NonNegative = 0.2
    """The weight β of the divergence in each token's reward.
    How: It enters only with add_token_level_kl. ROLL loads a reference and runs it for every value above 0
    nevertheless; here no reference is run that nothing needs.
    When: 0 with verifiable rewards and short runs."""
    target_kl: Positive | None = None
    """The divergence that β is steered to. null keeps init_kl_coef.
    How: It rises while the divergence is above, and falls while it is below.
    When: In long runs with add_token_level_kl."""
    kl_horizon: Annotated[Count, "samples"] = 10000
    """How slowly target_kl steers β: over this many samples.
    How: A step changes it by at most 20 % of samples / kl_horizon.
    When: Leave it."""
    add_token_level_kl: bool = False
    """Subtract β times the divergence from each token's reward.
    How: It needs the reference, and the trainer's log-probabilities before its updates: two forward passes.
    When: Where the policy drifts into text that nobody reads; use_kl_loss is the alternative."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the divergence from the reference to the loss.
    How: It needs the reference.
    When: GRPO's own form; with coefficients of 0.001 to 0.01."""
    kl_loss_coef: NonNegative = 0.0
    """The weight of use_kl_loss.
    How: The divergence is aggregated as the loss is.
    When: 0.001 is usual."""
    kl_loss_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """The estimate of the divergence that use_kl_loss adds.
    How: d is the log-probability of the token less the reference's; gradients go through it.
    When: Leave it at k3; the gradient of k2 is that of the divergence itself.
    - k1: d
    - k2: d² / 2
    - k3: exp(−d) − 1 + d, never negative, cut off at 10
    - abs: the absolute value of d"""
    entropy_loss_coef: float = 0.0
    """The weight of the entropy, which is subtracted from the loss.
    How: Above 0 it keeps responses varied. The entropy is of the whole distribution, at the sampling temperature.
    When: 0, and clip-higher first; small values, such as 0.001, where entropy still collapses."""
    reward_clip: Positive | None = None
    """Normalised rewards, and those of tokens, are clipped to ± this. null is no bound.
    How: After the norms and before whitening.
    When: 10 bounds outliers and no more."""
    norm_mean_type: Norm | None = None
    """Whose mean is subtracted from rewards. null subtracts none.
    How: grpo has group, whatever stands here, as in ROLL.
    When: group is the baseline of GRPO.
    - batch: that of the domain's responses of the step
    - group: that of the responses to the same prompt
    - running: that of all steps so far"""
    norm_std_type: Norm | None = None
    """Whose standard deviation divides rewards. null divides by none.
    How: The unbiased one, plus 1e-6. grpo has group, whatever stands here, as in ROLL.
    When: null for Dr.GRPO: dividing weighs easy and hard prompts more than others.
    - batch: that of the domain's responses of the step
    - group: that of the responses to the same prompt
    - running: that of all steps so far"""
    whiten_rewards: bool = False
    """Give the rewards of tokens, over the domain's responses, mean 0 and standard deviation 1.
    How: Masked tokens take no part.
    When: Seldom."""
    whiten_advantages: bool = False
    """Give advantages, over the response tokens of a domain, mean 0 and standard deviation 1.
    How: After the estimator; masked tokens take no part.
    When: With reinforce and gae."""
    advantage_clip: Positive | None = None
    """Advantages are clipped to ± this after whitening. null is no bound.
    How: It bounds what one response can do.
    When: 2 is usual."""
    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    """How losses of tokens become one number.
    How: Every denominator is of the whole global batch, so a layout or a micro-batch changes nothing. Masked tokens
    count in neither part; in ROLL's token-mean they do.
    When: token-mean (DAPO) where long responses should weigh more, the default where responses should weigh equally.
    - token-mean: the sum over tokens divided by their number
    - seq-mean-token-sum: the mean over responses of their sums
    - seq-mean-token-mean: the mean over responses of their means
    - seq-mean-token-sum-norm: the sum over all tokens divided by sequence_length - 1, as ROLL does for Dr.GRPO; not by
      the number of responses"""
    critic_warmup: Annotated[int, Field(ge=0), "steps"] = 0
    """Steps at the start in which only the critic is trained.
    How: A critic that knows nothing gives advantages that mean nothing.
    When: 5 to 20 with adv_estimator: gae."""
    enable_reference: bool = False
    """Run the reference even where no reward and no loss needs it.
    How: It is run anyway with use_kl_loss, and with add_token_level_kl and init_kl_coef above 0. true gives the metric.
    When: To watch how far the policy has moved, at the cost of a forward pass."""
    enable_old_logprobs_recompute: bool = False
    """Compute the trainer's log-probabilities before its updates, in a forward pass of their own.
    How: It is done anyway with several updates a step, with add_token_level_kl, and with train_infer_correction;
    otherwise the first forward pass of training serves.
    When: Leave it: what needs it has it."""
    force_disable_old_logprobs_recompute: bool = False
    """Never compute them in a pass of their own: a ratio is to the log-probabilities of the first update that took the
    sample.
    How: It is 1 in the first of ppo_epochs, also where earlier mini-batches have moved the weights; only later epochs
    are clipped. train_infer_correction acts in the loss. It is refused with add_token_level_kl and distillation.
    When: To save the pass, with few mini-batches a step."""
    importance_sampling: Literal["token", "seq"] = "token"
    """What the ratio of new to old probability is of.
    How: seq is GSPO: exp of the mean of a response's log-ratios, the same for all of its tokens.
    When: seq for models with experts, whose ratios of single tokens jump.
    - token: each token's own
    - seq: the response's mean"""
    rl_loss_coef: float = 1.0
    """Factor of the whole loss.
    How: Adam is indifferent to it, but for clipping by norm.
    When: Leave it at 1."""
    max_len_mask: bool = False
    """Leave responses of the longest length out of the loss.
    How: Nearly all of them were cut; one that ends exactly there is left out, too, as in ROLL. They leave the
    denominators, and still count in the mean of their group.
    When: Where a cut response says nothing about what was right: DAPO's overlong filtering."""
    difficulty_mask: bool = False
    """Leave groups out of the loss whose mean score is at most difficulty_low_threshold, or at least the high one.
    How: They leave the denominators, too.
    When: With rewards of 0 and 1: groups that are all right or all wrong teach nothing."""
    difficulty_low_threshold: float = 0.0
    """The lower bound of difficulty_mask.
    How: Groups at or below it are left out.
    When: 0.1 is usual."""
    difficulty_high_threshold: float = 1.0
    """The upper bound of difficulty_mask.
    How: Groups at or above it are left out.
    When: 0.95 is usual."""
    difficulty_loss_weight: bool = False
    """Weigh responses by the column difficulty of their row, from 0.5 to 2.
    How: Harder ones weigh more.
    When: Where the data has that column."""
    length_loss_weight: bool = False
    """Weigh short responses more than long ones, from 1.5 down to 0.5.
    How: By their rank in length within the batch.
    When: Against responses that grow without need."""
    error_max_len_clip: bool = False
    """Leave wrong responses that are longer than error_max_len_threshold out of the loss.
    How: They leave the denominators, too.
    When: Where the model fails by writing on and on."""
    error_max_len_threshold: Annotated[Count, "tokens"] = 9999999999
    """The length of error_max_len_clip.
    How: In tokens of the response.
    When: With error_max_len_clip."""
    use_opd: bool = False
    """Subtract the divergence from a teacher from each token's reward: distillation beside rewards.
    How: It needs `teacher`; opd_kl_coef of the teacher is the weight.
    When: Where a larger model of the same vocabulary knows better."""
    is_pure_opd: bool = False
    """Train on the divergence from teachers alone, without rewards.
    How: It needs `teacher`; actor_train and actor_infer may be called student_train and student_infer, as in ROLL. The
    advantage of a token is its log-probability by the teacher less its own, with gamma 0 and adv_estimator reinforce.
    With opd_loss: jsd there are no advantages.
    When: To distil without any reward."""
    opd_loss: Annotated[Literal["policy_gradient", "jsd"], _PURE] = "policy_gradient"
    """What is_pure_opd compares of the student and its teacher.
    How: With jsd the one teacher is computed in the processes of actor_train, in its layout: of the role teacher
    model_args alone is read. The loss is the mean over the tokens of an update.
    When: jsd learns from all that the teacher holds likely, so it needs fewer responses; it takes room for the
    teacher's weights on the devices of actor_train.
    - policy_gradient: the log-probabilities of sampled tokens, which are advantages
    - jsd: their whole distributions at every sampled token, by the generalized Jensen-Shannon divergence"""
    opd_beta: Annotated[_Share, _JSD] = 0.5
    """Which divergence opd_loss: jsd is, between teacher t and student s.
    How: Between 0 and 1 it is beta KL(t, m) + (1 - beta) KL(s, m) with the mixture m = beta t + (1 - beta) s. 0 is
    KL(t, s), and 1 is KL(s, t).
    When: 1 where a small student should write what the teacher finds likely, and leave the rest; 0 where it should
    cover all that the teacher writes."""
    opd_top_k: Annotated[Count | None, "tokens", _JSD] = None
    """How many of the teacher's likeliest tokens opd_loss: jsd compares. null is the whole vocabulary.
    How: Both distributions are normalised over these tokens; nothing is learned of the others.
    When: null; a number, such as 64, to compare with systems that have no more of the teacher."""
    opd_lmbda: Annotated[_Share, _JSD] = 1.0
    """In which share of the steps opd_loss: jsd takes responses that the student samples.
    How: In the others the rows' own answers take their place, up to response_length; which steps these are follows from
    the seed. It needs rows with answers, which are read by data_args.conversation_rules.
    When: Below 1 where good answers are at hand, and the student's own are far from what it is to learn; with 0 nothing
    is sampled."""
    opd_sft_alpha: Annotated[NonNegative, _JSD] = 0.0
    """Weight of the cross-entropy of the rows' own answers, beside the divergence.
    How: In steps that take them; a mean over the same tokens, at temperature 1.
    When: With opd_lmbda below 1, where the answers are better than what the teacher finds likely."""
    train_infer_correction: TrainInferCorrection = TrainInferCorrection()

    def samples_at(self, step: int, seed: int) -> bool:
        """Tell whether the student samples the responses of a step, counted from 0; by one draw a step, as ms-swift."""
        return random.Random(seed + step).random() < self.opd_lmbda

    @property
    def distils(self) -> bool:
        """Whether whole distributions of a teacher are the loss."""
        return self.is_pure_opd and self.opd_loss == "jsd"

    @property
    def dual_clip(self) -> float:
        return self.dual_clip_bound or 1 + 2 * self.pg_clip

    @property
    def rewards_kl(self) -> bool:
        """Whether the divergence from the reference enters rewards."""
        return self.add_token_level_kl and self.init_kl_coef > 0
