"""Starts Ray for one run on this machine, or joins a cluster that is already running; and shuts it down."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

import megatune
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import environment, log_path
from megatune.launch.devices import count_gpus, free_memory
from megatune.launch.report import process_state
from megatune.rl.cluster.reaper import reaper

# The longest path of a socket below the session's folder, and the kernel's limit of such paths.
_SOCKET_PATH = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_MAX_SOCKET_BYTES = 107
_MIN_STORE, _MAX_STORE = 256 * 2**20, 64 * 2**30

_PROBE_SECONDS = 120  # timeout of the version check of another Python
_VERSIONS = "import sys, ray; print(f'{sys.version_info.major}.{sys.version_info.minor} {ray.__version__}')"
_ATTEMPTS = 4  # Ray gives its own Python processes 15 s to start, which is too short on a busy machine

_SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # Ray's killer would end actors before the kernel does
    "RAY_prestart_worker_first_driver": "0",  # each actor has its own environment, and so a new process
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    # We set CUDA_VISIBLE_DEVICES; Ray below 2.56 empties it if an actor requests no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would give all other processes priority over the trainer
    "RAY_agent_register_timeout_ms": "300000",  # for busy machines and slow disks
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def ensure_ray_installed() -> None:
    """Raise UNAVAILABLE if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        what = "reinforcement learning needs the package ray, which is not installed"
        raise MegatuneError(Finding(what, fix="pip install 'megatune[rl]'"), ExitCode.UNAVAILABLE)


