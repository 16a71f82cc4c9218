"""Kills runs that save in the background at random moments: `python tests/training/killed_runs.py 20`."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

from pool import _PRELOAD, COLLECTIVE_SECONDS  # noqa: E402
from runs import assert_same_tensors, settings_of, train  # noqa: E402

from megatune.config.settings import Settings  # noqa: E402
from megatune.training.storage.manifest import problem_of, read_manifest  # noqa: E402
from megatune.training.storage.store import checkpoint_step, list_checkpoints  # noqa: E402


def rank_of_a_run(rank: int, world_size: int, store: str, settings: Settings, folder: Path) -> None:
    """A process that is one rank of a run."""
    import torch

    from megatune.engine import groups

    torch.set_num_threads(1)
    shared = torch.distributed.FileStore(store, world_size)
    groups.meet(shared, rank, world_size, timeout=COLLECTIVE_SECONDS)
    if rank:
        sys.stdout = sys.stderr
    train(settings, folder)


def kill_at_random(model: Path, folder: Path, num_kills: int, world_size: int, seed: int = 0) -> list[str]:
    """Kill a run so many times, resume it each time, and compare its end with that of a run that nobody killed.

    After each kill every checkpoint that is visible is whole, and the newest is no older than the newest before.

    Returns:
        A line for each kill.
    """
    chance = random.Random(seed)
    steps = 6 * num_kills
    changes = {"max_steps": steps, "save_steps": 1, "gradient_accumulation_steps": 2 // world_size}
    settings = settings_of(model, folder / "killed", **changes, async_save=True, save_total_limit=2)
    lines, newest = [], 0
    for number in range(num_kills):
        begun = _begun(settings)
        ranks = _start(folder, f"killed-{number}", world_size, settings)
        # It trains and writes once it has begun a checkpoint of its own.
        while _begun(settings) <= begun and all(rank.is_alive() for rank in ranks):
            time.sleep(0.002)
        assert all(rank.is_alive() for rank in ranks), "the run ended by itself"
        time.sleep(chance.uniform(0, 0.5))
        first = chance.randrange(world_size)
        for rank in (ranks[first], *ranks):
            rank.kill()
        for rank in ranks:
            rank.join()
        for checkpoint in list_checkpoints(folder / "killed"):
            problems = [problem_of(checkpoint, file) for file in read_manifest(checkpoint).files]
            assert not any(problems), (checkpoint, problems)
        steps_there = [checkpoint_step(path) or 0 for path in list_checkpoints(folder / "killed")]
        assert max(steps_there, default=0) >= newest, f"checkpoint-{newest} is lost"
        newest = max(steps_there, default=0)
        names = (path.name for path in (folder / "killed").glob("*checkpoint-*"))
        lines.append(f"kill {number + 1}: {', '.join(sorted(names, key=lambda name: (len(name), name)))}")
    straight = settings_of(model, folder / "straight", **{**changes, "save_strategy": "no"})
    for name, each in (("killed", settings), ("straight", straight)):
        ranks = _start(folder, f"{name}-end", world_size, each)
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
    for part in (".", f"checkpoint-{steps}", f"checkpoint-{steps}/training"):
        assert_same_tensors(folder / "killed" / part, folder / "straight" / part)
    return lines


def _begun(settings: Settings) -> set[str]:
    """The saves that have begun and not ended."""
    return {path.name for path in Path(str(settings.run.output_dir)).glob(".checkpoint-*.partial")}


def _start(
    folder: Path, name: str, world_size: int, settings: Settings
) -> list[multiprocessing.context.ForkServerProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    what = world_size, str(folder / f"{name}.store"), settings, folder
    ranks = [context.Process(target=rank_of_a_run, args=(rank, *what), daemon=True) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_kills", type=int)
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from megatune.demo.checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint("qwen3", Path(folder, "model"))
        lines = kill_at_random(model, Path(folder), arguments.num_kills, arguments.world_size, arguments.seed)
    print("\n".join(lines))
    print(f"{len(lines)} kills: every visible checkpoint was whole, none was lost, and the end is that of no kill")


if __name__ == "__main__":
    main()
