"""Keys of the algorithm: advantages, rewards, losses, masks, and corrections of the train–rollout mismatch."""

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
    """Weight tokens by the ratio of the trainer's probability to that of the engine that sampled them.
    How: The weight is exp(log-probability of the trainer before its updates − that of the engine), at most upper_bound.
    When: With engines of another precision, with top_p or top_k, and with async_generation_ratio."""
    weight_type: Level = "token"
    """The level at which the weight is computed.
    How: Sums and means are over the unmasked tokens of the response.
    When: token changes least.
    - token: each token's own ratio
    - segment: one ratio for each segment between masked tokens
    - geometric: the mean log-ratio of the response
    - sequence: the sum of the response's log-ratios"""
    upper_bound: Positive | None = 1.2
    """The largest weight. null is no bound.
    How: Larger weights are clipped to it.
    When: 2 is usual; without a bound single tokens dominate the step."""
    detach: bool = True
    """Whether weights are constants.
    How: They are computed before training, so they always are constants.
    When: Leave it at true."""


class CorrectionFilter(Group):
    enabled: bool = False
    """Leave tokens out of the loss whose two probabilities differ too much.
    How: Tokens that are left out do not count in the denominators.
    When: With mixtures of experts and with low precision, where a few tokens differ much."""
    agg_type: Level = "token"
    """The level at which the filter decides.
    How: As weight_type of is_weight.
    When: geometric does not depend on the length of responses.
    - token: each token
    - segment: each segment between masked tokens
    - geometric: the response, by its mean log-ratio
    - sequence: the response, by the sum of its log-ratios"""
    ratio_enabled: bool = True
    """Filter by the ratio of the two probabilities.
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
    """Filter by the difference of the two probabilities.
    How: It must lie between diff_low and diff_high.
    When: Use it if ratios of unlikely tokens should not matter."""
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
    """The published settings of an algorithm. null sets nothing.
    How: It sets keys that are not in the file, and reports which; a key with another value is refused. Lengths, batch
    sizes and learning rates are not part of it.
    When: To start from the published settings.
    - dapo: arXiv 2503.14476: grpo with pg_clip_low 0.2 and pg_clip_high 0.28, token-mean, no KL term, truncated
      responses masked, and additional prompts in place of groups with equal rewards"""
    adv_estimator: Literal["gae", "reinforce", "grpo", "rloo", "reinforce_plus_plus"] = "gae"
    """How rewards become advantages of tokens.
    How: All but gae need no critic. Dr.GRPO is reinforce with norm_mean_type: group, norm_std_type: null and
    loss_agg_mode: seq-mean-token-sum-norm.
    When: grpo is usual with rewards that can be verified.
    - gae: generalized advantage estimation of PPO, with the values of a critic
    - reinforce: the discounted return of the normalized reward
    - grpo: the reward minus the mean of its group, divided by the group's standard deviation
    - rloo: the reward minus the mean of the other responses of its group
    - reinforce_plus_plus: the reward minus the mean of its group, normalized over the batch"""
    advantage_function: str | None = None
    """A custom function that computes advantages, package.module.function, instead of adv_estimator.
    How: It gets the samples of a step (scores, lengths, groups, domains), and returns a number or a per-token array for
    each. Masks, whiten_advantages and advantage_clip are applied afterwards. docs/rl-algorithms.md describes it.
    When: To try an estimator that is not built in."""
    loss_function: str | None = None
    """A custom function that computes the policy loss of each token, package.module.function.
    How: It gets log_probs, log_ratio and advantages as tensors of the same shape, and returns a tensor of that shape.
    loss_agg_mode, the KL and entropy terms are applied as usual.
    When: To try a loss that is not built in."""
    ppo_epochs: Annotated[Count, "passes"] = 1
    """Number of passes over the responses of a step.
    How: Each pass makes one update per mini-batch; from the second update on the policy differs from the one that
    sampled, which the clipped ratio limits.
    When: 1; more if sampling takes most of the time."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this norm. 0 turns it off.
    How: The norm is over all parameters, after gradients are reduced.
    When: 1 is usual."""
    lambd: _Share = 0.95
    """Lambda of gae: 0 relies on the critic, 1 on the rewards.
    How: An advantage is the sum of the later temporal-difference errors, each discounted by gamma times this.
    When: 1 with one reward at the end and a critic that is still weak."""
    gamma: _Share = 1.0
    """Discount factor of later rewards, per token.
    How: With 1 every token gets the full reward of the end.
    When: Leave it at 1."""
    pg_clip: Positive = 0.2
    """Clipping range of the ratio of new to old probability.
    How: The ratio is clipped to 1 − this and 1 + this; use_pg_clip_range takes two numbers instead. The default of
    dual_clip_bound depends on it, too.
    When: 0.2 is usual; it matters with several updates per step."""
    use_pg_clip_range: bool = False
    """Whether pg_clip_low and pg_clip_high are used instead of pg_clip.
    How: DAPO's clip-higher lets the probability of unlikely tokens rise further than that of others may fall.
    When: With pg_clip_high: 0.28, if the entropy falls too early."""
    pg_clip_low: Positive = 0.2
    """With use_pg_clip_range: the ratio is clipped to at least 1 − this.
    How: See pg_clip.
    When: 0.2 is usual."""
    pg_clip_high: Positive = 0.2
    """With use_pg_clip_range: the ratio is clipped to at most 1 + this.
    How: See pg_clip.
    When: 0.28 for clip-higher."""
    dual_clip_loss: bool = False
    """Also limit the loss of tokens with a negative advantage.
    How: If the advantage A is negative, the loss is at most dual_clip_bound × |A|.
    When: Against single tokens whose probability has risen many times."""
    dual_clip_bound: Annotated[float, Field(gt=1)] | None = None
    """The bound of dual_clip_loss, in units of |A|. null is 1 + 2 × pg_clip, as in ROLL.
    How: It applies to tokens with a negative advantage A.
    When: 3 is usual in other systems."""
    value_clip: Positive | None = None
    """Clipping range of the critic's value around that of the rollout. null is no bound.
    How: It does for the critic what pg_clip does for the policy.
    When: 0.2 to 0.5 with adv_estimator: gae."""
    kl_penalty: Literal["kl", "abs", "mse", "full", "k3"] = "kl"
    """The estimator of the KL divergence from the reference in rewards and metrics.
    How: d is the log-probability of the token minus the reference's.
    When: kl in rewards.
    - kl: d, also called k1
    - abs: its absolute value
    - mse: d² / 2, also called k2
    - full: the same as kl, since the whole distribution is not stored
    - k3: exp(−d) − 1 + d, never negative"""
    init_kl_coef: NonNegative = 0.2
    """The initial weight β of the KL divergence in each token's reward.
    How: It is used only with add_token_level_kl. ROLL loads and runs a reference for every value above 0; here the
    reference runs only if something needs it.
    When: 0 with verifiable rewards and short runs."""
    target_kl: Positive | None = None
    """The KL divergence that β is adapted to. null keeps init_kl_coef.
    How: The weight β rises while the divergence is above the target, and falls while it is below.
    When: In long runs with add_token_level_kl."""
    kl_horizon: Annotated[Count, "samples"] = 10000
    """The number of samples over which β adapts to target_kl.
    How: A step changes β by at most 20 % of samples / kl_horizon.
    When: Leave it."""
    add_token_level_kl: bool = False
    """Subtract β times the KL divergence from each token's reward.
    How: It needs the reference, and the trainer's log-probabilities before its updates: two forward passes.
    When: If the policy drifts into unreadable text; use_kl_loss is the alternative."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL divergence from the reference to the loss.
    How: It needs the reference.
    When: GRPO's original form; with coefficients of 0.001 to 0.01."""
    kl_loss_coef: NonNegative = 0.0
    """The weight of use_kl_loss.
    How: The divergence is aggregated as the loss is.
    When: 0.001 is usual."""
    kl_loss_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """The estimator of the KL divergence that use_kl_loss adds.
    How: d is the log-probability of the token minus the reference's; gradients flow through it.
    When: Leave it at k3; the gradient of k2 is that of the divergence itself.
    - k1: d
    - k2: d² / 2
    - k3: exp(−d) − 1 + d, never negative, clipped at 10
    - abs: the absolute value of d"""
    entropy_loss_coef: float = 0.0
    """The weight of the entropy bonus, which is subtracted from the loss.
    How: Above 0 it keeps responses diverse. The entropy is that of the whole distribution, at the sampling temperature.
    When: 0, and clip-higher first; small values, such as 0.001, if the entropy still collapses."""
    reward_clip: Positive | None = None
    """Normalized rewards, and rewards of tokens, are clipped to ± this. null is no bound.
    How: It is applied after normalization and before whitening.
    When: 10 limits outliers only."""
    norm_mean_type: Norm | None = None
    """Which mean is subtracted from rewards. null subtracts none.
    How: grpo always uses group, as in ROLL.
    When: group is the baseline of GRPO.
    - batch: over the domain's responses of the step
    - group: over the responses to the same prompt
    - running: over all steps so far"""
    norm_std_type: Norm | None = None
    """Which standard deviation divides rewards. null divides by none.
    How: It is the unbiased one, plus 1e-6. grpo always uses group, as in ROLL.
    When: null for Dr.GRPO: dividing weights easy and hard prompts more than others.
    - batch: over the domain's responses of the step
    - group: over the responses to the same prompt
    - running: over all steps so far"""
    whiten_rewards: bool = False
    """Normalize the rewards of tokens to mean 0 and standard deviation 1 over the domain's responses.
    How: Masked tokens are left out.
    When: Rarely needed."""
    whiten_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the response tokens of a domain.
    How: It is applied after the estimator; masked tokens are left out.
    When: With reinforce and gae."""
    advantage_clip: Positive | None = None
    """Advantages are clipped to ± this after whitening. null is no bound.
    How: It limits the influence of a single response.
    When: 2 is usual."""
    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    """How the losses of tokens are aggregated.
    How: Every denominator is that of the whole global batch, so results do not depend on layout and micro-batches.
    Masked tokens count neither in sums nor in denominators; in ROLL's token-mean they count in the sum.
    When: token-mean (DAPO) if long responses should have more weight, the default if responses should have equal
    weight.
    - token-mean: the sum over tokens divided by their number
    - seq-mean-token-sum: the mean over responses of their sums
    - seq-mean-token-mean: the mean over responses of their means
    - seq-mean-token-sum-norm: the sum over all tokens divided by sequence_length - 1, as ROLL does for Dr.GRPO; not by
      the number of responses"""
    critic_warmup: Annotated[int, Field(ge=0), "steps"] = 0
    """Steps at the start in which only the critic is trained.
    How: An untrained critic gives meaningless advantages.
    When: 5 to 20 with adv_estimator: gae."""
    enable_reference: bool = False
    """Run the reference even if no reward and no loss needs it.
    How: It always runs with use_kl_loss, and with add_token_level_kl and init_kl_coef above 0. Otherwise true adds the
    metric only.
    When: To watch how far the policy has moved, at the cost of a forward pass."""
    enable_old_logprobs_recompute: bool = False
    """Compute the trainer's log-probabilities before its updates, in a separate forward pass.
    How: It is always done with several updates per step, with add_token_level_kl, and with train_infer_correction;
    otherwise those of the first forward pass of training are used.
    When: Leave it: it is done whenever it is needed."""
    force_disable_old_logprobs_recompute: bool = False
    """Never compute them in a separate pass: ratios use the log-probabilities of the first update with the sample.
    How: The ratio is 1 in the first of ppo_epochs, even if earlier mini-batches have changed the weights; only later
    epochs are clipped. train_infer_correction acts in the loss. It is refused with add_token_level_kl and distillation.
    When: To save the pass, with few mini-batches per step."""
    importance_sampling: Literal["token", "seq"] = "token"
    """The level at which the ratio of new to old probability is computed.
    How: seq is GSPO: exp of the mean of a response's log-ratios, the same for all of its tokens.
    When: seq for mixtures of experts, whose ratios of single tokens are noisy.
    - token: each token's own ratio
    - seq: the response's mean"""
    rl_loss_coef: float = 1.0
    """Factor of the whole loss.
    How: It has no effect on Adam's updates, except through gradient clipping.
    When: Leave it at 1."""
    max_len_mask: bool = False
    """Leave responses of the maximum length out of the loss.
    How: Nearly all of them were truncated; one that ends exactly there is left out, too, as in ROLL. They do not count
    in the denominators, but still count in the mean of their group.
    When: If a truncated response does not show what was right: DAPO's overlong filtering."""
    difficulty_mask: bool = False
    """Leave groups out of the loss whose mean score is at most difficulty_low_threshold, or at least the high one.
    How: They do not count in the denominators.
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
    """Weight responses by the column difficulty of their row, from 0.5 to 2.
    How: Harder ones have more weight.
    When: If the data has that column."""
    length_loss_weight: bool = False
    """Give short responses more weight than long ones, from 1.5 down to 0.5.
    How: The weight depends on the rank of their length within the batch.
    When: Against responses that grow without need."""
    error_max_len_clip: bool = False
    """Leave wrong responses that are longer than error_max_len_threshold out of the loss.
    How: They do not count in the denominators.
    When: If the model fails by writing endlessly."""
    error_max_len_threshold: Annotated[Count, "tokens"] = 9999999999
    """The threshold of error_max_len_clip.
    How: It counts the tokens of the response.
    When: With error_max_len_clip."""
    use_opd: bool = False
    """Subtract the KL divergence from a teacher from each token's reward: distillation in addition to rewards.
    How: It needs `teacher`; opd_kl_coef of the teacher is the weight.
    When: If there is a better model with the same vocabulary."""
    is_pure_opd: bool = False
    """Train only on the divergence from teachers, without rewards.
    How: It needs `teacher`; actor_train and actor_infer may be called student_train and student_infer, as in ROLL. The
    advantage of a token is the teacher's log-probability minus the student's, with gamma 0 and adv_estimator reinforce.
    With opd_loss: jsd there are no advantages.
    When: To distill without any reward."""
    opd_loss: Annotated[Literal["policy_gradient", "jsd"], _PURE] = "policy_gradient"
    """What is_pure_opd compares between the student and its teacher.
    How: With jsd there is one teacher, which runs in the processes of actor_train, in its layout: only model_args of
    the role teacher is read. The loss is the mean over the tokens of an update.
    When: jsd learns from the teacher's whole distribution, so it needs fewer responses; it needs memory for the
    teacher's weights on the devices of actor_train.
    - policy_gradient: the log-probabilities of sampled tokens, which are advantages
    - jsd: their whole distributions at every sampled token, by the generalized Jensen-Shannon divergence"""
    opd_beta: Annotated[_Share, _JSD] = 0.5
    """Which divergence opd_loss: jsd is, between teacher t and student s.
    How: Between 0 and 1 it is beta KL(t, m) + (1 - beta) KL(s, m) with the mixture m = beta t + (1 - beta) s. 0 is
    KL(t, s), and 1 is KL(s, t).
    When: 1 if a small student should concentrate on what the teacher finds most likely; 0 if it should cover everything
    that the teacher may write."""
    opd_top_k: Annotated[Count | None, "tokens", _JSD] = None
    """How many of the teacher's most likely tokens opd_loss: jsd compares. null is the whole vocabulary.
    How: Both distributions are normalized over these tokens; nothing is learned about the others. 1 is refused: over
    one token both distributions are 1, and the loss is 0.
    When: null; a number, such as 64, to compare with systems that only get these from the teacher."""
    opd_lmbda: Annotated[_Share, _JSD] = 1.0
    """The fraction of steps in which opd_loss: jsd uses responses that the student samples.
    How: The other steps use the answers of the rows, up to response_length; the seed decides which steps these are. It
    needs rows with answers, which are read by data_args.conversation_rules.
    When: Below 1 if there are good answers, and the student's own are far from them; with 0 nothing is sampled."""
    opd_sft_alpha: Annotated[NonNegative, _JSD] = 0.0
    """Weight of the cross-entropy of the rows' answers, in addition to the divergence.
    How: It is added in the steps that use them, as a mean over the same tokens, at temperature 1.
    When: With opd_lmbda below 1, if the answers are better than what the teacher finds likely."""
    train_infer_correction: TrainInferCorrection = TrainInferCorrection()

    def samples_at(self, step: int, seed: int) -> bool:
        """Return whether the student samples the responses of a step, counted from 0; with one draw, as ms-swift."""
        return random.Random(seed + step).random() < self.opd_lmbda

    @property
    def distils(self) -> bool:
        """Whether the loss compares whole distributions with a teacher."""
        return self.is_pure_opd and self.opd_loss == "jsd"

    @property
    def dual_clip(self) -> float:
        return self.dual_clip_bound or 1 + 2 * self.pg_clip

    @property
    def rewards_kl(self) -> bool:
        """Whether rewards include the KL divergence from the reference."""
        return self.add_token_level_kl and self.init_kl_coef > 0