def ensure_pythons(executables: Collection[str]) -> None:
    """Check that other Pythons run, and have the same versions of Python and Ray as this one.

    Raises:
        MegatuneError: UNAVAILABLE, with a finding for each that does not.
    """
    import ray

    own = f"{sys.version_info.major}.{sys.version_info.minor} {ray.__version__}"
    findings = []
    for executable in sorted(set(executables)):
        command = [executable, "-c", _VERSIONS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            findings.append(Finding(f"py_executable {executable} does not run", why=str(error)))
            continue
        if (found := done.stdout.strip()) != own:
            has = f"has {found or 'no Ray'}, and this Python {own} (versions of Python and Ray)"
            why, fix = "all of Ray's processes need the same versions", f"pip install ray=={ray.__version__} there"
            findings.append(Finding(f"py_executable {executable} {has}", "", why, fix))
    if findings:
        raise MegatuneError(findings, ExitCode.UNAVAILABLE)


def visible_gpus() -> tuple[str, ...]:
    """Return this machine's GPUs by their names in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = count_gpus()
    return tuple(each.strip() for each in named.split(",")[:number]) if named else tuple(map(str, range(number)))


def store_bytes(in_flight: int) -> int:
    """Return the size of an object store for objects of `in_flight` bytes: twice that, within the available memory."""
    room = free_memory()
    with contextlib.suppress(OSError):
        room = min(room, shutil.disk_usage("/dev/shm").free)
    return max(_MIN_STORE, min(2 * in_flight, room // 2, _MAX_STORE))


@contextlib.contextmanager
def ray_session(slots: int, gpus: int, object_store_bytes: int, run_dir: Path) -> Iterator[Path]:
    """Start Ray on this machine, or join the cluster of RAY_ADDRESS; shut it down, or leave it, at the end. If this
    process already uses Ray, that instance is used and kept.

    A Ray instance that is started here listens on all interfaces, as Ray does, and accepts only a token created for
    this run. It sends no usage statistics, serves no dashboard, and keeps its files in a folder that is removed.

    Args:
        slots: num_cpus of Ray.
        gpus: num_gpus of Ray.
        run_dir: Ray's messages about its processes are written to logs/ray.log there.

    Yields:
        A folder on this machine for the run's temporary files.

    Raises:
        MegatuneError: UNAVAILABLE, if Ray does not start or the cluster cannot be joined.
    """
    ensure_ray_installed()
    folder = _new_folder()
    address = os.environ.get("RAY_ADDRESS")
    secret = {} if address else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with contextlib.ExitStack() as stack:
        stack.callback(_read_variables)
        stack.enter_context(environment(_SWITCHES | secret))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        import ray

        if ray.is_initialized():  # by a program that runs this as a part of itself
            yield folder
            return
        _read_variables()
        watcher = stack.enter_context(reaper(folder))
        stack.enter_context(_notices_to(log_path(run_dir, "ray")))
        started: dict[str, int] = {}
        stack.callback(_leave, started, folder, watcher)
        own: dict[str, Any] = {}
        if not address:
            own = {"num_cpus": slots, "num_gpus": gpus, "object_store_memory": object_store_bytes}
            own |= {"include_dashboard": False, "_temp_dir": str(folder)}
        before = signal.getsignal(signal.SIGTERM)
        for attempt in range(_ATTEMPTS):
            try:
                with _block_signals_in_children(signal.SIGHUP):  # a closed terminal sends SIGHUP to all of them
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
                break
            except Exception as error:  # Ray raises exceptions of many classes
                _end_processes(folder, watcher)
                if "timed out during startup" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise MegatuneError(_not_started(address, error), ExitCode.UNAVAILABLE) from error
        signal.signal(signal.SIGTERM, before)  # Ray has replaced the handler
        started |= services()
        yield folder


def _read_variables() -> None:
    """Make Ray reread its environment variables, unless it is in use. Ray caches those of its import, and the first
    token, which may be stale if this process uses Ray before or after this run."""
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    if not ray.is_initialized():
        Config.initialize("")  # first, because threads that are still running would look for a token
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _block_signals_in_children(number: int) -> Iterator[None]:
    """Block a signal for a while; processes that are started meanwhile, and their children, never receive it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def services() -> dict[str, int]:
    """Return the PIDs of Ray's essential processes that this process has started, by name."""
    names = ("gcs_server", "raylet")
    return {child.name(): child.pid for child in psutil.Process().children() if child.name() in names}


def are_alive(processes: Mapping[str, int]) -> bool:
    """Return whether all of these processes are running."""
    return not any(process_state(pid) in "?ZX" for pid in processes.values())


def _leave(started: Mapping[str, int], folder: Path, watcher: int) -> None:
    """Shut Ray down. If one of its own processes is gone, ray.shutdown would wait for it for a minute and then abort or
    crash this process; then Ray's processes are killed, and this process exits with PROCESS_DIED."""
    import ray

    if are_alive(started):
        ray.shutdown()
    else:
        atexit.unregister(ray.shutdown)
        atexit.register(_exit_at_once)
        _end_processes(folder, watcher)


def _exit_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(ExitCode.PROCESS_DIED)


def package_path(folder: Path) -> str:
    """Create and return a folder that contains only megatune: an actor in another environment imports megatune from
    there, and everything else from its environment."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    link = path / "megatune"
    if not link.is_symlink():
        link.symlink_to(Path(megatune.__file__).parent)
    return str(path)


def _end_processes(folder: Path, watcher: int) -> None:
    """Kill Ray's processes and their descendants. The reaper, whose command also contains the folder's name, is spared:
    it kills what processes have left that are gone."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid != watcher and any(str(folder) in word for word in child.cmdline()):
                for process in (*child.children(recursive=True), child):
                    process.kill()


def _not_started(address: str | None, error: Exception) -> Finding:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if address is None:
        fix = "reduce the load of the machine, set `ulimit -n 65536`, or free space in TMPDIR"
        return Finding("Ray did not start on this machine", why=why, fix=fix)
    what = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined"
    fix = "set the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN, use its versions of Ray and Python, or unset RAY_ADDRESS"
    return Finding(what, "environment", why, fix)


def _new_folder() -> Path:
    """Create a folder that only this user can read, with a short name because it is part of socket paths. Remove those
    of killed runs."""
    usual = tempfile.gettempdir()
    fits = len(usual) + len("/mt-1234567-12345678") + len(_SOCKET_PATH) <= _MAX_SOCKET_BYTES
    parent = Path(usual if fits else "/tmp")
    for left in parent.glob("mt-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"mt-{os.getpid()}-", dir=parent))


@contextlib.contextmanager
def _notices_to(log: Path) -> Iterator[None]:
    """Redirect Ray's messages about dead workers from the terminal to a log; our own report replaces them."""
    from ray._private import worker

    printer = getattr(worker, "print_to_stdstream", None)

    def note(data: Mapping[str, Any], **_: object) -> None:
        with contextlib.suppress(OSError), log.open("a") as file:
            file.writelines(f"{line}\n" for line in data["lines"])

    worker.print_to_stdstream = note
    try:
        yield
    finally:
        if printer is not None:
            worker.print_to_stdstream = printer
