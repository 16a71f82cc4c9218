"""The model that is trained: log-probabilities, updates, its weights as a stream, checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatune.rl.samples import Rollouts
from megatune.rl.worker.model import Answer, ModelWorker


@dataclass(frozen=True, slots=True)
class Trained:
    """What one step's updates came to; the same on all ranks.

    Attributes:
        updates: of the optimizer in this step.
        loss, grad_norm: means over them.
        learning_rate: of the last one.
        num_tokens: trained, over all of them.
        skipped: updates left out because of gradients that overflowed in fp16.
        metrics: means of the objective's metrics over all of them.
        seconds: "forward_backward" and "optimizer" on this rank.
    """

    updates: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    skipped: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


class TrainedWorker(ModelWorker):
    """A role that is trained."""

    def train(self, rollouts: Rollouts, step: int) -> Trained:
        """Update on a step's samples: `ppo_epochs` passes over shuffled mini-batches of per_device_train_batch_size ·
        gradient_accumulation_steps · data-parallel size samples.

        Args:
            rollouts: with what the loss needs in `per_token` and `per_sample`.
            step: of the run, counted from 0; it seeds the order of samples.

        Raises:
            MegatuneError: NOT_FINITE, naming gradients; the weights are as they were.
        """
        raise NotImplementedError

    def find_checkpoint(self, asked: bool | str) -> tuple[str | None, list[str]]:
        """Choose and verify the checkpoint to resume from, before `load`.

        Args:
            asked: True: the newest whole one of the role's output folder, None where there is none; a path; False.

        Returns:
            It, and lines that a user should see.

        Raises:
            MegatuneError: INPUT, where one is asked for and none is whole.
        """
        raise NotImplementedError

    def save(self, step: int, beside: Mapping[str, bytes] | None = None) -> str | None:
        """Save checkpoint-STEP, the model and its training state; whole or not at all.

        Args:
            step: steps done.
            beside: small files by name that go into its training/ folder, such as the driver's state.

        Returns:
            Where it is.

        Raises:
            MegatuneError: CANNOT_WRITE.
        """
        raise NotImplementedError


class PolicyWorker(TrainedWorker):
    """A rank of actor_train."""

    def log_probs(self, rollouts: Rollouts, temperature: float) -> Answer:
        """Compute log-probabilities of the responses' tokens at a temperature, of the weights as they are."""
        raise NotImplementedError

    def reference_log_probs(self, rollouts: Rollouts, temperature: float) -> Answer:
        """Compute those of the model without its adapters: the reference of a run that trains adapters."""
        raise NotImplementedError

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of what `weights` gives."""
        raise NotImplementedError

    def weights(self, ranks: Collection[int] = (0,)) -> Iterator[dict[str, Tensor]]:
        """Stream the weights: whole tensors by their Hugging Face names, adapters merged into them.

        Every rank iterates to the end; those in `ranks` get buckets of at most `model_update_buffer_size_mb`, or one
        tensor where that is larger, the others empty ones, as many as it takes.
        """
        raise NotImplementedError
