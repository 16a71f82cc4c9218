"""What adapters are beside: their base, known by a digest of its weights."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import xxhash

from megatune.bridge.adapter_files import ADAPTER
from megatune.bridge.assemble import weight_files
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.data.cache.folder import cache_dir
from megatune.engine import groups
from megatune.families.quantized import form_of
from megatune.launch.context import RankContext
from megatune.training.resume import shares
from megatune.training.storage.files import write_atomically
from megatune.training.storage.manifest import FileDigest, digest_file


def digest_base(context: RankContext, model_dir: Path, settings: Settings) -> str:
    """Digest the files of a model's weights, and of the adapters that are merged into them; each rank reads a share.

    Collective. Digests are kept between runs, of files that are not changed: a start does not read its base twice.

    Returns:
        32 hexadecimal digits, the same on every rank, which neither names of files nor their order change; other ones
        where the base is quantized.
    """
    finetuning = settings.finetuning
    context.beat("digest", 0, limit=settings.run.ddp_timeout)
    merged = finetuning.adapter_name_or_path[: None if finetuning.create_new_adapter else -1]
    paths = weight_files(model_dir) + [path for each in merged for path in SafetensorsFolder(each, ADAPTER).files()]
    files = [FileDigest(str(path), path.stat().st_size, "") for path in paths]
    mine = [_kept_digest(Path(file.name)) for file in shares(files, context.world_size)[context.rank]]
    digests = sorted(digest for part in groups.gather(mine) for digest in part)
    if (form := form_of(finetuning)) is not None:
        digests.append((0, repr(form)))
    return xxhash.xxh3_128_hexdigest(json.dumps(digests).encode())


def _kept_digest(path: Path) -> tuple[int, str]:
    """Return bytes and digest of a file: those of an earlier start while nothing has written to it since, as its inode
    and the times of the last changes of its content and of its inode tell."""
    path, stat = path.resolve(), path.stat()
    identity = [str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    kept = cache_dir() / "digests" / xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())
    with suppress(OSError, ValueError):
        size, digest = json.loads(kept.read_text())
        return size, digest
    found = digest_file(path)
    with suppress(OSError):  # without a cache it is read again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(found))
    return found
