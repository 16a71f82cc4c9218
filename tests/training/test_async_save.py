"""Checkpoints that are written while training goes on: the same ones, whole or not there."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pool import RankPool
from runs import assert_same_runs, metrics, run, settings_of, train

from megatune.bridge import file_stream
from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.families import load_architecture
from megatune.launch.failure import describe_failure
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import cpu_machine
from megatune.plan.memory.estimate import workspace_bytes
from megatune.training import loop, saving
from megatune.training.storage.manifest import read_manifest
from megatune.training.storage.store import CheckpointStore, list_checkpoints

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "per_device_train_batch_size": 2}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EVALUATED = {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
STREAMED = {"streaming": True, "buffer_size": 15}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


def background(model: Path, output_dir: Path, **changes: Any) -> Settings:
    """Six steps, of which each third is saved, the last one at once."""
    return settings_of(model, output_dir, **{"async_save": True, "max_steps": 6, **changes})


def train_with(patch: Callable[[pytest.MonkeyPatch], object], settings: Settings, folder: Path) -> int:
    """One rank's run, with what `patch` does to the saving of this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        return train(settings, folder)


def on_writing(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Have the thread that writes a checkpoint beside training do something before each of its buckets."""
    write = file_stream._OpenFile.write

    def wait_and_write(file: file_stream._OpenFile, content: memoryview) -> None:
        if getattr(threading.current_thread(), "_is_nice", False):
            before()
        write(file, content)

    monkeypatch.setattr(file_stream._OpenFile, "write", wait_and_write)


def test_the_thread_that_writes_is_bound_to_the_device_of_its_rank(tmp_path, monkeypatch):
    """A new thread's is the machine's first GPU, on which all ranks' threads would take memory."""
    bound = []
    bind_thread = saving.device.bind_thread
    monkeypatch.setattr(
        saving.device,
        "bind_thread",
        lambda where: bound.append((threading.current_thread(), where)) or bind_thread(where),
    )
    monkeypatch.setattr(saving, "post_outcome", lambda *outcome: None)
    monkeypatch.setattr(saving.groups, "rank", lambda: 1)
    save = saving._Save(SimpleNamespace(write=list), tmp_path, 0, lambda digests: tmp_path, 2, 1, is_nice=False)
    save.start()
    save.join()
    assert bound == [(save, saving.device.current())]


def durations(settings: Settings, folder: Path) -> list[float]:
    """On a rank: how long each save took, as the time limit of the run takes them into account."""
    found: list[float] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_writing(monkeypatch, lambda: time.sleep(0.4))
        monkeypatch.setattr(loop.TimeBudget, "saved", lambda budget, seconds: found.append(seconds))
        assert train(settings, folder) == 0
    return found


def test_the_time_limit_counts_a_save_in_the_background_until_it_is_committed(pool, model, tmp_path):
    """The last save, for which training waits, takes about as long."""
    found = pool.run(1, durations, background(model, tmp_path / "out", max_steps=3, save_steps=2), tmp_path)[0]
    assert len(found) == 2
    assert found[0] > 0.4


# --- the same checkpoints ---------------------------------------------------------------------------------------------


def save_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save each step at once, too, into another folder, before it is saved in the background."""
    save = saving.CheckpointSaver.save

    def save_twice(saver: saving.CheckpointSaver, state: Any, *, background: bool = False) -> Path | None:
        beside = CheckpointStore(saver._store.output_dir.parent / "beside")
        assembly, settings, source = saver._assembly, saver._settings, saver._source
        save(saving.CheckpointSaver(beside, assembly, settings, source), state)
        return save(saver, state, background=background)

    monkeypatch.setattr(saving.CheckpointSaver, "save", save_twice)


def planned_copies(settings: Settings) -> int:
    """What the planner adds for copies to the memory of a CPU."""
    architecture = load_architecture(Path(str(settings.model.model_name_or_path)))
    model = PlannedModel(name="tuna", architecture=architecture)
    case = Case(model=model, settings=settings, world_size=1, machine=cpu_machine(2**34, 2))
    waits = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"async_save": False})})
    return workspace_bytes(case, 0).framework - workspace_bytes(replace(case, settings=waits), 0).framework


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, evaluated": (1, EVALUATED),
    "bf16, tp2 sp dp2, overlaps": (4, {**TP2, **OVERLAPS, "bf16": True}),
    "pp2, streamed, torch_dist": (2, {"pipeline_model_parallel_size": 2, **STREAMED, "save_format": "torch_dist"}),
    "LoRA, dp2, model only": (2, {**LORA, "per_device_train_batch_size": 2, "save_only_model": True}),
}


@pytest.mark.extended("one process, evaluated", "LoRA, dp2, model only")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_that_of_a_save_that_training_waits_for(
    name: str, pool: RankPool, model: Path, tmp_path: Path
) -> None:
    world_size, changes = LAYOUTS[name]
    settings = background(model, tmp_path / "out", max_steps=3, save_steps=1, **changes)
    assert pool.run(world_size, train_with, save_beside, settings, tmp_path) == [0] * world_size
    steps = [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == steps
    for step in steps:
        ours, beside = (read_manifest(tmp_path / folder / step) for folder in ("out", "beside"))
        assert len(ours.files) > 3
        assert ours == beside
    if world_size == 1:
        written = sum(file.size for file in ours.files if file.name.startswith(("model.", "training/optimizer.")))
        assert planned_copies(settings) == pytest.approx(written, rel=0.01)  # but for the files' headers


def test_a_resume_goes_on_as_if_nothing_had_happened(pool: RankPool, model: Path, tmp_path: Path) -> None:
    whole, crashed = (background(model, tmp_path / name, **TP2, bf16=True) for name in ("whole", "crashed"))
    run(pool, 2, whole.model_copy(update={"checkpoint": settings_of(model, tmp_path).checkpoint}), tmp_path)
    run(pool, 2, crashed, tmp_path, crash_at=5)
    assert [path.name for path in list_checkpoints(tmp_path / "crashed")] == ["checkpoint-3"]
    run(pool, 2, crashed, tmp_path)
    assert_same_runs(tmp_path / "whole", tmp_path / "crashed", 6)


# --- beside training --------------------------------------------------------------------------------------------------


def hold_until_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold every file back until training waits for the checkpoint: had it waited before, it would wait for ever."""
    released = threading.Event()
    settle = loop.Trainer._settle

    def release(trainer: loop.Trainer) -> None:
        if trainer._saver.in_flight:
            done = sorted(path.name for path in trainer.store.output_dir.glob("*checkpoint-*"))
            (trainer.context.run_dir / f"settled-{trainer.state.step}").write_text(json.dumps(done))
            released.set()
        settle(trainer)
        released.clear()

    def hold() -> None:
        process, thread = (os.getpriority(os.PRIO_PROCESS, one) for one in (os.getpid(), threading.get_native_id()))
        assert thread > process  # training comes first
        released.wait()

    on_writing(monkeypatch, hold)
    monkeypatch.setattr(loop.Trainer, "_settle", release)


def test_steps_are_trained_while_a_checkpoint_is_written_and_the_next_save_waits(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    settings = background(model, tmp_path / "out", max_steps=8, gradient_accumulation_steps=1)
    assert pool.run(2, train_with, hold_until_settled, settings, tmp_path) == [0, 0]
    # The save of step 6 waited for that of step 3, which was not visible until then; that of step 8 for that of step 6.
    assert json.loads((tmp_path / "settled-6").read_text()) == [".checkpoint-3.partial"]
    assert json.loads((tmp_path / "settled-8").read_text()) == [".checkpoint-6.partial", "checkpoint-3"]
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == [f"checkpoint-{step}" for step in (3, 6, 8)]
    assert list(metrics(tmp_path / "out")) == list(range(1, 9))


def end_of(patch: Callable[[pytest.MonkeyPatch], object], settings: Settings, folder: Path) -> tuple[int, str]:
    """On a rank: exit code, kind of failure and what it says."""
    try:
        return train_with(patch, settings, folder), ""
    except Exception as error:
        failure = describe_failure(error)
        return failure.exit_code, f"{failure.kind.name}: {failure.summary}"


def test_a_run_that_fails_by_its_numbers_keeps_the_checkpoint_before(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    changes = {"learning_rate": 1e25, "lr_scheduler_type": "constant", "save_steps": 1}
    settings = background(model, tmp_path / "out", **changes)
    ((_, text),) = pool.run(1, end_of, hold_until_settled, settings, tmp_path)
    assert "gradient norm nan" in text
    assert [path.name for path in list_checkpoints(tmp_path / "out")][:1] == ["checkpoint-1"]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank finds it full at the second save, and has found it so when step 8 begins."""
    import torch

    report, in_folder, is_second = loop.Trainer._report, [Path()], torch.distributed.get_rank() == 1

    def report_and_wait(trainer: loop.Trainer, *args: Any) -> None:
        report(trainer, *args)
        in_folder[0] = trainer.store.output_dir
        if trainer.state.step == 7:
            assert trainer._saver._in_flight is not None
            trainer._saver._in_flight.join()

    def refuse() -> None:
        if is_second and (in_folder[0] / "checkpoint-3").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loop.Trainer, "_report", report_and_wait)
    on_writing(monkeypatch, refuse)


def test_a_full_disk_ends_the_run_as_it_does_otherwise(pool: RankPool, model: Path, tmp_path: Path) -> None:
    settings = background(model, tmp_path / "out", max_steps=12, gradient_accumulation_steps=1)
    first, second = pool.run(2, end_of, fill_the_disk, settings, tmp_path)
    full = f"megatune.errors.MegatuneError: no room to write {tmp_path}/out/.checkpoint-6"
    assert (first[0], second[0]) == (73, 73)
    assert first[1].startswith(f"RELAYED: {full}")
    assert second[1].startswith(f"ERROR: {full}")
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint-*")) == [
        ".checkpoint-6.partial",
        "checkpoint-3",
    ]
    assert max(metrics(tmp_path / "out")) == 8  # not at the next save


def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "free_memory", lambda: 1000)
    monkeypatch.setattr(saving, "_NICENESS", None)  # a thread beside training would fail
    said: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *values, **options: said.append(" ".join(map(str, values))))
    end = loop.Trainer._train

    def train_and_note(trainer: loop.Trainer) -> loop.Outcome:
        outcome = end(trainer)
        (trainer.context.run_dir / "said.json").write_text(json.dumps(said))
        return outcome

    monkeypatch.setattr(loop.Trainer, "_train", train_and_note)


def test_where_memory_is_short_a_save_is_not_in_the_background(pool: RankPool, model: Path, tmp_path: Path) -> None:
    settings = background(model, tmp_path / "out", save_steps=1, max_steps=3)
    assert pool.run(1, train_with, short_of_memory, settings, tmp_path) == [0]
    (warning,) = [line for line in json.loads((tmp_path / "said.json").read_text()) if "not saved in" in line]
    assert "would take" in warning
    assert "of the 1.0 kB of memory that are free on" in warning
    assert len(list_checkpoints(tmp_path / "out")) == 3
