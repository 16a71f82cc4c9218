"""Input of the planner: this machine, the lengths of the data's rows, and the plan for the actual rows of a run before
its weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.config.derived import Gpu
from megatune.config.load import Loaded
from megatune.config.model import changed
from megatune.config.settings import Settings
from megatune.errors import MegatuneError
from megatune.hub.models import Model
from megatune.plan.case import Case, PlannedModel
from megatune.plan.read_question import PlannedRows
from megatune.plan.rows import RowLengths
from megatune.plan.run.preflight import Preflight, with_rows

if TYPE_CHECKING:
    from megatune.data.encode import Encoder
    from megatune.data.media_table import MediaCounts
    from megatune.data.rows import TokenRows
    from megatune.plan.machine import Machine


def this_machine(
    processes: int, num_gpus: int, calibration: str | Path | None = None, env: Mapping[str, str] = os.environ
) -> tuple[Machine | None, str]:
    """Return this machine with its calibration; or None and the reason why it cannot be planned for.

    Args:
        processes: of the run, on this machine.
        num_gpus: visible GPUs (`launch.devices.count_gpus`), 0 to use the CPU.
        calibration: a file of `megatune plan --calibrate`; None for the one of this device.

    Raises:
        MegatuneError: INPUT, if the calibration cannot be read.
    """
    from megatune.launch.devices import count_cpus, free_memory, list_gpus
    from megatune.plan.catalogue import cpu_machine, device_by_driver_name, find_machine
    from megatune.plan.catalogue.own import calibration_for

    if not num_gpus:
        # As `launch.processes` divides them among ranks.
        threads = env.get("OMP_NUM_THREADS", "").strip()
        each = int(threads) if threads.isdigit() and int(threads) else max(1, count_cpus() // processes)
        cores = min(count_cpus(), processes * each)
        machine = cpu_machine(free_memory(), cores, processes)
    else:
        gpus = list_gpus(env)
        known = [device for gpu in gpus if (device := device_by_driver_name(gpu.name)) is not None]
        if not gpus or len(known) < len(gpus):
            names = ", ".join(sorted({gpu.name for gpu in gpus})) or "GPUs that nvidia-smi does not list"
            return None, f"the catalogue does not have {names}: give its numbers to megatune plan (docs/devices.md)"
        smallest = min(range(len(gpus)), key=lambda index: gpus[index].memory)
        machine = find_machine(known[smallest].name, gpus_per_node=processes)
        memory = min(machine.device.memory, gpus[smallest].memory)
        machine = replace(machine, device=replace(machine.device, memory=memory))
    return replace(machine, calibration=calibration_for(machine.device.name, calibration)), ""


_BF16_SINCE = (8, 0)


def this_gpu(env: Mapping[str, str] = os.environ) -> Gpu:
    """Return the first GPU of this machine, for all of them."""
    from megatune.launch.devices import compute_capability, list_gpus
    from megatune.plan.catalogue import device_by_driver_name

    gpus = list_gpus(env)
    name = gpus[0].name if gpus else "this GPU"
    if (known := device_by_driver_name(name)) is not None:
        return replace(known.gpu, name=name)
    capability = compute_capability()
    return Gpu(name, None if capability is None else capability >= _BF16_SINCE)


_MAX_LENGTHS = 100_000  # of more rows, this many are taken at equal distances
_OVERRIDE = "--document_length and --longest_document say otherwise"


def data_rows(settings: Settings, model: PlannedModel) -> PlannedRows:
    """Return row lengths of the data: from an earlier run into the same folder, or from a sample of the data."""
    from megatune.data.sampled import first_remote_dataset, sampled_lengths, text_counter

    whole = f"rows are taken to be {settings.data.cutoff_len:,} tokens long, cutoff_len"
    try:
        if (prepared := _prepared(settings)) is not None:
            return prepared
        if missing := first_remote_dataset(settings):
            return PlannedRows(note=f"{missing} is not in files here: {whole} ({_OVERRIDE})")
        folder = _model_folder(settings)
        if model.architecture.vision is None:
            found = sampled_lengths(settings, None if folder is None else text_counter(folder))
        elif folder is None:
            return PlannedRows(note=f"no processor of images is available: {whole} ({_OVERRIDE})")
        else:
            found = sampled_lengths(settings, encoder=_encoder(settings, folder))
    except MegatuneError as error:
        return PlannedRows(note=f"the data cannot be looked at ({error.findings[0].what}): {whole} ({_OVERRIDE})")
    if not found.documents:
        return PlannedRows(note=f"the data has no row to look at: {whole} ({_OVERRIDE})")
    weighted = sum(size * size for size in found.documents) / sum(found.documents)
    rows = found.documents
    if settings.packing:  # all rows but the last ones are full
        rows = [min(settings.data.cutoff_len, sum(rows)) if found.is_whole else settings.data.cutoff_len]
    lengths = RowLengths.of(rows, found.origin, document=weighted, media=found.media if found.is_exact else None)
    tokens = sum(found.documents) * found.rows / (found.encoded or found.rows) if found.is_whole else None
    if not found.is_exact:
        return PlannedRows(lengths=lengths, tokens=tokens)
    return PlannedRows(
        lengths=lengths,
        image_tokens=found.image_tokens,
        largest_picture=found.largest_picture or None,
        tokens=tokens,
    )


def _model_folder(settings: Settings) -> Path | None:
    """Return the folder with the model's tokenizer if it is on this machine."""
    name = settings.model.model_name_or_path
    folder = None if name is None else Path(name).expanduser()
    if name is not None and folder is not None and not folder.is_dir():
        folder = _cached(name, settings.model.model_revision, settings.model.cache_dir)
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def _encoder(settings: Settings, folder: Path) -> Encoder:
    from megatune.data.encode import load_tokenizer, make_encoder
    from megatune.data.vision import load_vision_input

    folder = changed(Model(folder), settings).tokenizer_dir()
    tokenizer = load_tokenizer(folder)
    return make_encoder(settings, tokenizer, load_vision_input(folder, tokenizer, settings.data))


