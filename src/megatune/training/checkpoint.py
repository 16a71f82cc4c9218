"""Checkpoints: a Hugging Face model as it is, and beside it what a resume needs.

checkpoint-N/training/ holds the optimizer under Hugging Face names (any layout reads them), state.json, and each
rank's random numbers. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER, adapter_files, finish_adapter, write_adapter_config
from megatune.bridge.assemble import Assembly, load_optimizer
from megatune.bridge.checked_files import end_check
from megatune.bridge.file_set import FileSet
from megatune.bridge.file_stream import SmallFile, WrittenFile
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.shard_files import ShardFiles, optimizer_files
from megatune.config.settings import Settings
from megatune.engine import device, groups
from megatune.engine.optimizer import load_scalars, main_shards, scalars
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.trained import trained_weights
from megatune.families.weights import hf_shapes
from megatune.training.conversion import write_beside
from megatune.training.model_files import scored_config, small_files, with_dtype, write_chat_template
from megatune.training.storage.manifest import TRAINING_FOLDER, FileDigest
from megatune.training.train_state import STATE_NAME, TrainState, changed_since, read_state

# Of state.json: the token whose embedding gets no gradient. A reward model's config.json may be the first to name one,
# and a run that began with a language model without goes on so, as in Transformers.
_PADDING_TOKEN = "padding_token"
# Of the model itself, whose adapters are loaded onto it.
_OF_MODEL = ("config.json", "generation_config.json")


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
        parameters, layout = assembly.parameters, (assembly.architecture, assembly.coords)
        self._sets: list[FileSet | ShardFiles] = []
        if _has_adapters(settings):
            self._sets = [adapter_files(parameters, *layout)]
        else:
            self._sets = [FileSet("model", parameters, *layout, form=assembly.form, carried=assembly.carried)]
        self._small: list[SmallFile] = []
        if not settings.checkpoint.save_only_model:
            shards = main_shards(assembly.optimizer)
            self._sets.append(optimizer_files(parameters, shards, *layout, folder=TRAINING_FOLDER))
            numbers = safetensors.torch.save(device.rng_state())
            self._small.append(SmallFile(f"{TRAINING_FOLDER}{_rng_name(assembly)}", numbers))
        if self._small and assembly.coords.rank == 0:
            content = asdict(state) | {
                "optimizer": scalars(assembly.optimizer),
                "layout": layout_of(assembly, settings),
                _PADDING_TOKEN: assembly.model[0].module.padding_token,
            }
            own = {STATE_NAME: json.dumps(content, indent=1).encode()}
            self._small += [
                SmallFile(f"{TRAINING_FOLDER}{name}", data) for name, data in {**(beside or {}), **own}.items()
            ]
        self.num_bytes = sum(files.num_bytes for files in self._sets)
        self.model_bytes = self._sets[0].num_bytes

    def __iter__(self) -> Iterator[WrittenFile]:
        """Yield the files, of which each is to be read before the next; collective over all ranks. The rank's own share
        of the optimizer comes first, for which it waits for nobody."""
        for files in reversed(self._sets):
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
    return f"rng-{assembly.coords.rank:05d}.safetensors"


def _copy_model_files(source: Path, folder: Path, settings: Settings, architecture: Architecture) -> None:
    """Copy tokenizer, chat template and generation settings; config.json gets the dtype that was trained. Beside
    adapters there is their own configuration instead of the model's."""
    names = [path.name for path in small_files(source)]
    if _has_adapters(settings):
        names = [name for name in names if name not in _OF_MODEL]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    write_chat_template(settings, source, folder)
    if _has_adapters(settings):
        base, finetuning = settings.model.model_name_or_path, settings.finetuning
        write_adapter_config(folder, architecture, finetuning, base or str(source), dropout=finetuning.lora_dropout)
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = with_dtype(config, settings.precision.params_dtype)
    if architecture.num_labels:
        config = scored_config(config, source, architecture.num_labels, settings.run.label_kind)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_adapters(settings: Settings) -> bool:
    return settings.finetuning.finetuning_type == "lora"


def layout_of(assembly: Assembly, settings: Settings) -> dict[str, Any]:
    """Return what determines which rank holds what."""
    sizes = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    return {
        **{name: getattr(settings.parallel, name) for name in sizes},
        "expert_tensor_parallel_size": settings.parallel.expert_tensor_size,
        "virtual_pipeline_model_parallel_size": settings.parallel.virtual_stages,
        "data_parallel_size": assembly.coords.dp_size,
        "params_dtype": settings.precision.params_dtype,
    }


def check_continues(checkpoint: Path, architecture: Architecture, settings: Settings, expected: TrainState) -> None:
    """Refuse to continue with other rows, another batch or other trained weights, before anything is loaded.

    Args:
        expected: what this run would train on.

    Raises:
        MegatuneError: SETTINGS, naming what was changed.
    """
    state = read_state(checkpoint)
    assert state is not None, "a checkpoint that was chosen has training state"
    findings = list(changed_since(checkpoint, state, expected))
    if not settings.run.no_load_optim:
        findings += _trained_otherwise(checkpoint / TRAINING_FOLDER, architecture, settings)
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def load_checkpoint(checkpoint: Path, assembly: Assembly, settings: Settings) -> TrainState:
    """Restore optimizer, counters and random numbers into an assembly whose weights came from this checkpoint, which
    `check_continues` accepted.

    Raises:
        MegatuneError: INPUT, when the state cannot be read.
        DamagedCheckpointError: what was read of the checkpoint since `choose_checkpoint` is damaged.
    """
    training = checkpoint / TRAINING_FOLDER
    content = json.loads((training / STATE_NAME).read_text(encoding="utf-8"))
    counters, layout = content.pop("optimizer"), content.pop("layout")
    if _PADDING_TOKEN in content:
        token = content.pop(_PADDING_TOKEN)
        for chunk in assembly.model:
            chunk.module.padding_token = token
    state = TrainState(**content)
    if not settings.run.no_load_optim:
        shards = main_shards(assembly.optimizer)
        load_optimizer(checkpoint, assembly.parameters, shards, assembly.architecture, settings.finetuning)
        load_scalars(assembly.optimizer, counters)
    path = training / _rng_name(assembly)
    # Another layout has other ranks, which begin with the numbers of a new run. Only lora_dropout draws in training.
    if _is_same(layout, layout_of(assembly, settings)) and path.is_file() and not settings.run.no_load_rng:
        device.set_rng_state(safetensors.torch.load_file(path))
    _raise_damage(checkpoint)
    return state


class DamagedCheckpointError(MegatuneError):
    """Raised on every rank where files of a checkpoint turned out to be damaged while they were read."""


def _raise_damage(checkpoint: Path) -> None:
    """Raise what any rank found while it loaded. Collective."""
    check = end_check()
    mine = [] if check is None else [*check.problems.values()]
    if problems := sorted({problem for part in groups.all_gather_object(mine) for problem in part}):
        raise DamagedCheckpointError([Finding(each, str(checkpoint)) for each in problems], ExitCode.INPUT)


def _is_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Compare layouts; earlier versions did not write all of their numbers."""
    return all(now.get(name) == value for name, value in then.items())


def _trained_otherwise(training: Path, architecture: Architecture, settings: Settings) -> Iterator[Finding]:
    """Compare what the run trains with what the checkpoint has optimizer state of."""
    held = {name.partition("/")[2] for name in SafetensorsFolder(training, "optimizer").names()}
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
    fix = "train the same ones again (finetuning_type, freeze_*), or start a new run from it: model_name_or_path"
    yield Finding(what, str(training), why, fix)
