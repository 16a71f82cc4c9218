"""check_agreement_interval: ranks that must hold the same numbers are compared while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import assert_same_tensors, settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return make_checkpoint("qwen3", folder, num_layers=2, hidden_size=32, max_position_embeddings=128)


def test_checks_change_nothing(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """All overlaps on: parameters are sent late, and the check must wait for them and not disturb them."""
    layout = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for name, changes in (("off", {}), ("on", {"check_agreement_interval": 1})):
        settings = settings_of(model, tmp_path / name, max_steps=3, save_strategy="no", **layout, **changes)
        assert pool.run(2, train, settings, tmp_path / name) == [ExitCode.DONE] * 2
    assert_same_tensors(tmp_path / "off" / "checkpoint-3", tmp_path / "on" / "checkpoint-3")


def train_with_fault(settings: Settings, run_dir: Path, at_step: int) -> tuple[str, int]:
    """A run on whose rank 1 one bit of a weight flips at the end of a step; the error that ends it."""
    from megatune.training import loop

    report = loop.Trainer._report

    def report_and_flip(trainer: loop.Trainer, step: int, *args: Any) -> None:
        report(trainer, step, *args)
        if step + 1 == at_step and trainer.assembly.coords.rank == 1:
            trainer.assembly.parameters[3].parameter.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    loop.Trainer._report = report_and_flip  # type: ignore[method-assign]
    try:
        return "", train(settings, run_dir)
    except MegatuneError as error:
        return str(error), error.exit_code
    finally:
        loop.Trainer._report = report  # type: ignore[method-assign]


@pytest.mark.parametrize(("interval", "found_at"), [(2, 4), (None, None)], ids=["every second step", "off"])
def test_a_fault_ends_the_run_at_the_next_check(
    pool: RankPool, model: Path, tmp_path: Path, interval: int | None, found_at: int | None
) -> None:
    settings = settings_of(
        model, tmp_path / "run", max_steps=5, save_strategy="no", use_distributed_optimizer=False,
        check_agreement_interval=interval,
    )  # fmt: skip
    for text, code in pool.run(2, train_with_fault, settings, tmp_path / "run", 3):
        if found_at is None:
            assert (text, code) == ("", ExitCode.DONE)
        else:
            assert f"step {found_at}: weights differ between data-parallel copies" in text
            assert "rank 1 and rank 0, by up to" in text
            assert code == ExitCode.NOT_FINITE
