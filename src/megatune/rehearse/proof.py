"""Act 6: logits, loss and gradients of the small model in the layout, against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.groups.run import PAIR_STAGES
from megatune.config.settings import BatchSettings, ExpertSettings, FinetuningSettings, PrecisionSettings, Settings
from megatune.errors import ExitCode, Finding
from megatune.families import read_config
from megatune.rehearse.outcome import Outcome, failed, left, passed
from megatune.rehearse.ranks import Watcher, local_world, output_into, too_late

if TYPE_CHECKING:
    from megatune.rehearse.acts import Scene
    from megatune.verify.numbers import Difference

_ROWS, _LENGTH = 8, 48
_MOST_NAMED = 5


def compare_with_transformers(scene: Scene, act: str, limit: float) -> Outcome:
    """Compute both in fp32, where a difference is one of the layout and not of rounding.

    Args:
        limit: seconds of all of it.
    """
    settings = scene.settings
    from megatune.verify.checkpoints import with_adapters
    from megatune.verify.run import RanksFailed, verify_layout

    model_dir = scene.output("whole") if scene.architecture.num_labels else scene.model_dir
    if not (model_dir / "config.json").is_file():
        return left(act, "a reward model's score is that of stage 2, which left none")
    samples = _samples(scene, model_dir)
    proven = _settings(scene)
    log = scene.folder / "launch" / "verify.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    watcher = Watcher(limit)
    try:
        with output_into(log), with_adapters(proven, model_dir, scene.architecture) as adapted:
            verdict = verify_layout(model_dir, adapted, samples, local_world(scene.world_size), look=watcher)
    except RanksFailed as ended:
        why = (
            too_late(limit)
            if watcher.late
            else Finding("the numbers could not be computed", fix=f"--keep DIR keeps {log.name}")
        )
        return failed(act, [why], ExitCode(ended.args[0]))
    wrong = [one for one in verdict.differences if not one.passes]
    if wrong:
        findings = [
            Finding(f"{one.name} differs by {one.error:.1e}, more than {one.tolerance:.0e}") for one in wrong[:5]
        ]
        return failed(act, findings, ExitCode.DIFFERENT)
    worst = max((one for one in verdict.differences if one.tolerance), key=_share)
    gradients = len(verdict.differences) - 3
    found = f"logits, loss and {gradients} gradients within their tolerance in fp32; nearest to it {worst.name}: "
    found += f"{worst.error:.1e} of {worst.tolerance:.0e}"
    if bits := settings.finetuning.quantization_bit:
        found += f"; the base is whole on both sides, not in {bits} bits"
    stage = settings.run.stage
    if stage in (*PAIR_STAGES, "kto"):
        found += f"; the loss of {stage} is not among them, which Transformers does not have"
    return passed(act, found)


def _share(difference: Difference) -> float:
    return difference.error / difference.tolerance


def _samples(scene: Scene, model_dir: Path) -> list:
    from megatune.verify.samples import random_pictures, random_samples, uneven_lengths

    config, vision = read_config(model_dir), scene.architecture.vision
    text: Any = config.get("text_config") or config
    return random_samples(
        scene.architecture.vocab_size,
        uneven_lengths(_ROWS, _LENGTH),
        scene.settings.run.seed,
        padding=text.get("pad_token_id"),
        pictures=random_pictures(_ROWS, vision) if vision is not None else (),
        vision=vision,
    )


def _settings(scene: Scene) -> Settings:
    """Return settings that compute what Transformers does: the whole model or its adapters, no loss of routing."""
    settings, parallel = scene.settings, scene.settings.parallel
    steps = -(-_ROWS * parallel.model_parallel_size // scene.world_size)
    if parallel.virtual_stages:
        steps = -(-steps // parallel.pipeline_model_parallel_size) * parallel.pipeline_model_parallel_size
    finetuning = settings.finetuning
    if finetuning.finetuning_type != "lora":
        frozen = scene.architecture.vision is None  # what there is not may not be said to be trained
        finetuning = FinetuningSettings(freeze_vision_tower=frozen, freeze_multi_modal_projector=frozen)
    finetuning = finetuning.model_copy(update={"quantization_bit": None})
    plain = ExpertSettings()
    routing = {
        name: getattr(plain, name)
        for name in (
            "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity", "moe_router_load_balancing_type", "moe_router_bias_update_rate",
        )
    }  # fmt: skip
    return settings.model_copy(
        update={
            "batch": BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=steps),
            "finetuning": finetuning,
            "experts": settings.experts.model_copy(update=routing),
            "precision": PrecisionSettings(),
        }
    )
