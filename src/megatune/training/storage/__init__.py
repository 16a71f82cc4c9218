"""Checkpoint folders on disk: whole and verified, or not there.

A checkpoint is written into a hidden folder beside its final name, every file is digested and synced, the manifest is
written last, and one rename makes it visible. The module does no communication: every rank digests the files it wrote,
one rank gathers the digests and commits.

The manifest is `checkpoint-N/training/manifest.json`, for a checkpoint that holds the model only too (then it is the
only file in `training/`, and the checkpoint can be verified but not resumed from).
"""
