"""The settings of a rehearsal: those of the file, with less of everything that only takes time; which processes it
starts, and another layout to resume in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from megatune.architecture import Architecture
from megatune.config.rules import check
from megatune.config.settings import ParallelSettings, Settings, setting_value, with_settings
from megatune.config.values import shown
from megatune.rehearse.outcome import Change

_SAVED, _AFTER = 3, 3  # steps after a resume: an optimizer's wrong state shows in the second
_SCALED = 28  # in fp16 about 24 steps are skipped, until the loss scale has fallen from 2^32
_TEXT, _WITH_PICTURES = 256, 1024  # tokens
_PIXELS = 128 * 128
_ROWS = 96
_EVALUATED = 8
_ANSWER = 4  # tokens
_LOOK_SECONDS = 300  # of one collective operation


def smaller(
    settings: Settings, architecture: Architecture, layout: Mapping[str, Any], model_dir: str, output_dir: str
) -> tuple[Settings, list[Change]]:
    """Return settings of a few short steps in the file's layout, and what of them is other than in the file.

    Args:
        architecture: of the small model.
        layout: settings of the layout that fit it, by name.
    """
    changes = [
        *_layout(layout),
        *_batch(settings),
        *_data(settings, architecture),
        *_steps(settings),
        *_trained(settings, architecture),
        *_around(settings, model_dir, output_dir),
    ]
    said = []
    for path, value, why in changes:
        was = setting_value(settings, path)
        if was != value and why:
            said.append(Change(path.partition(".")[2], shown(was), shown(value), why))
    return with_settings(settings, {path: value for path, value, _ in changes}), said


_Changes = Iterator[tuple[str, Any, str]]  # "group.name", the value, and why; "" is not said


def _layout(layout: Mapping[str, Any]) -> _Changes:
    for name, value in layout.items():
        yield f"parallel.{name}", value, "for fewer layers, cut in the same way"


def _batch(settings: Settings) -> _Changes:
    batch, parallel = settings.batch, settings.parallel
    pp = parallel.pipeline_model_parallel_size
    least = 2 * pp if parallel.virtual_stages and pp < 4 else max(pp, 2)
    steps = min(batch.gradient_accumulation_steps, least)
    yield "batch.gradient_accumulation_steps", steps, "a full pipeline, and sums over micro-batches"
    why = "two rows show what more do"
    yield "batch.per_device_train_batch_size", min(batch.per_device_train_batch_size, 2), why
    evaluates = settings.evaluation.eval_strategy != "no"
    yield "batch.per_device_eval_batch_size", min(batch.per_device_eval_batch_size, 2), why if evaluates else ""


def _data(settings: Settings, architecture: Architecture) -> _Changes:
    data = settings.data
    has_pictures = architecture.vision is not None
    longest = min(data.cutoff_len, _WITH_PICTURES if has_pictures else _TEXT)
    yield "data.cutoff_len", longest, "shorter rows"
    if longest < data.cutoff_len and data.truncation_strategy in ("drop", "error"):
        yield "data.truncation_strategy", "budget", "rows that the file's own cutoff_len holds are to stay"
    if has_pictures:
        for name in ("image_max_pixels", "video_max_pixels"):
            yield f"data.{name}", min(getattr(data, name), _PIXELS), "small images and videos"
        yield "data.video_maxlen", min(data.video_maxlen, 4), "few frames"
    yield "data.max_samples", min(data.max_samples or _ROWS, _ROWS), "stage 1 reads more of them"
    if data.val_size:
        yield "data.val_size", min(data.val_size, float(_EVALUATED)), "few rows to evaluate"
    if data.streaming:
        yield "data.buffer_size", min(data.buffer_size, 2 * _EVALUATED), "several blocks"
    yield "data.preprocessing_num_workers", None, ""
    yield "data.dataloader_num_workers", 0, "processes of their own would share two cores with the ranks"
    yield "data.tokenized_path", None, "the file's folder stays as it is"
    yield "data.on_bad_row", "skip", "stage 1 names bad rows"
    yield "data.max_bad_rows", None, ""


def _steps(settings: Settings) -> _Changes:
    optimizer, evaluation = settings.optimizer, settings.evaluation
    saved = _SCALED if settings.precision.fp16 else _SAVED
    yield "optimizer.max_steps", saved + _AFTER, "enough to save, resume and compare"
    if optimizer.warmup_steps > 1:
        yield "optimizer.warmup_steps", 1.0, "fewer steps"
    yield "optimizer.lr_scheduler_kwargs", _scheduler(optimizer.lr_scheduler_kwargs), "fewer steps"
    yield "checkpoint.save_strategy", "steps", f"a checkpoint at step {saved}"
    yield "checkpoint.save_steps", saved, f"a checkpoint at step {saved}"
    yield "checkpoint.save_total_limit", None, "what is compared stays"
    if evaluation.eval_strategy != "no":
        yield "evaluation.eval_strategy", "steps", f"an evaluation at step {saved}"
        yield "evaluation.eval_steps", saved, f"an evaluation at step {saved}"
    if settings.generates:
        if evaluation.eval_generate_steps:
            yield "evaluation.eval_generate_steps", saved, f"answers at step {saved}"
        yield "evaluation.eval_generate_samples", min(evaluation.eval_generate_samples, _EVALUATED), "few answers"
        yield "evaluation.eval_generate_tokens", min(evaluation.eval_generate_tokens, _ANSWER), "short answers"
    yield "logging.logging_steps", 1, "every step is compared"


def _scheduler(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a scheduler for few steps."""
    steps = {name: min(value, 2) for name, value in given.items() if name in ("num_decay_steps", "num_stable_steps")}
    return {**given, **steps}


