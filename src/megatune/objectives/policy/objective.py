"""The policy's loss: what `engine.step` computes of losses and entropies of tokens.

Values of tokens lie where their response's tokens are predicted, as labels do. Legend: b rows, s tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatune.config.rl.settings import AlgorithmPart, PolicyVariant
from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput

# Extras of tokens, `data.batches.TokenValues` fp32 [b, s], named as in Rollouts.per_token; 0 at all other tokens.
MASK, ADVANTAGES, WEIGHTS = "mask", "advantages", "weights"  # always
OLD = "old_log_probs"  # where recompute_old_log_probs; without them the ratio is 1
ROLLOUT = "rollout_log_probs"  # always; the correction without `OLD`, and the gap between both
REFERENCE = "reference_log_probs"  # where use_kl_loss
# An extra of documents, `DocumentValues` fp32 [D]: scores, where pg_variant is topr.
SCORES = "scores"


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Policy loss + kl_loss_coef · KL - entropy_loss_coef · entropy, aggregated as loss_agg_mode says, over the
    micro-batches of all ranks that one update takes.

    Every layout, and any distribution of samples to micro-batches, gives the same gradient.

    Attributes:
        settings: ratio clip, importance_sampling, loss_agg_mode, coefficients, train-infer correction.
        temperature: of sampling; log-probabilities are those at it.
        variant: pg_variant of ROLL's ActorPGWorker; None is its ActorWorker's clipped loss.
        norm_length: what seq-mean-token-sum-norm divides by; ROLL's is sequence_length - 1.
        samples: in the mini-batch, of all ranks; used by seq-mean-token-sum-norm alone.
    """

    settings: AlgorithmPart
    temperature: float = 1.0
    variant: PolicyVariant | None = None
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0
    norm_length: int = 1
    samples: int = 1

    @property
    def token_extras(self) -> tuple[str, ...]:
        """Extras of tokens that micro-batches must have."""
        ...

    @property
    def document_extras(self) -> tuple[str, ...]:
        """Extras of documents that micro-batches must have."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """By ROLL's names: actor/pg_loss, actor/kl_loss, actor/entropy, actor/ppo_ratio_clipfrac, ..."""
        ...

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count tokens, or samples, with a mask: int64 []."""
        ...

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss of losses and entropies of tokens, fp32 [b, s / cp, 2]."""
        ...
