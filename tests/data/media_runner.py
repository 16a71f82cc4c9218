"""Reads hostile files in a process of its own: `python media_runner.py FOLDER < cases.json > outcomes.json`."""

from __future__ import annotations

import hashlib
import json
import resource
import sys

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.processor import Bounds, MediaProcessor
from megatune.encoders import MediaPlaceholder

MOST_BYTES = 6 * 2**30  # of address space
BOUNDS = Bounds(
    first=(1024, 589824), min_pixels=3136, max_pixels=1003520, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), resample=3
)
PROCESSOR = MediaProcessor(
    patch_size=14, temporal_patch_size=2, merge_size=2, image=BOUNDS, video=BOUNDS, video_fps=2.0, video_maxlen=128,
    timestamps=False, text=MediaPlaceholder(),
)  # fmt: skip


def outcome(kind: str, path: str) -> dict[str, object]:
    """What comes of one file: a code and when it shows, or a digest of its pixels."""
    source, when = MediaSource(kind, path), "measured"  # type: ignore[arg-type]
    try:
        measured = PROCESSOR.measure(source)
        when = "decoded"
        pixels = PROCESSOR.pixels(source, measured)
    except RowError as error:
        return {"code": error.code, "when": when, "named": source.name in str(error)}
    assert pixels.shape == (measured.num_patches, 3 * 2 * 14 * 14)
    assert pixels.dtype == "float32"
    digest = hashlib.sha256(pixels.tobytes()).hexdigest()
    return {"code": "good", "when": when, "digest": digest, "grid": measured.grid, "frames": measured.frames}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    json.dump([outcome(kind, path) for kind, path in json.load(sys.stdin)], sys.stdout)
