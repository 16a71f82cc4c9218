"""Chooses and verifies the checkpoint to resume from, and digests the base model of adapters.

All ranks together compare sizes and small files with the manifest. Files with block digests are verified while they are
loaded (`bridge.checked_files`), so that nothing is read twice.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import xxhash

from megatune.bridge.assemble import weight_files
from megatune.bridge.checked_files import RangedFile, ReadCheck, begin_check, digests_of
from megatune.bridge.file_set import gather_dict
from megatune.config.settings import Settings, with_settings
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.peft_reading import read_adapter
from megatune.families.quantized import form_of
from megatune.hub.digests import FileDigest, remembered_digest
from megatune.launch.context import RankContext
from megatune.progress import Progress, amount
from megatune.training.agreement import on_rank_0, wait_for_note
from megatune.training.storage.manifest import added_files, problem_of, problem_with, read_manifest
from megatune.training.train_state import checkpoints_to_try

_POLL_SECONDS = 0.2
_MAX_THREADS = 8


def choose_checkpoint(
    context: RankContext, settings: Settings, output_dir: Path, damaged: Mapping[Path, Sequence[Finding]] | None = None
) -> tuple[Path | None, list[str]]:
    """Choose the checkpoint to resume from, or None, and return notes for the user. Collective.

    Args:
        damaged: findings of `load_checkpoint` on damaged checkpoints; files with block digests are verified later,
            while they are loaded. None verifies all files here.

    Raises:
        MegatuneError: INPUT, if the requested checkpoint, or all existing ones, are damaged.
    """
    asked, found, whole = settings.run.resume_from_checkpoint, damaged or {}, damaged is None
    settings = with_settings(settings, {"run.output_dir": str(output_dir)})
    notes: list[str] = []
    problems: list[Finding] = []
    for path in on_rank_0(lambda: checkpoints_to_try(settings)):
        new = list(found.get(path, ())) or _verify_together(context, notes, path, whole)
        if not new:
            if not whole:
                begin_check(path)
            return path, [*(f"skipped: {problem}" for problem in problems), *notes]
        problems += new
    if problems and not isinstance(asked, str):  # training from the start would lose work
        fix = "overwrite_output_dir: true deletes them and starts from the model; another output_dir keeps them"
        problems.append(Finding(f"{output_dir} holds checkpoints and none can be resumed from", fix=fix))
    elif asked is True and not settings.run.overwrite_output_dir:
        problems.append(Finding(f"resume_from_checkpoint: there is no checkpoint in {output_dir}"))
    if problems:
        raise MegatuneError(problems, ExitCode.INPUT)
    return None, []


def _verify_together(context: RankContext, notes: list[str], checkpoint: Path, whole: bool) -> list[Finding]:
    """Compare the files of a checkpoint with its manifest, each rank a share of the bytes. Collective.

    Terabytes take longer to read than a collective operation may take, so ranks post what they found to the store.

    Args:
        notes: gets a line on the bytes read and the throughput.
        whole: also read files with block digests completely.

    Returns:
        Findings, on every rank; none if the checkpoint is complete and can be resumed from.
    """
    context.beat("verify", 0)
    try:
        manifest = on_rank_0(lambda: read_manifest(checkpoint))
    except MegatuneError as error:
        return list(error.findings)
    if not manifest.resumable:
        return [Finding("holds a model without training state, so no run can resume from it", where=str(checkpoint))]
    if added := on_rank_0(lambda: added_files(checkpoint, manifest)):
        return [Finding(each, where=str(checkpoint)) for each in added]
    began = time.monotonic()
    names = {file.name for file in manifest.files}
    later = [file for file in manifest.files if not whole and digests_of(Path(file.name)).as_posix() in names]
    now = [file for file in manifest.files if file not in later]
    heads = later[context.rank :: context.world_size]
    problems = _problems_of_share(context, checkpoint, shares(now, context.world_size)[context.rank], heads)
    key = f"verify/{checkpoint.name}"
    groups.store_set(f"{key}/{context.rank}", problems)
    if context.rank == 0:  # reads the notes for all ranks
        posted = (wait_for_note(context, f"{key}/{rank}", "verify") for rank in range(context.world_size))
        groups.store_set(f"{key}/all", sorted(problem for problems in posted for problem in problems))
    found = wait_for_note(context, f"{key}/all", "verify")
    total, seconds = sum(file.size for file in now), time.monotonic() - began
    speed = f"{amount(total)} in {seconds:.1f} s, {total / 1e9 / seconds:.3g} GB/s"
    rest = f"; {amount(sum(file.size for file in later))} are verified while they are loaded" if later else ""
    notes.append(f"verified   {checkpoint}: {speed}, by {context.world_size} processes{rest}")
    return [Finding(problem, where=str(checkpoint)) for problem in found]


def shares(files: Sequence[FileDigest], world_size: int) -> list[list[FileDigest]]:
    """Distribute files over ranks by size: the largest first, each to the rank with the fewest bytes so far."""
    found: list[list[FileDigest]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        rank = sizes.index(min(sizes))
        found[rank].append(file)
        sizes[rank] += file.size
    return found


def _problem_of_head(checkpoint: Path, file: FileDigest) -> str:
    """Return the problem of a safetensors file's size or header, or ""."""

    def matches() -> bool:
        check = ReadCheck(checkpoint.resolve())
        opened = RangedFile(checkpoint / file.name, check)
        length = int.from_bytes(bytes(opened.read(0, min(8, file.size)).tolist()), "little")
        if not check.problems:
            opened.read(8, min(8 + length, file.size))
        return not check.problems

    return problem_with(checkpoint, file, matches)


