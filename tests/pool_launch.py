"""The command line in this process, with its ranks in the pool: what a command does, without seconds of imports."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pool import RankPool

from megatune.cli.main import main, report
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.launch.rank_main import load_target
from megatune.launch.world import World

_ENVIRONMENT = ("MEGATUNE_", "HF_", "COLUMNS", "XDG_CONFIG_HOME")  # what a rank is given of this process's


class Ended(NamedTuple):
    """What a command left, as `subprocess.run` tells it."""

    returncode: int
    stdout: str
    stderr: str


class CommandLine:
    """Runs commands; every rank that one starts is one of the pool's. Launching is tested elsewhere."""

    def __init__(self, pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pool = pool
        self.limit = 60.0  # seconds of a run
        for module in ("megatune.launch.supervisor", "megatune.verify.run", "megatune.rehearse.ranks"):
            monkeypatch.setattr(f"{module}.run_ranks", self._run_ranks)

    def __call__(self, *words: object) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(map(str, words)))
        return Ended(code, out.getvalue(), err.getvalue())

    def _run_ranks(self, target: str, payload: dict[str, Any], world: World, run_dir: Path, **unused: Any) -> int:
        run_dir.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
        call = target, payload, world, run_dir, environment, Path.cwd()
        ended = self._pool.run(world.nproc_per_node, _run_rank, *call, limit=self.limit)
        print(ended[0].stdout, end="")
        failed = [each for each in ended if each.returncode != ExitCode.DONE]
        print(failed[0].stderr if failed else ended[0].stderr, end="", file=sys.stderr)
        return failed[0].returncode if failed else ExitCode.DONE


def _run_rank(
    target: str, payload: dict[str, Any], world: World, run_dir: Path, environment: Mapping[str, str], here: Path
) -> Ended:
    """Call a target in one rank of the pool, which has met the others in the pool's own way."""
    import torch

    from megatune.engine import groups

    rank = torch.distributed.get_rank()
    torch.distributed.barrier()  # a rank that left while others still connect to it would break them off
    groups.leave()
    out, err = io.StringIO(), io.StringIO()
    before = dict(os.environ)
    for name in filter(lambda name: name.startswith(_ENVIRONMENT), before):
        del os.environ[name]  # as the process had it that started the pool
    os.environ.update(environment)
    try:
        with contextlib.chdir(here), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = load_target(target)(RankContext(world.rank_env(rank), run_dir), payload) or ExitCode.DONE
    except MegatuneError as error:
        return Ended(int(error.exit_code), out.getvalue(), report(error) + "\n")
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Ended(int(code), out.getvalue(), err.getvalue())
