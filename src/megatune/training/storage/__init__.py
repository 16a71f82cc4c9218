"""Atomic, verified checkpoint folders.

A checkpoint is written into a hidden folder, every file is digested and synced, the manifest is written last, and a
rename makes the checkpoint visible. Nothing here communicates: every rank digests the files it wrote, and one rank
gathers the digests and commits.

The manifest is `checkpoint-N/training/manifest.json`, also for a checkpoint without training state (then it is the only
file in `training/`, and the checkpoint can be verified but not resumed from).
"""
