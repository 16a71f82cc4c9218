"""Tiny checkpoints for the tests of generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatune.demo.checkpoint import make_checkpoint

CONTEXT = 64  # tokens, so that it is soon full


def tiny_model(factory: pytest.TempPathFactory, family: str) -> Path:
    """A two-layer checkpoint in a fresh folder."""
    folder = factory.mktemp("models") / family
    return make_checkpoint(family, folder, num_layers=2, hidden_size=32, max_position_embeddings=CONTEXT)
