"""The fork server: imports the target's module once, and forks the ranks of this machine.

Importing torch, megatron and transformers takes seconds of CPU time. N forks start in the time of one, and share memory
until they write to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

from megatune.launch.context import StartRequest, die_with_parent, log_path, send_event, set_process_name
from megatune.launch.failure import describe_failure
from megatune.launch.processes import LOOK_SECONDS, has_pending, process_state
from megatune.launch.rank_main import load_target, run_supervised

# Threads whose library stops and restarts them around a fork.
_FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Run `fork_server SUPERVISOR_PID EVENT_FD`, with a StartRequest as stdin. Returns in every forked rank, too."""
    supervisor, events = map(int, sys.argv[1:])
    die_with_parent(supervisor)
    set_process_name("megatune-fork")
    # Only the supervisor handles a Ctrl-C or a SIGTERM to the whole process tree.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(events, False)
    request = StartRequest.read(0)
    terminal = _redirect_output(request.run_dir)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)

    begun = time.monotonic()
    try:
        load_target(request.target)
    except BaseException as error:
        traceback.print_exc()
        send_event(events, "failed", failure=describe_failure(error).to_json())
        return 1
    hazard = fork_hazard()
    seconds = round(time.monotonic() - begun, 3)
    send_event(events, "ready", start="exec" if hazard else "fork", why=hazard, seconds=seconds)
    return _start_ranks(request, supervisor, events, terminal, hazard)


def _start_ranks(request: StartRequest, supervisor: int, events: int, terminal: tuple[int, int], hazard: str) -> int:
    """Fork the ranks. In a rank, run it and return its exit code; in the server, return after all ranks have ended."""
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, every shared page
    # Signals for a rank stay pending until it has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    ranks: dict[int, int] = {}
    fork_server = os.getpid()
    for local_rank in range(request.world.nproc_per_node):
        env = request.world.rank_env(local_rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: checked by fork_hazard
            pid = os.fork()
        if pid == 0:
            die_with_parent(fork_server)
            os.setpgid(0, 0)  # so that its data workers can be killed with it
            set_process_name(f"megatune-rank{env.rank}")
            os.environ.update(env.variables())
            if hazard:
                for descriptor in terminal:
                    os.set_inheritable(descriptor, True)
                arguments = [str(number) for number in (local_rank, fork_server, *terminal)]
                os.execv(sys.executable, [sys.executable, "-P", "-m", "megatune.launch.rank_main", *arguments])
            os.close(events)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return run_supervised(request, local_rank, terminal)
        # Also here, so that the group exists before the supervisor gets the event.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        ranks[pid] = env.rank
        send_event(events, "started", rank=env.rank, pid=pid)
    watch = _SupervisorWatch(supervisor, terminal[1])
    threading.Thread(target=watch.run, daemon=True).start()  # after the forks, which do not inherit threads
    _reap(ranks, events, watch)
    return 0


def fork_hazard() -> str:
    """Return why this process must not be forked after its imports, "" if it may be.

    A fork has only the calling thread, and cannot use a CUDA driver that was initialised before it.
    """
    strange = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            strange += [name] if name not in _FORK_SAFE_THREADS else []
    if len(strange) > 1:
        return f"an import started threads ({', '.join(strange)})"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return "an import initialised CUDA"
    return ""


def _redirect_output(run_dir: Path) -> tuple[int, int]:
    """Redirect the output of imports to logs/start.log; return descriptors of the former stdout and stderr."""
    terminal = os.dup(1), os.dup(2)
    log = os.open(log_path(run_dir, "start"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return terminal


class _SupervisorWatch:
    """Watches for a supervisor that was stopped (Ctrl-Z, SIGSTOP): prints a message, since the ranks continue, and
    continues it when a rank has ended or a stop signal is pending.

    Args:
        terminal: a descriptor.
    """

    def __init__(self, supervisor: int, terminal: int) -> None:
        self._supervisor, self._terminal = supervisor, terminal
        self.has_ended = False  # whether any rank has

    def run(self) -> None:
        is_reported = False
        while True:
            time.sleep(LOOK_SECONDS)
            is_stopped = process_state(self._supervisor) == "T"
            if is_stopped and not is_reported:
                self._report()
            is_reported = is_stopped
            self.wake()

    def wake(self) -> None:
        """Continue a stopped supervisor if it is needed."""
        if process_state(self._supervisor) == "T" and (self.has_ended or has_pending(self._supervisor, *_STOP_SIGNALS)):
            os.kill(self._supervisor, signal.SIGCONT)

    def _report(self) -> None:
        what = f"megatune: process {self._supervisor}, which watches the run, is stopped; the run continues"
        with contextlib.suppress(OSError):
            os.write(self._terminal, f"\n{what}; `fg` or `kill -CONT {self._supervisor}` continues it\n".encode())


def _reap(ranks: dict[int, int], events: int, watch: _SupervisorWatch) -> None:
    """Report the end of each rank, and kill its remaining child processes."""
    while ranks:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        moment = time.time()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(ended.si_pid, signal.SIGKILL)  # before the rank is reaped, while its group id cannot be reused
        pid, status = os.waitpid(ended.si_pid, 0)
        if (rank := ranks.pop(pid, None)) is None:  # a process that an import started
            continue
        code = os.waitstatus_to_exitcode(status)  # negative: minus the signal that killed it
        exit_code, signum = (code, None) if code >= 0 else (None, -code)
        send_event(events, "exited", rank=rank, exit_code=exit_code, signal=signum, time=moment)
        watch.has_ended = True
        watch.wake()


if __name__ == "__main__":
    sys.exit(main())