def _trained(settings: Settings, architecture: Architecture) -> _Changes:
    finetuning, recompute = settings.finetuning, settings.recompute
    count, layers = finetuning.freeze_trainable_layers, architecture.num_layers
    if finetuning.finetuning_type == "freeze" and count:
        most = max(each for each in range(1, max(2, layers // 2 + 1)) if layers % each == 0)
        kept = min(abs(count), most)
        yield "finetuning.freeze_trainable_layers", kept if count > 0 else -kept, "fewer layers"
    if finetuning.adapter_name_or_path:
        yield "finetuning.adapter_name_or_path", [], "adapters of the real model do not fit a smaller one"
        yield "finetuning.create_new_adapter", False, "there is none to start from"
    if recompute.recompute_num_layers:
        yield "recompute.recompute_num_layers", 1, "fewer layers"


def _around(settings: Settings, model_dir: str, output_dir: str) -> _Changes:
    preference = settings.preference
    yield "model.model_name_or_path", model_dir, ""
    yield "model.mcore_model", None, "weights are random"
    yield "model.rope_scaling", None, "config.json of the smaller model has it"
    yield "model.mtp_num_layers", 0, "the smaller model has no layers that predict further tokens"
    yield "model.model_revision", "main", ""
    yield "run.output_dir", output_dir, ""
    for name, value in (("overwrite_output_dir", False), ("resume_from_checkpoint", None), ("num_processes", None)):
        yield f"run.{name}", value, ""
    yield "run.ddp_timeout", min(settings.run.ddp_timeout, _LOOK_SECONDS), "nothing here waits longer"
    yield "run.max_restarts", 0, "a failure must be visible"
    yield "run.exit_duration_in_mins", None, "a rehearsal is short"
    yield "run.memory_check", "off", "it is of the real model, in stage 1"
    if preference.ref_model:
        yield "preference.ref_model", model_dir, "the small model itself"
        yield "preference.ref_model_adapters", [], "they do not fit a smaller model"
    yield "checkpoint.push_to_hub", False, "nothing leaves this machine"
    yield "checkpoint.hub_model_id", None, ""
    yield "logging.report_to", ["none"], "nothing leaves this machine"
    yield "logging.use_swanlab", False, ""
    yield "logging.plot_loss", False, ""
    yield "logging.profile", False, "it is for steps of the real size"


MOST_PROCESSES = 32
_MOST_OTHER = 8


def rehearsed_world(parallel: ParallelSettings, world_size: int) -> int:
    """Return the fewest processes with two data-parallel copies where the real run has some, of dense layers and of
    experts.

    Args:
        world_size: of the real run, which the layout fits.
    """
    smallest = parallel.smallest_world

    def has_copies(world: int) -> tuple[bool, bool]:
        return world > parallel.model_parallel_size, world > parallel.expert_parallel_size

    wanted = has_copies(world_size)
    for times in (1, 2):
        world = smallest * times
        if world_size % world == 0 and world <= MOST_PROCESSES and has_copies(world) == wanted:
            return world
    return smallest


def describe_layout(parallel: ParallelSettings, world_size: int) -> str:
    """Name every size above 1, as every plan does, and sequence parallelism: tp2 pp4 vpp2 ep8 dp4 sp."""
    words = parallel.layout_name(world_size, has_experts=parallel.expert_model_parallel_size > 1)
    return f"{words} sp" if parallel.sequence_parallel else words or "one process"


def other_layout(settings: Settings, world_size: int, architecture: Architecture) -> tuple[Settings, int] | None:
    """Return settings with another layout that trains the same rows a step, and its processes; None where there is
    none.

    The one that differs in most sizes is taken, of those the one with the fewest processes above one.
    """
    rows = settings.batch.gradient_accumulation_steps * (world_size // settings.parallel.model_parallel_size)
    before = settings.parallel.sizes(world_size)
    best: tuple[tuple[int, int], Settings, int] | None = None
    for changes, world in _others(settings.parallel, architecture):
        changed = with_settings(settings, {f"parallel.{name}": value for name, value in changes.items()})
        replicas = world // changed.parallel.model_parallel_size
        if rows % replicas:
            continue
        changed = with_settings(changed, {"batch.gradient_accumulation_steps": rows // replicas})
        now = changed.parallel.sizes(world)
        if now == before or check(changed, architecture, world):
            continue
        score = sum(now[name] != before[name] for name in now), -world if world > 1 else -_MOST_OTHER
        if best is None or score > best[0]:
            best = score, changed, world
    return None if best is None else best[1:]


def _others(parallel: ParallelSettings, architecture: Architecture) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield layouts of a few processes, whatever rules say to them."""
    plain: dict[str, Any] = {
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "expert_tensor_parallel_size": 1 if architecture.moe is not None else None,
    }
    sizes = (1, 2)
    experts = (1, 2) if architecture.moe is not None else (1,)
    for tp, pp, cp, ep, dp in product(
        sizes, sizes, (1, 2) if parallel.context_parallel_size == 1 else (1,), experts, sizes
    ):
        changes = {
            **plain,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "sequence_parallel": tp > 1,
        }
        world = tp * pp * cp * dp
        if world <= _MOST_OTHER and world % (ep * pp) == 0:
            yield changes, world
