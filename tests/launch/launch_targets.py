"""What the ranks of the launch tests do. Each target takes (context, payload)."""

import ctypes
import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError

PATIENCE = 30.0  # seconds; a rank that nobody ended fails its test


def linger(context, phase="forward", step=7):
    """Beats until somebody ends or stops this rank."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        context.beat(phase, step)
        if context.stop_requested():
            context.beat("save", step)
            return ExitCode.STOPPED
        time.sleep(0.02)
    return 3


def finish(context, payload):
    print(f"rank {context.rank} of {context.world_size} says {payload['word']}")
    print(f"rank {context.rank} warns", file=sys.stderr)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    print(*(f"{name}={os.environ[name]}" for name in names))


def run_on(context, payload):
    return linger(context)


def save_slowly(context, payload):
    """Saves, within the limit of that phase, for longer than a stop is waited for."""
    context.beat("forward", 7)
    while not context.stop_requested():
        time.sleep(0.02)
    context.beat("save", 7, limit=PATIENCE)
    time.sleep(payload["seconds"])
    (context.run_dir / f"saved-{context.rank}").touch()
    return ExitCode.STOPPED


def ignore_stop(context, payload):
    """Notices that it is to stop, in step 8, and goes on."""
    context.beat("forward", 7)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if context.stop_requested():
            context.beat("forward", 8)
        time.sleep(0.02)


def leave_child(context, payload):
    """Rank 1 ends while its data worker still runs."""
    if context.rank == 1:
        worker = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({PATIENCE})"])
        (context.run_dir / "worker").write_text(str(worker.pid))


def leave_daemon(context, payload):
    """Multiprocessing ends such a child with SIGTERM when the rank exits, and waits for it without a limit."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE,), daemon=True).start()


def die(context, payload):
    if context.rank == payload["rank"]:
        context.beat("forward", 7)
        os.kill(os.getpid(), payload["signal"])
    linger(context)


def vanish(context, payload):
    if context.rank == 1:
        context.beat("forward", 7)
        os._exit(9)
    linger(context)


def fail(context, payload):
    """Rank 1 raises; rank 0 notices first that its peer is gone, as in a collective operation."""
    context.beat("backward", 7)
    if context.rank == 1:
        time.sleep(0.3)
        raise ValueError("no gradient for layer 3")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234")


def say_much(context, payload):
    """Prints more than a pipe holds, and then something that is to be found."""
    for number in range(5000):
        print(f"line {number} of {context.rank}")
    print("the last line", flush=True)
    return linger(context) if payload["lingers"] else None


def stop_with_worker(context, payload):
    """Notes, once it is asked to stop, whether its data worker still lives."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE,), daemon=True)
    worker.start()
    code = linger(context)
    time.sleep(0.2)
    (context.run_dir / "worker").write_text("alive" if worker.is_alive() else "dead")
    return code


def refuse(context, payload):
    """Rank 0 refuses what it alone has read; rank 1 waits for it where no handler of Python's runs."""
    if context.rank == 0:
        ready = context.run_dir / "waiting"
        while not ready.exists():
            time.sleep(0.02)
        fail_user(context, payload)
    (context.run_dir / "waiting").touch()
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)


def fail_user(context, payload):
    raise MegatuneError(Finding("no row is left", where="data.json", fix="raise cutoff_len"), ExitCode.DATA)


def fail_disk(context, payload):
    """Rank 1's disk is full, so that it cannot write its report either."""
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        raise OSError(errno.ENOSPC, "No space left on device")
    linger(context)


def fail_memory(context, payload):
    if context.rank == 1:
        raise MemoryError("cannot allocate 9 TiB")
    linger(context)


def hang(context, payload):
    """Rank 1 stops beating; by a stopped process, or in a function of its own."""
    if context.rank == 1:
        context.beat("forward", 7, limit=payload.get("limit"))
        if payload["stopped"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        stuck_in_user_code()
    linger(context)


def outgrow(context, payload):
    """Rank 1 moves into a memory group with a limit and takes more than it allows: the kernel kills it. Without the
    right to make a group, it does to itself and to the counter what the kernel would do."""
    context.beat("forward", 7)
    if context.rank == 1 and "counters" in payload:
        Path(payload["counters"], "memory.events").write_text("oom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 1:
        Path(payload["group"], "cgroup.procs").write_text(str(os.getpid()))
        assert bytearray(2 * payload["limit"]).count(1) == 0
    linger(context)


def stuck_in_user_code():
    time.sleep(PATIENCE)


def wait_in_vain(context, payload):
    """Rank 0's collective operation times out, since rank 1 is busy elsewhere."""
    context.beat("forward", 7)
    if context.rank == 1:
        stuck_in_user_code()
    time.sleep(0.3)
    raise RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300ms for recv operation to complete"
    )
