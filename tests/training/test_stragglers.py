"""Which steps are called slow, and which rank makes the others wait."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.engine import collectives, device
from megatune.engine.collectives import BusyTime
from megatune.training import loop, measurements
from megatune.training.callbacks.base import Notice
from megatune.training.measurements import RankLocation, Stragglers
from megatune.training.storage.files import read_json_lines

RANKS = [RankLocation("one", 0), RankLocation("one", 0), RankLocation("two", 1), RankLocation("two", 1)]
EVEN = [0.5, 0.5, 0.7, 0.7]  # the last stage has more to do


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def notices(detector: Stragglers, steps: range, wall: float, busy: list[float]) -> list[Notice]:
    return [notice for step in steps for notice in detector.notices(step, wall, busy)]


def test_a_step_that_is_far_slower_is_named_with_its_rank() -> None:
    clock = Clock()
    detector = Stragglers(RANKS, clock)
    assert not notices(detector, range(1, 31), 1.0, EVEN)
    (notice,) = detector.notices(31, 9.0, [0.5, 0.5, 8.6, 0.7])
    assert notice.text == (
        "step 31 took 9.00 s, 1.00 s are usual: rank 2 on host two was busy for 8.60 s, and the others waited for it"
    )
    assert notice.values == {"slow_step_seconds": 9.0, "usual_seconds": 1.0, "slow_rank": 2}
    # Not one line after the other, and none forgotten.
    assert not notices(detector, range(32, 35), 3.0, [2.5, 0.5, 0.7, 0.7])
    clock.now = 61.0
    (notice,) = detector.notices(35, 3.0, EVEN)
    assert "no rank was busy for longer than usual" in notice.text
    assert notice.text.endswith("; 3 more since the last such line")
    assert notice.values["slow_rank"] is None


def test_what_begins_is_not_called_slow() -> None:
    detector = Stragglers(RANKS, Clock())
    assert not notices(detector, range(101, 131), 0.01, [0.01, 0.02, 0.01, 0.01])  # nor milliseconds
    assert not detector.notices(131, 0.9, [0.8, 0.01, 0.01, 0.01])
    detector = Stragglers(RANKS, Clock())
    assert not notices(detector, range(1, 3), 30.0, [30.0] * 4)  # the first steps warm up
    assert not notices(detector, range(3, 10), 1.0, EVEN)  # and too few tell nothing
    assert not detector.notices(10, 9.0, [8.6, 0.5, 0.7, 0.7])


@pytest.mark.parametrize(("busy", "rank"), [([0.5, 0.9, 0.7, 0.7], 1), ([0.5, 0.5, 0.7, 0.95], 3)])
def test_a_rank_that_makes_the_others_wait_is_named_once(busy: list[float], rank: int) -> None:
    detector = Stragglers(RANKS, Clock())
    (notice,) = notices(detector, range(1, 200), 1.0, busy)
    assert notice.text.startswith(f"rank {rank} on host {RANKS[rank].host} makes the others wait: it is busy for 0.9")
    assert notice.values["slow_rank"] == rank


def test_stages_are_not_held_against_each_other() -> None:
    detector = Stragglers([RankLocation("one", 0), RankLocation("one", 1)], Clock())
    assert not notices(detector, range(1, 200), 1.0, [0.3, 0.9])
    alone = Stragglers([RankLocation("one", 0)], Clock())
    assert not notices(alone, range(1, 50), 1.0, [1.0])
    (notice,) = alone.notices(50, 5.0, [5.0])
    assert "it was computing, or waiting for its data or a disk" in notice.text


def test_pauses_are_no_work() -> None:
    busy = BusyTime()
    busy.pause()
    time.sleep(0.2)
    busy.resume()
    assert busy.take() < 0.2
    assert busy.wall < 0.2


class Queue:
    """A GPU's queue, far behind its host: what is launched takes so many seconds of it."""

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def launch(self, seconds: float) -> None:
        self.now += seconds

    def finish(self) -> None:
        self.done = self.now


def events_of(queue: Queue) -> type:
    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = queue.now

        def synchronize(self) -> None:
            assert self.at <= queue.done, "the host waits for its GPU"

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    return Event


def test_on_a_gpu_its_queue_tells_what_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of NCCL return at once; each operation holds up the queue until the others have come to it."""
    queue = Queue()
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "Event", events_of(queue))
    monkeypatch.setattr(BusyTime, "lag", 1)
    monkeypatch.setattr(collectives.Work, "wait", lambda work, seconds: queue.launch(seconds))
    for name in collectives._LAUNCHES:
        if hasattr(collectives.ProcessGroup, name):
            monkeypatch.setattr(collectives.ProcessGroup, name, lambda group, seconds: queue.launch(seconds))
    busy, work, group = BusyTime(), None, None
    found: list[float] = []
    for late in (0.0, 0.0, 2.0, 0.0):
        queue.launch(1.0 + late)  # computes
        collectives.ProcessGroup.allreduce(group, 0.5)  # in the queue itself
        queue.launch(1.0)
        collectives.ProcessGroup._end_coalescing(group, 0.0)  # in another queue
        collectives.Work.wait(work, 0.25)
        busy.pause()
        queue.launch(9.0)  # an evaluation
        collectives.Work.wait(work, 9.0)
        busy.resume()
        found += [busy.take(), busy.wall]
        queue.finish()  # the host reads the step's loss
    assert found == pytest.approx([0.0, 0.0, 2.0, 2.75, 2.0, 2.75, 4.0, 4.75])


def train_held_up(settings: Settings, folder: Path, slow_step: int, seconds: float) -> list[list[float]]:
    """A run that rank 1 holds up at one step; what each rank was busy at every step."""
    seen: list[list[float]] = []
    step_of_the_loop = loop.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        if len(seen) + 1 == slow_step and torch.distributed.get_rank() == 1:
            time.sleep(seconds)
        result = step_of_the_loop(*args, **options)
        seen.append(result.totals.busy_seconds)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        patch.setattr(measurements, "_NOTICE_INTERVAL", 0.0)  # on a busy machine other steps are slow, too
        assert train(settings, folder) == 0
    return seen


def test_ranks_tell_each_other_how_long_they_did_not_wait(pool: RankPool, tmp_path: Path) -> None:
    """Of tensor parallelism, where they wait for each other in every layer: only the one that is late is busy."""
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    changes = {"max_steps": 13, "save_strategy": "no", "gradient_accumulation_steps": 1}
    settings = settings_of(model, tmp_path / "out", tensor_model_parallel_size=2, **changes)
    one, other = pool.run(2, train_held_up, settings, tmp_path, 12, 5.0)
    assert one == other
    assert one[11][1] > 5.0
    assert one[11][0] < one[11][1] / 2
    notices = [each for each in read_json_lines(tmp_path / "out/metrics.jsonl") if "slow_step_seconds" in each]
    assert [(each["step"], each["slow_rank"]) for each in notices if each["slow_step_seconds"] > 5] == [(12, 1)]
