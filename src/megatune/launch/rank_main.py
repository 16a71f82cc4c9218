"""The main function of a rank: sets up the process, runs the target, and reports failures."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from megatune.errors import ExitCode
from megatune.launch.context import RankContext, StartRequest, die_with_parent, log_path, watch_signals
from megatune.launch.failure import Failure, Kind, describe_failure, error_path, write_failure, write_operations
from megatune.launch.output import divert_lost_output
from megatune.launch.report import outcome_text, raised_outcome
from megatune.launch.torchrun import exit_early_on_stop, handle_stop_signals, is_first, report_once
from megatune.launch.world import RankEnv
from megatune.processes import quick_imports

Target = Callable[[RankContext, dict[str, Any]], int | None]

EXIT_SECONDS = 120.0  # from the target's return to the end of the interpreter


def load_target(target: str) -> Target:
    """Import "package.module:function"."""
    module, _, function = target.partition(":")
    with quick_imports():
        return getattr(importlib.import_module(module), function)


def run_under_torchrun(
    target: str,
    payload: dict[str, Any],
    env: RankEnv,
    run_dir: Path,
    *,
    stop_file: Path | None = None,
    out_of_memory_advice: str = "",
) -> int:
    """Run the target in this process, which torchrun started. Without a supervisor, the failing rank reports itself.

    Args:
        target, payload, run_dir, stop_file: as in `supervisor.run_ranks`.
        env: `torchrun_env(os.environ)`.
        out_of_memory_advice: printed by a rank that ran out of memory.

    Returns:
        DONE or STOPPED; with any other exit code the process ends here (`exit_on_failure`).
    """
    context = RankContext(env, run_dir.absolute(), stop_file and stop_file.absolute())
    if context.rank == 0:
        context.stop_file.unlink(missing_ok=True)
    error_path(run_dir, context.rank).unlink(missing_ok=True)

    def report(failure: Failure) -> int:
        why = (
            "another rank ended without a message: it was killed, or is on another machine; torchrun's report names it"
        )
        text = outcome_text(raised_outcome(context.run_dir, failure, context.rank, lost=why))
        if failure.exit_code == ExitCode.OUT_OF_MEMORY and out_of_memory_advice:
            text = f"{text}\n{out_of_memory_advice}"
        # A consequence of another rank's failure may be detected before the failure itself.
        return report_once(text, failure.exit_code, first=is_first() and failure.kind <= Kind.UNAVAILABLE)

    with rank_log(context, own_process_groups=True) as log:
        exit_early_on_stop(context)
        context.terminal = 2 if context.local_rank == 0 else None
        context.beat("start", 0)
        code = run_target(target, payload, context, log, report)
        exit_on_failure(code)
    return code


def run_supervised(request: StartRequest, local_rank: int, terminal: tuple[int, int]) -> int:
    """Run the target in a rank that the fork server started. Returns as `run_under_torchrun` does.

    Args:
        terminal: descriptors of the terminal's stdout and stderr, for rank 0.
    """
    env = request.world.rank_env(local_rank)
    context = RankContext(env, request.run_dir, request.stop_file)
    context.beat("start", 0)
    with rank_log(context) as log:
        if local_rank == 0:
            context.terminal = os.dup(terminal[1])
        redirect_output(log, terminal, to_terminal=env.rank == 0)
        watch_signals({signal.SIGUSR1: partial(write_operations, context)}, "megatune-operations")
        code = run_target(request.target, request.payload, context, log)
        exit_on_failure(code)
    return code


def exit_on_failure(code: int) -> None:
    """End a failed process without the interpreter's shutdown, which may wait for dead ranks."""
    if code not in (ExitCode.DONE, ExitCode.STOPPED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_target(
    target: str,
    payload: dict[str, Any],
    context: RankContext,
    log: IO[str],
    report: Callable[[Failure], int] = lambda failure: failure.exit_code,
) -> int:
    """Call the target and return an exit code.

    Args:
        log: gets the full failure, like the file that the supervisor reads.
        report: reports a failure if there is no supervisor, and returns the exit code.
    """
    try:
        code = load_target(target)(context, payload) or ExitCode.DONE
        if code not in (ExitCode.DONE, ExitCode.STOPPED):
            raise SystemExit(code)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, ExitCode.DONE, ExitCode.STOPPED):
            return int(error.code or ExitCode.DONE)
        failure = describe_failure(error, context)
        if failure.kind is Kind.COLLECTIVE:
            write_operations(context)
        with contextlib.suppress(OSError):  # on a full disk, the exit code still reports the failure
            write_failure(error_path(context.run_dir, context.rank), failure)
            print_failure(failure, log)
        return report(failure)
    context.beat("exit", context.step, limit=EXIT_SECONDS)
    return int(code)


def print_failure(failure: Failure, log: IO[str]) -> None:
    """Print the findings, or the traceback if there are none, into a log."""
    if failure.findings:
        text = "\n".join(f"megatune: {finding}" for finding in failure.findings)
    else:
        text = f"rank {failure.rank}: {failure.traceback}"
    print(text, file=log, flush=True)


@contextlib.contextmanager
def rank_log(context: RankContext, *, own_process_groups: bool = False) -> Iterator[IO[str]]:
    """Open the rank's log for appending, and install the signal handlers listed in `launch.context`.

    Signals that are pending since the fork are delivered here. SIGUSR1 and crashes write all stacks into the log.

    Args:
        own_process_groups: give each child process its own process group: torchrun sends SIGTERM to the rank's group,
            and a rank without its data workers cannot save.
    """
    path = log_path(context.run_dir, f"rank-{context.rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1) as log:
        print(f"=== rank {context.rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}", file=log)
        faulthandler.enable(file=log)
        faulthandler.unregister(signal.SIGUSR1)  # what the fork server registered
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True, chain=True)
        handle_stop_signals(lambda number, frame: context.request_stop())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _reset_sigterm_in_children(own_process_groups)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            yield log
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.enable(file=2)


def _reset_sigterm_in_children(own_process_groups: bool) -> None:
    """Have SIGTERM end the rank's child processes (data workers, checkpoint writers), which would inherit its handler.

    SIGTERM is blocked during a fork, so that none is lost before the child is set up.
    """
    hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    release = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})

    def release_in_child() -> None:
        signal.set_wakeup_fd(-1)
        if own_process_groups:
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_in_child)


def redirect_output(log: IO[str], terminal: tuple[int, int], *, to_terminal: bool) -> None:
    """Redirect stdout and stderr to the terminal (rank 0) or to the log (all others), with line buffering."""
    for stream, number, saved in zip((sys.stdout, sys.stderr), (1, 2), terminal, strict=True):
        stream.flush()
        os.dup2(saved if to_terminal else log.fileno(), number)
        os.close(saved)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    divert_lost_output(Path(log.name))


def main() -> int:
    """Run a rank that could not be forked: `rank_main LOCAL_RANK FORK_SERVER_PID STDOUT STDERR`."""
    local_rank, fork_server, stdout, stderr = map(int, sys.argv[1:])
    die_with_parent(fork_server)
    request = StartRequest.read(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(Exception):  # run_target raises it again, and reports it
        load_target(request.target)  # while the output goes to logs/start.log
    return run_supervised(request, local_rank, (stdout, stderr))


if __name__ == "__main__":
    sys.exit(main())
