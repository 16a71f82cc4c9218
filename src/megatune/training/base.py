"""What adapters are beside: their base, known by a digest of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from megatune.bridge.adapter_files import ADAPTER
from megatune.bridge.assemble import weight_files
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.families.quantized import form_of
from megatune.hub.digests import remembered_digest
from megatune.launch.context import RankContext
from megatune.training.resume import shares
from megatune.training.storage.manifest import FileDigest


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
    mine = [(file.size, remembered_digest(Path(file.name))) for file in shares(files, context.world_size)[context.rank]]
    digests = sorted(digest for part in groups.gather(mine) for digest in part)
    if (form := form_of(finetuning)) is not None:
        digests.append((0, repr(form)))
    return xxhash.xxh3_128_hexdigest(json.dumps(digests).encode())
