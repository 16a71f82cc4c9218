"""Checkpoint folders on disk: whole and verified, or not there.

A checkpoint is written into a hidden folder beside its final name, every file is digested and synced, the manifest is
written last, and one rename makes it visible. The module does no communication: every rank digests the files it wrote,
one rank gathers the digests and commits.

The manifest is `checkpoint-N/training/manifest.json`, for a checkpoint that holds the model only too (then it is the
only file in `training/`, and the checkpoint can be verified but not resumed from).
"""

from megatune.training.storage.files import amount, ensure_room, write_atomically, writing
from megatune.training.storage.lock import OutputLock
from megatune.training.storage.manifest import FileDigest, Manifest, digest_files, problem_of, read_manifest
from megatune.training.storage.store import (
    CheckpointStore,
    checkpoint_step,
    clean_partials,
    finalize_model,
    list_checkpoints,
    newest_verified,
    remove_checkpoints,
    rotate,
)

__all__ = [
    "CheckpointStore",
    "FileDigest",
    "Manifest",
    "OutputLock",
    "amount",
    "checkpoint_step",
    "clean_partials",
    "digest_files",
    "ensure_room",
    "finalize_model",
    "list_checkpoints",
    "newest_verified",
    "problem_of",
    "read_manifest",
    "remove_checkpoints",
    "rotate",
    "write_atomically",
    "writing",
]
