"""Objectives of the policy and the critic for `engine.step`, computed from losses, entropies or scores of tokens.

Values of tokens are aligned with labels: each is at the position that predicts its token. Legend: b rows, s tokens per
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import PolicyVariant
from megatune.engine.layers.cross_entropy import Head
from megatune.engine.sequences import LocalBatch, MicroBatch, expand_to_tokens, run_totals, sequence_totals
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.policy.losses import (
    Range,
    Terms,
    correct,
    correction_metrics,
    kl_terms,
    normalizer,
    num_responses,
    shares,
    token_losses,
    token_weights,
)

# Extras of tokens, `data.batches.TokenValues` fp32 [b, s], named as in Rollouts.per_token; 0 at tokens of prompts. All
# tokens of a response have labels, including masked ones.
MASK, ADVANTAGES, WEIGHTS = "mask", "advantages", "weights"
# With enable_old_logprobs_recompute, of the trainer before its updates; otherwise of the first pass over a sample, in
# which this extra is missing and the ratio is 1.
OLD = "old_log_probs"
ROLLOUT = "rollout_log_probs"  # without enable_old_logprobs_recompute: the train-infer correction is applied here
REFERENCE = "reference_log_probs"  # with use_kl_loss
# An extra of documents, `DocumentValues` fp32 [D]: scores, for the variant topr.
SCORES = "scores"

_METRICS = (
    "actor/pg_loss", "actor/entropy", "actor/approxkl", "actor/policykl", "actor/ratio_mean",
    "actor/ppo_ratio_clipfrac", "actor/ppo_ratio_high_clipfrac", "actor/ppo_ratio_low_clipfrac",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """rl_loss_coef · (policy loss + kl_loss_coef · KL) - entropy_loss_coef · entropy, aggregated by loss_agg_mode over
    all micro-batches and ranks of one update.

    The gradient does not depend on the parallel layout or the distribution of samples to micro-batches. Masked tokens
    are excluded from all sums. Tokens dropped by the correction's filters here still count in divisors, which are
    computed before.

    Attributes:
        settings: ratio clip, importance_sampling, loss_agg_mode, coefficients, train-infer correction.
        temperature: sampling temperature, at which log-probabilities are computed.
        variant: pg_variant of ROLL's ActorPGWorker, with token-level ratios; None for the clipped loss of its
            ActorWorker, with ratios by importance_sampling.
        topr_positive_weight, topr_negative_weight: weights of responses with a score above 0, and of others.
        norm_length: the divisor of seq-mean-token-sum-norm; ROLL's is sequence_length - 1.
        samples: number of samples in the mini-batch over all ranks; used only by seq-mean-token-sum-norm.
        ratio: see `token_losses`.
        first: a list to which log-probabilities, fp32 [b, s / cp], and `Sequences.boundaries` of micro-batches without
            old ones are appended, for later passes over their samples; or None.
    """

    settings: AlgorithmSettings
    temperature: float = 1.0
    variant: PolicyVariant | None = None
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0
    norm_length: int = 1
    samples: int = 1
    ratio: Range = (None, None)
    first: list[tuple[Tensor, tuple[int, ...]]] | None = field(default=None, compare=False)

    @property
    def head(self) -> Head:
        """The outputs required of the output layer."""
        return Head(self.temperature, entropy=True)

    @property
    def token_extras(self) -> tuple[str, ...]:
        """Names of the required extras of tokens."""
        old = OLD if self.settings.enable_old_logprobs_recompute else ROLLOUT
        return MASK, ADVANTAGES, WEIGHTS, old, *(REFERENCE,) * self.settings.use_kl_loss

    @property
    def document_extras(self) -> tuple[str, ...]:
        """Names of the required extras of documents."""
        return (SCORES,) if self.variant == "topr" else ()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics by ROLL's names."""
        own = () if self.settings.enable_old_logprobs_recompute else correction_metrics(self.settings)
        return *_METRICS, *("actor/kl_loss",) * self.settings.use_kl_loss, *own

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count tokens or responses: int64 []."""
        mask: Tensor = batch.extras[MASK].on_rank(None, torch.device("cpu"))
        return normalizer(self.settings.loss_agg_mode, mask, batch)

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss from losses and entropies of tokens, fp32 [b, s / cp, 2]."""
        settings, extras = self.settings, batch.extras
        losses, entropies = output.unbind(-1)
        log_probs, mask, weights = -losses, extras[MASK], extras[WEIGHTS]
        norm = self.samples / self.norm_length
        of_tokens = token_weights(settings.loss_agg_mode, mask, batch.sequences, norm)
        metrics: Mapping[str, tuple[Tensor, Tensor]] = {}
        old = extras.get(OLD)
        if old is None:
            old = log_probs.detach()
            if self.first is not None:
                self.first.append((old, batch.sequences.boundaries))
        if not settings.enable_old_logprobs_recompute:
            weights, of_tokens, metrics = self._corrected(old, weights, of_tokens, batch)
        log_ratio = torch.where(mask > 0, log_probs - old, 0.0)
        terms = self._terms(log_probs, log_ratio, batch)
        weights_of_topr = self.topr_positive_weight, self.topr_negative_weight
        of_policy = token_losses(self.variant, terms, settings, *weights_of_topr, self.ratio)
        policy = (of_tokens * weights * of_policy).sum()
        loss, kl = policy, torch.zeros_like(policy)
        if settings.use_kl_loss:
            reference = torch.where(mask > 0, extras[REFERENCE], log_probs)
            kl = (of_tokens * kl_terms(log_probs, reference, settings.kl_loss_type)).sum()
            loss = loss + settings.kl_loss_coef * kl
        loss = settings.rl_loss_coef * loss
        if settings.entropy_loss_coef:
            loss = loss - settings.entropy_loss_coef * (of_tokens * entropies).sum()
        count = mask.sum() if settings.loss_agg_mode == "token-mean" else shares(mask, batch.sequences).sum()
        found = {"actor/pg_loss": (policy, count), "actor/kl_loss": (kl, count), **metrics}
        found |= self._means(terms.log_ratio, log_ratio, entropies, mask)
        return ObjectiveOutput(loss, found)

    def _terms(self, log_probs: Tensor, log_ratio: Tensor, batch: LocalBatch) -> Terms:
        """Return the inputs of token losses; the ratio of a response (GSPO, arXiv:2507.18071) is the geometric mean of
        those of its tokens."""
        mask = batch.extras[MASK]
        if self.variant is None and self.settings.importance_sampling == "seq":
            sizes = sequence_totals(mask, batch.sequences).clamp(min=1)
            log_ratio = (sequence_totals(log_ratio, batch.sequences) / sizes).to(log_ratio.dtype)
            log_ratio = torch.where(mask > 0, log_ratio, 0.0)
        is_positive = None
        if self.variant == "topr":
            is_positive = expand_to_tokens(batch.extras[SCORES], batch.sequences) > 0
        return Terms(log_probs, log_ratio, batch.extras[ADVANTAGES], is_positive)

    def _corrected(
        self, old: Tensor, weights: Tensor, of_tokens: Tensor, batch: LocalBatch
    ) -> tuple[Tensor, Tensor, Mapping[str, tuple[Tensor, Tensor]]]:
        """Apply the train-infer correction to the weights of the policy loss, and to those of all losses."""
        is_response = batch.labels >= 0  # excludes outputs of the environment between turns
        totals = partial(sequence_totals, sequences=batch.sequences)
        of_turns = partial(run_totals, mask=is_response, sequences=batch.sequences)
        found = correct(old, batch.extras[ROLLOUT], is_response, totals, of_turns, self.settings)
        return weights * found.weights.to(weights.dtype), of_tokens * found.keep, found.metrics

    @torch.no_grad()
    def _means(
        self, log_ratio: Tensor, of_tokens: Tensor, entropies: Tensor, mask: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return means over unmasked tokens.

        Args:
            log_ratio: log-ratios used by the loss, of tokens or of responses.
            of_tokens: log-ratios of tokens.
        """
        ratio = log_ratio.exp()
        high, low = ratio > 1 + self.settings.pg_clip_high, ratio < 1 - self.settings.pg_clip_low
        values = {
            "entropy": entropies,
            "approxkl": of_tokens.square() / 2,
            "policykl": of_tokens,
            "ratio_mean": ratio,
            "ppo_ratio_clipfrac": high | low,
            "ppo_ratio_high_clipfrac": high,
            "ppo_ratio_low_clipfrac": low,
        }
        return {f"actor/{name}": ((value * mask).sum(), mask.sum()) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class DivergenceObjective:
    """Divergence from a teacher's distributions, averaged over the unmasked tokens of all micro-batches and ranks of an
    update; see `engine.layers.divergence`. Micro-batches have the extra TEACHER_OUTPUTS.

    Attributes:
        temperature: sampling temperature, by which the logits of both models are divided.
        likelihood: weight of the cross-entropy of the same tokens, at temperature 1.
    """

    temperature: float = 1.0
    likelihood: float = 0.0

    token_extras = (MASK,)
    document_extras = ()

    @property
    def head(self) -> Head:
        """The outputs required of the output layer."""
        return Head(self.temperature, losses=self.likelihood > 0)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics in addition to the loss."""
        return "teacher_divergence", *("answer_loss",) * (self.likelihood > 0)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count unmasked tokens: int64 []."""
        mask: Tensor = batch.extras[MASK].on_rank(None, torch.device("cpu"))
        return normalizer("token-mean", mask, batch)

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss from divergences of tokens, fp32 [b, s / cp], or from divergences and cross-entropy losses,
        [b, s / cp, 2]."""
        mask = batch.extras[MASK]
        if not self.likelihood:
            loss = (output * mask).sum()
            return ObjectiveOutput(loss, {"teacher_divergence": (loss, mask.sum())})
        divergence, loss = ((each * mask).sum() for each in output.unbind(-1))
        metrics = {"teacher_divergence": (divergence, mask.sum()), "answer_loss": (loss, mask.sum())}
        return ObjectiveOutput(divergence + self.likelihood * loss, metrics)


# Extras of tokens, `data.batches.TokenValues` fp32 [b, s], 0 at tokens of prompts, at the positions that predict their
# tokens: the value there is that of the state before the token.
RETURNS, VALUES = "returns", "values"


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Half the squared error of values, averaged over the tokens of each response, and over responses.

    Attributes:
        clip: value_clip, the range around the old values in which the error can decrease.
    """

    clip: float | None = None

    metric_names = ("critic/loss", "critic/value", "critic/vpred", "critic/clipfrac", "critic/error")
    token_extras = (MASK, RETURNS, VALUES)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count responses with an unmasked token: int64 []."""
        mask: Tensor = batch.extras[MASK].on_rank(None, torch.device("cpu"))
        return num_responses(mask, batch)

    def __call__(self, scores: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss from scores of tokens, fp32 [b, s / cp]."""
        mask, returns, old = (batch.extras[name] for name in self.token_extras)
        # Scores at padding may not be finite.
        values = torch.where(mask > 0, scores, 0.0)
        error = losses = (values - returns).square()
        if self.clip is not None:
            near = torch.minimum(torch.maximum(values, old - self.clip), old + self.clip)
            losses = torch.maximum(error, (near - returns).square())
        of_responses = shares(mask, batch.sequences)
        loss, count = 0.5 * (losses * of_responses).sum(), of_responses.sum()
        means = {"value": old, "vpred": values, "clipfrac": losses > error, "error": error}
        metrics = {f"critic/{name}": ((value * of_responses).sum(), count) for name, value in means.items()}
        return ObjectiveOutput(loss, {"critic/loss": (loss, count), **metrics})
