"""Checkpoints: a Hugging Face model as it is, and beside it what a resume needs.

checkpoint-N/training/ holds the optimizer under Hugging Face names (any layout reads them), state.json, and each
rank's random numbers. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER
from megatune.bridge.adapter_writer import write_adapter_config
from megatune.bridge.assemble import Assembly, load_optimizer
from megatune.bridge.file_set import SmallFile, WrittenFile
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.save import adapter_files, finish_adapter, optimizer_files, weight_files
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.optimizer import load_scalars, main_shards, scalars
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.trained import trained_weights
from megatune.families.weights import hf_shapes
from megatune.training.megatron import write_beside
from megatune.training.storage.manifest import FileDigest
from megatune.training.storage.model_files import reward_config, small_files, with_dtype

_TRAINING = "training"
_STATE = "state.json"
# Of the model itself, whose adapters are loaded onto it.
_OF_MODEL = ("config.json", "generation_config.json")


@dataclass(slots=True)
class TrainState:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        rows_digest: of all that determines the rows (data/cache/key.py).
        rows_parts: what they are made of, in words, each with a digest of its own; {} where that is not known.
        global_batch_size: rows per step; with `seed` it determines which rows a step trains.
        best_loss, best_step: the lowest evaluation loss so far, and the step it was measured at.
        stream: where streamed data resumes (data/streaming/blocks.py); None without streaming.
        base: digest of what adapters are beside (training/base.py); "" without adapters.
        reference: digest of the model that pairs are compared with (training/reference.py); "" without one.
        reward_sum, reward_pairs: of the pairs trained, see `objectives.preference.RunningReward`.
        updates: of the optimizer, where a step may have several.
        bad_steps: how many were skipped (training/bad_steps.py).
        recent_losses, recent_grad_norms: of the last steps that were not bad.
    """

    step: int = 0
    rows_digest: str = ""
    global_batch_size: int = 0
    seed: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    stream: dict[str, Any] | None = None
    base: str = ""
    reference: str = ""
    reward_sum: float = 0.0
    reward_pairs: float = 0.0
    updates: int = 0
    bad_steps: int = 0
    recent_losses: list[float] = field(default_factory=list)
    recent_grad_norms: list[float] = field(default_factory=list)
    rows_parts: dict[str, str] = field(default_factory=dict)


class CheckpointFiles:
    """The files of a checkpoint that this rank writes; made by all ranks together.

    Args:
        beside: small files by name that rank 0 adds to the training state.

    Attributes:
        num_bytes: of their tensors.
        model_bytes: of those of the model, or of adapters.
    """

    def __init__(
        self, assembly: Assembly, settings: Settings, state: TrainState, beside: Mapping[str, bytes] | None = None
    ) -> None:
        parameters, layout = assembly.parameters, (assembly.architecture, assembly.place)
        if _has_adapters(settings):
            self._sets = [adapter_files(parameters, *layout)]
        else:
            self._sets = [weight_files(parameters, *layout, form=assembly.form)]
        self._small: list[SmallFile] = []
        if not settings.checkpoint.save_only_model:
            shards = main_shards(assembly.optimizer)
            self._sets.append(optimizer_files(parameters, shards, *layout, folder=f"{_TRAINING}/"))
            numbers = safetensors.torch.save(device.rng_state())
            self._small.append(SmallFile(f"{_TRAINING}/{_rng_name(assembly)}", numbers))
        if self._small and assembly.place.rank == 0:
            parts = {"optimizer": scalars(assembly.optimizer), "layout": layout_of(assembly, settings)}
            content = {**asdict(state), **parts}
            own = {_STATE: json.dumps(content, indent=1).encode()}
            self._small += [SmallFile(f"{_TRAINING}/{name}", data) for name, data in {**(beside or {}), **own}.items()]
        self.num_bytes = sum(files.num_bytes for files in self._sets)
        self.model_bytes = self._sets[0].num_bytes

    def __iter__(self) -> Iterator[WrittenFile]:
        """Yield the files, of which each is to be read before the next; collective over all ranks."""
        for files in self._sets:
            yield from files.files()
        yield from self._small


def complete_checkpoint(
    folder: Path, digests: Sequence[FileDigest], assembly: Assembly, settings: Settings, source: Path, step: int
) -> list[FileDigest]:
    """Add what is made from files alone, on one rank, once all ranks have written theirs.

    Args:
        digests: of what ranks wrote.
        assembly: whose numbers may have changed since: only what does not change is looked at.
        source: the model's own folder: its tokenizer and configuration go into the checkpoint.

    Returns:
        Digests of files that are as they were; the rest of the folder has none yet.
    """
    if _has_adapters(settings):
        finish_adapter(folder, assembly.architecture, settings.finetuning)
        digests = [file for file in digests if not file.name.startswith(ADAPTER)]
    elif settings.checkpoint.save_format == "torch_dist":
        write_beside(folder, assembly.architecture, assembly.form, step)
    _copy_model_files(source, folder, settings, assembly.architecture)
    return list(digests)


def _rng_name(assembly: Assembly) -> str:
    return f"rng-{assembly.place.rank:05d}.safetensors"


