"""Worker of actor_train for distillation: computes a teacher's distributions in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatune.bridge.assemble import LoadedModel, load_model
from megatune.data.batches import Batch
from megatune.engine.layers.divergence import TeacherOutputs
from megatune.engine.offload import Offload
from megatune.engine.sequences import ROUTING
from megatune.engine.step import TEACHER_OUTPUTS, teacher_outputs
from megatune.objectives.policy.objective import DivergenceObjective
from megatune.rl.samples import Rollouts
from megatune.rl.worker.model import WorkerInfo
from megatune.rl.worker.policy import PolicyWorker
from megatune.rl.worker.training import TrainResult
from megatune.training.agreement import fetched_on_node


@dataclass(frozen=True, slots=True)
class _RankLocal:
    """An extra input of a micro-batch that is already on its rank and device."""

    value: TeacherOutputs

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> TeacherOutputs:
        return self.value

    def pin_memory(self) -> _RankLocal:
        return self


class DistillationWorker(PolicyWorker):
    """One rank of actor_train whose loss is the divergence from `ModelRole.teacher`; see `ModelWorker`.

    The teacher has the policy's layout and is offloaded together with the policy's weights. Before an update, it
    computes its last hidden states for all micro-batches of the update.
    """

    _teacher: LoadedModel
    _likelihood = 0.0  # weight of the cross-entropy in the step

    def load(self, checkpoint: str | None = None) -> WorkerInfo:
        ready, settings = super().load(checkpoint), self.role.teacher
        assert settings is not None, "refused by the settings' checks"
        self.context.beat("load the teacher", 0, limit=settings.run.ddp_timeout)
        name = settings.model.model_name_or_path
        assert name is not None
        source = fetched_on_node(self.context, "teacher", name, settings.model.model_revision, settings)
        self._teacher = load_model(source, settings, self.loaded.coords, trained=False)
        self._offload = Offload([*self.loaded.model, *self._teacher.model], self.loaded.optimizer)
        return ready

    def objective(self, num_samples: int) -> DivergenceObjective:
        return DivergenceObjective(self.rl.sampling_temperature, self._likelihood)

    def train(self, rollouts: Rollouts, step: int) -> TrainResult:
        algorithm = self.rl.algorithm
        self._likelihood = 0.0 if algorithm.samples_at(step, self.rl.run.seed) else algorithm.opd_sft_alpha
        return super().train(rollouts, step)

    @property
    def _keeps_first(self) -> bool:
        return False

    def _update_batches(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        algorithm, vocab_size = self.rl.algorithm, self._teacher.architecture.vocab_size
        models = self.loaded.model, self._teacher.model
        # The teacher's routers choose by themselves, even if the student replays routing.
        others = [{name: each for name, each in batch.extras.items() if name != ROUTING} for batch in batches]
        asked = [replace(batch, extras=extras) for batch, extras in zip(batches, others, strict=True)]
        found = teacher_outputs(*models, vocab_size, asked, algorithm.opd_beta, algorithm.opd_top_k)
        if not found:  # before the last pipeline stage
            return batches
        return [
            replace(batch, extras={**batch.extras, TEACHER_OUTPUTS: _RankLocal(each)})
            for batch, each in zip(batches, found, strict=True)
        ]
