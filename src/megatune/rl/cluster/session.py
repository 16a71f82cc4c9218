"""Ray's own processes: started for one run on this machine, or those of a cluster that is already running."""

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

# The longest path of a socket below the session's folder, and what the kernel allows.
_SOCKET_PATH = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_MOST_SOCKET_BYTES = 107
_LEAST_STORE, _MOST_STORE = 256 * 2**20, 64 * 2**30

_PROBE_SECONDS = 120  # that another Python may take to answer
_VERSIONS = "import sys, ray; print(f'{sys.version_info.major}.{sys.version_info.minor} {ray.__version__}')"
_ATTEMPTS = 4  # its node gives its own Python processes 15 s to start, too few where others use the machine

_SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would end actors before the kernel does, by a measure of its own
    "RAY_prestart_worker_first_driver": "0",  # each actor has an environment, so a process of its own
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    # CUDA_VISIBLE_DEVICES is what this program says; Ray below 2.56 empties it where an actor asks for no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would let the driver's own processes, and any other, go before the trainer
    "RAY_agent_register_timeout_ms": "300000",  # of a busy machine, or one with a slow disk
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def ensure_ray_installed() -> None:
    """Refuse a Python without Ray.

    Raises:
        MegatuneError: UNAVAILABLE.
    """
    if importlib.util.find_spec("ray") is None:
        what = "reinforcement learning needs the package ray, which is not installed"
        raise MegatuneError(Finding(what, fix="pip install 'megatune[rl]'"), ExitCode.UNAVAILABLE)


def ensure_pythons(executables: Collection[str]) -> None:
    """Refuse other Pythons in which Ray's processes would not start, or would not understand this one.

    Raises:
        MegatuneError: UNAVAILABLE, with all of them.
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
            why, fix = "Ray's processes must be of one version", f"pip install ray=={ray.__version__} there"
            findings.append(Finding(f"py_executable {executable} {has}", "", why, fix))
    if findings:
        raise MegatuneError(findings, ExitCode.UNAVAILABLE)


def visible_gpus() -> tuple[str, ...]:
    """Return this machine's GPUs as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = count_gpus()
    return tuple(each.strip() for each in named.split(",")[:number]) if named else tuple(map(str, range(number)))


def store_bytes(in_flight: int) -> int:
    """Return how large an object store for objects of `in_flight` bytes is: with room, within what memory there is."""
    room = free_memory()
    with contextlib.suppress(OSError):
        room = min(room, shutil.disk_usage("/dev/shm").free)
    return max(_LEAST_STORE, min(2 * in_flight, room // 2, _MOST_STORE))


@contextlib.contextmanager
def ray_session(slots: int, gpus: int, object_store_bytes: int, run_dir: Path) -> Iterator[Path]:
    """Start Ray on this machine, or join the cluster of RAY_ADDRESS; leave it, or end it, with all that belongs to it.
    Where this process uses Ray already, that is taken, and kept.

    What is started here listens on the machine's interfaces, as Ray does, and answers only to a token made for this
    run. It sends no usage statistics, serves no dashboard, and keeps its files in a folder that goes at the end.

    Args:
        slots: CPUs that Ray is to count.
        gpus: GPUs that Ray is to count.
        run_dir: what Ray says of its processes goes to logs/ray.log there.

    Yields:
        A folder for this run's short-lived files, on this machine.

    Raises:
        MegatuneError: UNAVAILABLE, where Ray does not start or the cluster does not take this driver.
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

        if ray.is_initialized():  # by who runs this as a part of something larger
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
                with _block_signals_in_children(signal.SIGHUP):  # a closed terminal sends it to all of them
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
                break
            except Exception as error:  # Ray raises any
                _end_processes(folder, watcher)
                if "timed out during startup" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise MegatuneError(_not_started(address, error), ExitCode.UNAVAILABLE) from error
        signal.signal(signal.SIGTERM, before)  # Ray has put its own in its place
        started |= services()
        yield folder


def _read_variables() -> None:
    """Have Ray read its environment variables, unless it is in use. It keeps those of its import and the first token,
    which may be of what this process did before this run, or of this run when it does something else after it."""
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    if not ray.is_initialized():
        Config.initialize("")  # before the token: threads that have not ended yet would look for one
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _block_signals_in_children(number: int) -> Iterator[None]:
    """Hold a signal back for a while; processes that are started meanwhile, and what they start, never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def services() -> dict[str, int]:
    """Return the processes of Ray without which nothing goes on, as this process has started them, by name."""
    names = ("gcs_server", "raylet")
    return {child.name(): child.pid for child in psutil.Process().children() if child.name() in names}


def are_alive(processes: Mapping[str, int]) -> bool:
    """Whether none of these processes has ended."""
    return not any(process_state(pid) in "?ZX" for pid in processes.values())


def _leave(started: Mapping[str, int], folder: Path, watcher: int) -> None:
    """End Ray. Where one of its own processes is gone, Ray would look for that for a minute and then abort this
    process, or crash it at its end: so it ends without ray.shutdown, with the exit code that this has."""
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
    """Make a folder below `folder` that holds megatune alone, and return it: an actor of another environment imports
    megatune from there, and everything else from its own."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    link = path / "megatune"
    if not link.is_symlink():
        link.symlink_to(Path(megatune.__file__).parent)
    return str(path)


def _end_processes(folder: Path, watcher: int) -> None:
    """End Ray's processes, with all that they have started, where Ray itself does not. The watcher, which has the
    folder's name in its command, too, ends what those have left that are gone."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid != watcher and any(str(folder) in word for word in child.cmdline()):
                for process in (*child.children(recursive=True), child):
                    process.kill()


def _not_started(address: str | None, error: Exception) -> Finding:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if address is None:
        return Finding(
            "Ray did not start on this machine",
            why=why,
            fix="less load on the machine, `ulimit -n` of 65536, and room in TMPDIR help",
        )
    what = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined"
    fix = "the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN, and its versions of Ray and Python; or unset RAY_ADDRESS"
    return Finding(what, "environment", why, fix)


def _new_folder() -> Path:
    """Make a folder that only this user can read, with a short name: it is in paths of sockets. Remove those of runs
    that were killed."""
    usual = tempfile.gettempdir()
    parent = Path(
        usual if len(usual) + len("/mt-1234567-12345678") + len(_SOCKET_PATH) <= _MOST_SOCKET_BYTES else "/tmp"
    )
    for left in parent.glob("mt-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"mt-{os.getpid()}-", dir=parent))


@contextlib.contextmanager
def _notices_to(log: Path) -> Iterator[None]:
    """Keep off the terminal what Ray prints there of a worker that died, which this run says better."""
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
