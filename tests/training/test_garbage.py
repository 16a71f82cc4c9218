"""Garbage is collected when told to, and only then."""

import gc
from pathlib import Path

from runs import metrics, settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint


def count_collections_by_hand(settings: Settings, run_dir: Path) -> int:
    """On a rank: how often a whole run collects while Python is not to by itself."""
    found = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        assert train(settings, run_dir) == 0
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
    return len(found)


def test_left_alone_python_collects_as_it_likes(pool, tmp_path):
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    settings = settings_of(model, tmp_path / "out", max_steps=2, save_strategy="no")
    assert pool.run(1, count_collections_by_hand, settings, tmp_path) == [0]


def test_a_run_of_experts_collects_by_hand_and_logs_how_busy_they_are(pool, tmp_path):
    model = make_checkpoint("qwen3_moe", tmp_path / "model", num_layers=2)
    changes = {"max_steps": 6, "save_strategy": "no", "moe_aux_loss_coeff": 1e-3, "moe_z_loss_coeff": 1e-3}
    settings = settings_of(model, tmp_path / "out", manual_gc=True, manual_gc_interval=2, **changes)
    assert pool.run(1, count_collections_by_hand, settings, tmp_path) == [3]
    for line in metrics(tmp_path / "out").values():
        assert 1 <= line["load_balancing_loss"] < 8  # of eight experts: all alike, or one that gets everything
        assert line["z_loss"] > 0