def _problems_of_share(
    context: RankContext, checkpoint: Path, files: Sequence[FileDigest], heads: Sequence[FileDigest]
) -> list[str]:
    """Read this rank's files and the headers of others, and return their problems."""
    num_threads = max(1, min(len(files), (os.cpu_count() or 1) // context.local_world_size, _MAX_THREADS))
    total, seen = sum(file.size for file in files), 0  # of this rank; all read about as many bytes
    with (
        Progress("verifying", total, shows=context.rank == 0) as progress,
        ThreadPoolExecutor(num_threads) as threads,
    ):
        futures = [threads.submit(problem_of, checkpoint, file, progress.add) for file in files]
        futures += [threads.submit(_problem_of_head, checkpoint, file) for file in heads]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, _POLL_SECONDS)
            if progress.done > seen:  # no beat without progress: a hung disk is noticed
                seen = progress.done
                context.beat("verify", 0)
    # Another machine may see another file system, so name it.
    suffix = f" (on {socket.gethostname()})" if context.node_rank else ""
    return [problem + suffix for future in futures if (problem := future.result())]


def digest_base(context: RankContext, model_dir: Path, settings: Settings) -> str:
    """Digest the weights of a model and of the adapters merged into it; each rank reads a share. Collective.

    Digests of unchanged files are cached between runs.

    Returns:
        32 hexadecimal digits, the same on every rank, which do not depend on the names and order of files, but on the
        quantization of the base. With merged adapters also a dash and 32 digits for their order and scaling factors.
    """
    finetuning = settings.finetuning
    context.beat("digest", 0, limit=settings.run.ddp_timeout)
    merged = finetuning.adapter_name_or_path[: None if finetuning.create_new_adapter else -1]
    architecture, adapters = load_architecture(model_dir, *settings.task), [Path(each) for each in merged]
    scalings = [read_adapter(folder, architecture).scalings for folder in adapters]
    paths = [*weight_files(model_dir), *(folder / WEIGHTS_FILE for folder in adapters)]
    files = [FileDigest(str(path), path.stat().st_size, "") for path in paths]
    mine = {file.name: remembered_digest(Path(file.name)) for file in shares(files, context.world_size)[context.rank]}
    found = gather_dict(mine)
    digests = sorted((file.size, found[file.name]) for file in files)
    if (form := form_of(finetuning)) is not None:
        digests.append((0, repr(form)))
    base = xxhash.xxh3_128_hexdigest(json.dumps(digests).encode())
    if not adapters:
        return base
    chain = [(found[str(folder / WEIGHTS_FILE)], each) for folder, each in zip(adapters, scalings, strict=True)]
    return f"{base}-{xxhash.xxh3_128_hexdigest(json.dumps(chain, sort_keys=True).encode())}"