def _copy_model_files(source: Path, folder: Path, settings: Settings, architecture: Architecture) -> None:
    """Copy tokenizer, chat template and generation settings; config.json gets the dtype that was trained. Beside
    adapters there is their own configuration instead of the model's."""
    names = [path.name for path in small_files(source)]
    if _has_adapters(settings):
        names = [name for name in names if name not in _OF_MODEL]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if _has_adapters(settings):
        base, finetuning = settings.model.model_name_or_path, settings.finetuning
        write_adapter_config(folder, architecture, finetuning, base or str(source), dropout=finetuning.lora_dropout)
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = with_dtype(config, settings.precision.params_dtype)
    if architecture.num_labels:
        config = reward_config(config, source)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_adapters(settings: Settings) -> bool:
    return settings.finetuning.finetuning_type == "lora"


def layout_of(assembly: Assembly, settings: Settings) -> dict[str, Any]:
    """Return what determines which rank holds what."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return {
        **{name: getattr(settings.parallel, name) for name in sizes},
        "virtual_pipeline_model_parallel_size": settings.parallel.virtual_stages,
        "data_parallel_size": assembly.place.dp_size,
        "params_dtype": settings.precision.params_dtype,
    }


def read_state(checkpoint: Path) -> TrainState | None:
    """Read how far the run had come; None where the checkpoint is a model only."""
    path = checkpoint / _TRAINING / _STATE
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return TrainState(**{each.name: content[each.name] for each in fields(TrainState) if each.name in content})


def load_checkpoint(checkpoint: Path, assembly: Assembly, settings: Settings, expected: TrainState) -> TrainState:
    """Restore optimizer, counters and random numbers into an assembly whose weights came from this checkpoint.

    Args:
        expected: what this run would train on; a run may not continue with other rows or another batch unnoticed.

    Raises:
        MegatuneError: SETTINGS, naming what was changed; INPUT, when the state cannot be read.
    """
    training = checkpoint / _TRAINING
    content = json.loads((training / _STATE).read_text(encoding="utf-8"))
    counters, layout = content.pop("optimizer"), content.pop("layout")
    state = TrainState(**content)
    findings = list(_changed(checkpoint, state, expected))
    if not settings.run.no_load_optim:
        findings += _trained_otherwise(training, assembly, settings)
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if not settings.run.no_load_optim:
        shards = main_shards(assembly.optimizer)
        load_optimizer(checkpoint, assembly.parameters, shards, assembly.architecture, settings.finetuning)
        load_scalars(assembly.optimizer, counters)
    path = training / _rng_name(assembly)
    # Another layout has other ranks; no number is drawn in training that their states could change.
    if layout == layout_of(assembly, settings) and path.is_file() and not settings.run.no_load_rng:
        device.set_rng_state(safetensors.torch.load_file(path))
    return state


def _changed(checkpoint: Path, state: TrainState, expected: TrainState) -> Iterator[Finding]:
    size = "rows per step (batch size × accumulation × data-parallel size)"
    for what, name in ((size, "global_batch_size"), ("seed", "seed")):
        before, after = getattr(state, name), getattr(expected, name)
        if before != after:
            changed = f"{what} was {before}, and is {after} in this run"
            why = "rows already trained could not be told from those to come"
            fix = f"set it to {before} again, or start anew with overwrite_output_dir: true"
            yield Finding(changed, str(checkpoint), why, fix)
    if state.rows_digest != expected.rows_digest:
        what = "the training rows are others than those the run began with"
        why = _changed_parts(state.rows_parts, expected.rows_parts)
        fix = "put it back, or start anew with overwrite_output_dir: true"
        yield Finding(what, str(checkpoint), why, fix)
    if state.base != expected.base:
        what = "the adapters were trained beside another base"
        why = "the model's weights, or those of an adapter merged into them, are others than then, or in other bits"
        fix = "name the base that the run began with, or start anew from the adapters: adapter_name_or_path"
        yield Finding(what, str(checkpoint), why, fix)
    elif state.reference != expected.reference:
        what = "answers were compared with another reference"
        why = "the weights of ref_model, or of the model that the run started from, are others than then"
        fix = "name the reference that the run began with, or start anew with overwrite_output_dir: true"
        yield Finding(what, str(checkpoint), why, fix)


def _changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Name what the rows are made of and was not the same before."""
    if not before or not after:
        return "a file of the data sets, the tokenizer, the template or another data setting was changed"
    changed = [part for part in after if part in before and before[part] != after[part]]
    gone, new = ([part for part in one if part not in other] for one, other in ((before, after), (after, before)))
    lists = (("changed", changed), ("gone", gone), ("new", new))
    return "; ".join(f"{said}: {', '.join(parts)}" for said, parts in lists if parts) or "their order"


def _trained_otherwise(training: Path, assembly: Assembly, settings: Settings) -> Iterator[Finding]:
    """Compare what the run trains with what the checkpoint has optimizer state of."""
    held = {name.partition("/")[2] for name in SafetensorsFolder(training, "optimizer").names()}
    architecture = assembly.architecture
    trained = {
        name
        for weight, layer in trained_weights(architecture, settings.finetuning)
        for name in hf_shapes(weight, architecture, layer)
    }
    if not held or held == trained:  # plain SGD keeps nothing
        return
    less, more = sorted(held - trained), sorted(trained - held)
    what = "other weights were trained than this run trains"
    lists = ((more, "has no optimizer state of"), (less, "has some that this run would freeze, of"))
    why = "; ".join(f"it {said} {len(names)} tensors, such as {names[0]}" for names, said in lists if names)
    fix = "train the same ones again (finetuning_type, freeze_*), or start anew from it: model_name_or_path"
    yield Finding(what, str(training), why, fix)
