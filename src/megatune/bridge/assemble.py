"""Build a model in a parallel layout, load a Hugging Face checkpoint into it and, for training, attach an optimizer.

Each rank reads only its slices of the weights and of the optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import open_adapter
from megatune.bridge.file_set import NO_CARRIED, CarriedTensors, gather_dict
from megatune.bridge.parameters import LocalParameter, local_parameters
from megatune.bridge.safetensors_files import ModelFolder, SafetensorsFolder, TensorSource
from megatune.bridge.sources import InitialScore, fill_quantized, weight_sources
from megatune.bridge.torch_dist.source import TorchDistFolder, torch_dist_files
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates, build
from megatune.engine.layers.quantized import QuantizedMatrix
from megatune.engine.model import Chunk, build_model
from megatune.engine.optimizer import MainShard, Optimizer, build_optimizer
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.dense import EMBEDDING, SCORE
from megatune.families.forms import CheckpointForm, find_form
from megatune.families.scores import num_labels
from megatune.families.table import Box, whole_box
from megatune.families.weight_index import key_findings
from megatune.families.weights import Layers, TensorLayout, Weight, hf_shapes
from megatune.hub.megatron import is_torch_dist
from megatune.progress import Progress

_SHARED_READ = 2**25  # elements of a parameter that the ranks with copies of it read at a time
_MIN_SHARED_READ = 2**16  # smaller parameters are read without an exchange
_COMPARED_ROWS = 64  # of output layer and embedding: if they were trained separately, all rows differ


@dataclass(slots=True)
class LoadedModel:
    """This rank's part of a model.

    Attributes:
        model: its pipeline chunks, in order.
        parameters: each of their parameters, and each buffer in checkpoints, as entries of the family's weight map.
        form: names and arrangement of the tensors in the checkpoint's files.
        carried: tensors of the checkpoint that the model does not use, and that are written back unchanged.
    """

    architecture: Architecture
    coords: RankCoordinates
    model: list[Chunk]
    parameters: list[LocalParameter]
    form: CheckpointForm
    carried: CarriedTensors = NO_CARRIED


@dataclass(slots=True, kw_only=True)
class Assembly(LoadedModel):
    """A model with its optimizer, ready to train."""

    optimizer: Optimizer


def assemble(model_dir: str | Path, settings: Settings, adapter: Path | None = None) -> Assembly:
    """Build the layout of `settings`, load the checkpoint into it and attach an optimizer. Call `groups.join` first.

    Args:
        adapter: see `load_model`.

    Raises:
        MegatuneError: the checkpoint cannot be used (exit code 66).
    """
    coords = build(settings.parallel, seed=settings.run.seed, timeout=settings.run.ddp_timeout)
    return attach_optimizer(load_model(model_dir, settings, coords, adapter=adapter), settings)


def load_model(
    model_dir: str | Path,
    settings: Settings,
    coords: RankCoordinates,
    *,
    trained: bool = True,
    adapter: Path | None = None,
) -> LoadedModel:
    """Build a model in the layout of `groups.build` and load a checkpoint into it; several models can coexist.

    Args:
        coords: what `groups.build` returned for `settings.parallel`.
        trained: False for a model that only runs forward: frozen, in eval mode, without gradient buffers.
        adapter: a folder with the trained weights of an adapter, such as a checkpoint; None for those in the settings.

    Raises:
        MegatuneError: the checkpoint cannot be used (exit code 66).
    """
    architecture = load_architecture(model_dir, *settings.task)
    model = build_model(architecture, settings, trained=trained)
    parameters = local_parameters(model, architecture, coords)
    folder, form = open_checkpoint(model_dir, architecture)
    base, adapters = weight_sources(folder, architecture, settings, adapter)
    progress = Progress("loading", len(parameters), "tensors", shows=coords.rank == 0)  # of this rank
    for local in parameters:
        # A module that is trained whole may be in the adapter or only in the base; a new score is in neither.
        name = next(iter(local.hf_shapes(architecture)))
        sources = (source for source in (adapters, base) if source is not None and source.has(name))
        source = next(sources, None) or InitialScore(architecture, settings.run.seed)
        load_weights(source, [local], architecture)
        progress.add(1)
    progress.close()
    return LoadedModel(architecture, coords, model, parameters, form, carried_tensors(folder, architecture))


def attach_optimizer(loaded: LoadedModel, settings: Settings) -> Assembly:
    """Build the optimizer of a trained model. Load the weights first: master weights are copied from them."""
    of_settings = settings.optimizer, settings.parallel, settings.precision, settings.finetuning.loraplus_lr_ratio
    optimizer = build_optimizer(loaded.model, loaded.architecture, *of_settings)
    return Assembly(**{each.name: getattr(loaded, each.name) for each in fields(LoadedModel)}, optimizer=optimizer)


def carried_tensors(folder: ModelFolder, architecture: Architecture) -> CarriedTensors:
    """Return the tensors of a checkpoint that its model does not use, and that are written back unchanged."""
    patterns = FAMILIES[architecture.model_type].carried(architecture)
    carried = re.compile("|".join(patterns))
    names = sorted(name for name in folder.names() if carried.fullmatch(name)) if patterns else []
    return CarriedTensors(folder, tuple(names))


def open_checkpoint(model_dir: str | Path, architecture: Architecture) -> tuple[ModelFolder, CheckpointForm]:
    """Open the weights of a checkpoint, and detect how its files name and arrange them.

    Weights in Megatron-Core's format are read with the names that Transformers saves.

    Raises:
        MegatuneError: exit code 66, see SafetensorsFolder and TorchDistFolder; with every key that is missing, unknown
            or has another shape than in config.json.
    """
    family = FAMILIES[architecture.model_type]
    config = read_config(model_dir)
    weights, version = family.weight_map(architecture), str(config.get("transformers_version") or "")
    if num_labels(config) < architecture.num_labels:
        # A reward model based on a language model has no score in its files.
        weights = tuple(each for each in weights if each.engine != SCORE.engine)
    if is_torch_dist(model_dir):
        if architecture.mtp_num_layers:
            raise MegatuneError(_missing_mtp(str(model_dir), "Megatron-Core's format lacks them"), ExitCode.INPUT)
        form = find_form(family.forms, weights, architecture, (), lambda name: (), version)
        return TorchDistFolder(model_dir, architecture, weights, form), form
    folder = SafetensorsFolder(model_dir)
    form = find_form(family.forms, weights, architecture, folder.names(), folder.file_shape, version)
    _check_keys(folder, architecture, weights, form)
    folder.places = form.locate_all(weights, architecture)
    copies = family.copies(architecture).items()
    return folder, replace(form, copies=tuple(each for each in copies if each[1] in folder.names()))


def _missing_mtp(where: str, why: str) -> Finding:
    """Return the finding for a checkpoint without multi-token prediction layers."""
    what = "it has no multi-token prediction layers, which mtp_num_layers trains"
    return Finding(what, where, why, "remove mtp_num_layers, or name a checkpoint that has them")


def weight_files(model_dir: str | Path) -> list[Path]:
    """List the files of a model's weights.

    Raises:
        MegatuneError: there are none (exit code 66).
    """
    return torch_dist_files(model_dir) if is_torch_dist(model_dir) else SafetensorsFolder(model_dir).files()


def _check_keys(
    folder: SafetensorsFolder, architecture: Architecture, weights: Sequence[Weight], form: CheckpointForm
) -> None:
    """Compare the names and shapes in the files with the expected weights."""
    family = FAMILIES[architecture.model_type]
    expected, names = form.all_shapes(weights, architecture), folder.names()
    ignored = re.compile("|".join(family.ignored(architecture)))
    missing, unknown = expected.keys() - names, {key for key in names - expected.keys() if not ignored.fullmatch(key)}
    where = str(folder.folder)
    further = {
        name for weight in weights if weight.layers is Layers.MTP for name in form.all_shapes([weight], architecture)
    }
    if further and further <= missing:
        why = "some models are published without them, and merging or converting drops them"
        raise MegatuneError(_missing_mtp(where, why), ExitCode.INPUT)
    findings = list(key_findings(missing, unknown, where, architecture.model_type))
    for name, shape in expected.items():
        if name in names and folder.file_shape(name) != shape:
            what = f"{name} is {list(folder.file_shape(name))}, but config.json requires {list(shape)}"
            findings.append(Finding(what, where))
    if architecture.tie_word_embeddings and not findings:
        (words,) = (tensor.name for weight in weights if weight.engine == EMBEDDING.engine for tensor in weight.hf)
        findings += _tying_findings(folder, form.file_name(words))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)


def _tying_findings(folder: SafetensorsFolder, words: str) -> Iterator[Finding]:
    """Compare the first rows of an output layer in the files with the embedding to which config.json ties it.

    Transformers leaves the two untied if they differ, and saves both without changing config.json.
    """
    for name in sorted(name for name in folder.names() if name.endswith("lm_head.weight")):
        boxes = {each: whole_box(folder.file_shape(each)) for each in (words, name)}
        rows = min(_COMPARED_ROWS, *(box.last for box in boxes.values()))
        first, second = (folder.read_box(each, box._replace(last=rows)) for each, box in boxes.items())
        if not torch.equal(first.float(), second.float()):
            what, where = f"{name} differs from {words}, to which config.json ties it", str(folder.folder)
            why, fix = "the output layer would not be loaded", "set tie_word_embeddings to false in config.json"
            yield Finding(what, where, why, fix)


@torch.no_grad()
def load_weights(source: TensorSource, parameters: Iterable[LocalParameter], architecture: Architecture) -> None:
    """Fill this rank's parameters from Hugging Face tensors, cast to their dtype; padding is zero.

    Each of the ranks that hold the same slices reads a part of them and sends it to the others: collective over these
    ranks, and over those that hold slices of the same weights. Quantized weights are quantized while loading.

    Raises:
        MegatuneError: a file is damaged (exit code 66).
    """
    for local in parameters:
        if isinstance(local.parameter, QuantizedMatrix):
            fill_quantized(local.parameter, source, list(local.rows(architecture)), local.hf_shapes(architecture))
        elif local.weight.layout is TensorLayout.COLUMNS and local.slice.tp_size > 1:
            _fill_columns(source, local, architecture)
        else:
            _fill(source, local, architecture)


def _fill(source: TensorSource, local: LocalParameter, architecture: Architecture) -> None:
    """Fill a parameter whose slice is contiguous in files, a part at a time."""
    whole, group = local.parameter.data.view(-1), _readers(local)
    if group is None:
        source.fill(whole, local.rows(architecture))
        return
    for first in range(0, len(whole), _SHARED_READ):
        part = whole[first : first + _SHARED_READ]

        def read(start: int, stop: int, first: int = first) -> Tensor:
            mine = whole.new_empty(stop - start)
            source.fill(mine, local.rows(architecture, first + start, first + stop), start=first + start)
            return mine

        part.copy_(_read_together(group, len(part), read))


def _fill_columns(source: TensorSource, local: LocalParameter, architecture: Architecture) -> None:
    """Fill a matrix whose columns are split over ranks: each reads whole rows, which are contiguous in files, and sends
    the others their columns. No rank reads more than it needs."""
    group = groups.expert_tensor_parallel_group() if local.weight.per_expert else groups.tensor_parallel_group()
    size, rank, readers = local.slice.tp_size, local.slice.tp_rank, _readers(local)
    target = local.parameter.data
    for piece in local.pieces(architecture):
        ((name, (rows, columns)),) = hf_shapes(local.weight, architecture, local.layer, piece.slice).items()
        width = columns // size

        def read(start: int, stop: int, name: str = name, columns: int = columns, width: int = width) -> Tensor:
            edges = [start + (stop - start) * number // size for number in range(size + 1)]
            box = Box(edges[rank], edges[rank + 1], 0, columns)
            mine = source.read_box(name, box).to(target.device, target.dtype)
            sent = [part.contiguous().view(-1).view(torch.uint8) for part in mine.split(width, dim=1)]
            counts = [(last - first) * width * target.dtype.itemsize for first, last in pairwise(edges)]
            found = torch.empty(sum(counts), dtype=torch.uint8, device=target.device)
            torch.distributed.all_to_all_single(found, torch.cat(sent), counts, [len(one) for one in sent], group=group)
            return found.view(target.dtype).view(stop - start, width)

        found = read(0, rows) if readers is None else _read_together(readers, rows, read)
        target.view(-1)[piece.start : piece.stop].copy_(found.view(-1))


def _readers(local: LocalParameter) -> ProcessGroup | None:
    """Return the ranks that hold copies of a slice and read it together; None if it is faster to read it alone."""
    group = groups.expert_replica_group() if local.weight.per_expert else groups.replica_group()
    return group if group.size() > 1 and local.parameter.numel() >= _MIN_SHARED_READ else None


def _read_together(group: ProcessGroup, length: int, read: Callable[[int, int], Tensor]) -> Tensor:
    """Return the result of `read` for 0..length, [length, ...]; each rank of the group reads a part of it for all."""
    size, rank = group.size(), group.rank()
    part = -(-length // size)
    mine = read(min(rank * part, length), min((rank + 1) * part, length))
    sent, found = (mine.new_empty(count * part, *mine.shape[1:]) for count in (1, size))
    sent[: len(mine)] = mine
    received, given = (each.view(-1).view(torch.uint8) for each in (found, sent))
    torch.distributed.all_gather_into_tensor(received, given, group=group)
    return found[:length]


@torch.no_grad()
def load_optimizer(
    checkpoint: Path,
    parameters: Iterable[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
    finetuning: FinetuningSettings,
) -> None:
    """Fill this rank's shard of the optimizer from the training state of a checkpoint, saved in any layout.

    Master weights are read from the training state, or from the weights if those were trained in fp32. Collective.

    Raises:
        MegatuneError: the state belongs to another optimizer or model (exit code 66).
    """
    folder = SafetensorsFolder(checkpoint / "training", "optimizer")
    if finetuning.finetuning_type == "lora":
        weights: TensorSource = open_adapter(checkpoint, architecture, finetuning)
    else:
        weights, _ = open_checkpoint(checkpoint, architecture)
    names = folder.names()
    kinds = {name.partition("/")[0] for name in names}
    # Muon keeps other state for matrices than for other parameters, and a rank may hold no part of either.
    needed = gather_dict({kind: None for shard in shards.values() for kind in shard.state})
    if needed.keys() != kinds - {"main"}:
        held, wanted = ", ".join(sorted(kinds - {"main"})), ", ".join(sorted(needed))
        what = f"has {held or 'no state'}, but this run's optimizer needs {wanted or 'none'}"
        fix = "resume with the same optimizer, or start from the checkpoint as a model (model_name_or_path)"
        why = "the optimizer was changed between the runs"
        raise MegatuneError(Finding(what, str(folder.folder), why, fix), ExitCode.INPUT)
    for local in parameters:
        shard = shards.get(local.parameter)
        if shard is None:
            continue
        rows = list(local.rows(architecture, shard.start, shard.stop))
        for kind, target in {"main": shard.main, **shard.state}.items():
            source, prefix = (folder, f"{kind}/") if kind in kinds else (weights, "")
            source.fill(target, rows, prefix, start=shard.start)
