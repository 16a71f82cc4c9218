"""Runs of the real training loop inside the pool of ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pool import RankPool
from safetensors import safe_open

from megatune.config.load import load
from megatune.config.settings import Settings
from megatune.plan.case import Case
from megatune.training.storage.store import list_checkpoints

DEMO = Path(__file__).parents[2] / "examples" / "demo"


class CrashError(Exception):
    """Stands for whatever ends a process: nothing after it runs, nothing is cleaned up."""


def settings_of(model: Path, output_dir: Path, **changes: Any) -> Settings:
    """Twelve steps of eight rows over the demo's identity data."""
    values: dict[str, Any] = {
        "model_name_or_path": model,
        "output_dir": output_dir,
        "dataset_dir": DEMO,
        "dataset": "identity",
        "template": "qwen3_nothink",
        "cutoff_len": 128,
        "model_name": "Tuna",
        "model_author": "the team",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "plot_loss": False,
        "ddp_timeout": 240,
        **changes,
    }
    return load(None, [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]).require_valid()


def train(settings: Settings, run_dir: Path, crash_at: int | None = None, case: Case | None = None) -> int:
    """One rank's run. Runs in the pool, which has joined the ranks already.

    Args:
        case: what was planned for it.
        crash_at: raise CrashError after this step was trained, before it is saved.
    """
    from megatune.launch.context import RankContext
    from megatune.launch.world import RankEnv
    from megatune.training import loop
    from megatune.training import run as training

    os.environ["MEGATUNE_CACHE"] = str(run_dir / "cache")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    run_dir.mkdir(parents=True, exist_ok=True)
    context = RankContext(RankEnv(rank, rank, world, world, "localhost", 1, 0), run_dir)
    training._silence_libraries()
    report = loop.Trainer._report
    if crash_at is not None:

        def report_and_crash(trainer: loop.Trainer, step: int, *args: Any) -> None:
            report(trainer, step, *args)
            if step + 1 == crash_at:
                trainer._settle()  # a thread of this process would otherwise outlive its end
                raise CrashError

        loop.Trainer._report = report_and_crash  # type: ignore[method-assign]
    try:
        return training._train(context, settings, "{}", case)
    except CrashError:
        return -1
    finally:
        loop.Trainer._report = report  # type: ignore[method-assign]


def said(settings: Settings, run_dir: Path) -> list[str]:
    """Train on a rank, and return the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train(settings, run_dir) == 0
    return out.getvalue().splitlines()


def run(pool: RankPool, world_size: int, settings: Settings, folder: Path, crash_at: int | None = None) -> None:
    """Train to the end, or until the crash that is asked for."""
    assert pool.run(world_size, train, settings, folder, crash_at) == [0 if crash_at is None else -1] * world_size


def leave_as_crashed(whole: Path, step: int, other: Path) -> None:
    """Give `other` what the run in `whole` had left had it crashed in the step after its checkpoint of `step`."""
    other.mkdir()
    for checkpoint in list_checkpoints(whole):
        if int(checkpoint.name.rpartition("-")[2]) <= step:
            shutil.copytree(checkpoint, other / checkpoint.name)
    assert (other / f"checkpoint-{step}").is_dir()
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def reference_files(folder: Path) -> list[Path]:
    """Where a run keeps what the reference gives its rows; `folder` is its own."""
    return sorted(folder.glob("cache/rows/*/*/reference-*.npy"))


def metrics(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The logged steps, by step."""
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if "grad_norm" in record}


def evaluations(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """The logged evaluations, by step."""
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if "eval_loss" in record}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith("rng"):
            continue
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def assert_same_runs(one: Path, other: Path, last_step: int) -> None:
    """Both runs ended with the same weights and training state, and had the same norms of gradients on the way."""
    for folder in (".", f"checkpoint-{last_step}", f"checkpoint-{last_step}/training"):
        assert_same_tensors(one / folder, other / folder)
    norms = [{step: record["grad_norm"] for step, record in metrics(each).items()} for each in (one, other)]
    assert norms[0] == norms[1]


def assert_same_tensors(one: Path, other: Path) -> None:
    """Both folders hold the same tensors, bit for bit."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert first
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} differ: {different[:3]}"