def _cached(name: str, revision: str, cache_dir: str | None) -> Path | None:
    """Return the cache folder of a model on the Hugging Face hub, if its tokenizer was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _prepared(settings: Settings) -> PlannedRows | None:
    """Return the rows that an earlier run into the same folder recorded for the same model and data, if any."""
    from megatune.plan.run.record import PLAN_NAME, read_records

    output = settings.run.output_dir
    if output is None or not (Path(output).expanduser() / PLAN_NAME).is_file():
        return None
    try:
        case = read_records(Path(output).expanduser())[-1].case
    except MegatuneError:  # of another version
        return None
    same = all(getattr(case.settings, name) == getattr(settings, name) for name in ("data", "model"))
    if not same or case.lengths is None or case.settings.run.stage != settings.run.stage:
        return None
    lengths = replace(case.lengths, origin=f"of all rows, as {output} has them")
    return PlannedRows(lengths=lengths, image_tokens=case.image_tokens, largest_picture=case.largest_picture)


def lengths_of(rows: TokenRows, media: MediaCounts) -> RowLengths:
    """Summarize the lengths of rows for the planner; of pairs, the lengths of their answers."""
    import numpy as np  # `megatune plan` does without

    spans = rows.spans
    documents = np.sort(spans[:, 1] - spans[:, 0])
    per_row = 2 if rows.is_pairs else 1
    lengths = np.sort(-(-rows.row_lengths() // per_row)) if rows.is_packed else documents
    if len(lengths) > _MAX_LENGTHS:
        lengths = lengths[np.linspace(0, len(lengths) - 1, _MAX_LENGTHS).astype(np.int64)]
    weighted = float(np.square(documents, dtype=np.float64).sum() / max(1, documents.sum()))
    return RowLengths.of(
        lengths.tolist(), "of all rows", document=weighted, media=media.tokens / len(rows) if len(rows) else 0.0
    )


def plan_rows(case: Case, lengths: RowLengths, media: MediaCounts, asked: Loaded | None) -> Preflight:
    """Plan a run for these rows.

    Args:
        asked: the user's settings, to give advice with the keys of the user's file.

    Raises:
        MegatuneError: SETTINGS, if the run does not fit into memory.
    """
    seen = (media.of_row, media.largest) if case.model.architecture.vision is not None else None
    return with_rows(case, lengths, seen, loaded=asked)
