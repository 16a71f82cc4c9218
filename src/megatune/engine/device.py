"""All differences between a CPU and a GPU.

Megatron-Core calls torch.cuda throughout. On a machine without a GPU, `install` patches those calls so that the same
engine runs on CPU tensors with gloo: the current device is the CPU, streams and events do nothing (CPU work runs in
program order), and CPU tensors report the CUDA type names that Megatron-Core compares as strings. With a GPU no CUDA
call is patched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.utils._device

from megatune.config.kernels import c_compiler
from megatune.errors import ExitCode, Finding, MegatuneError

# Check for GPUs through NVML instead of the driver: a process that has initialized CUDA cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HAS_GPU = torch.cuda.is_available()
BACKEND = "nccl" if HAS_GPU else "gloo"
_TRACKED = "tracked."  # prefix of the names of Megatron-Core's generators

# NCCL keeps a tensor's memory until it is sent. gloo reads it whenever its thread runs, so a pipeline stage must not
# free an activation that is still being sent.
SENDS_HOLD_MEMORY = HAS_GPU
# Destroying NCCL's groups waits for all launched work: a rank that failed would wait for the ranks that wait for it.
LEAVING_WAITS = HAS_GPU


def current() -> torch.device:
    """Return the device that holds this rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


def require_gpus(num_gpus: int) -> None:
    """Refuse to compute on the CPU of a machine that has GPUs.

    Args:
        num_gpus: of this machine, as counted without torch (`launch.devices.count_gpus`).

    Raises:
        MegatuneError: UNAVAILABLE, with the reason why torch cannot use them.
    """
    if num_gpus and not HAS_GPU:
        what = f"this machine has {num_gpus} GPU{'s' * (num_gpus > 1)}, but torch cannot use any of them"
        raise _unusable(what, _obstacle())


def _obstacle() -> str:
    """Return why torch has no GPU, with torch's own error message if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs"
    try:
        torch._C._cuda_init()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"


def _unusable(what: str, why: str) -> MegatuneError:
    build = f"a build of torch for CUDA {torch.version.cuda}" if torch.version.cuda else "a build of torch for CUDA"
    fix = f"install {build} and a driver that is new enough for it, or write use_cpu: true to train on the CPU"
    return MegatuneError(Finding(what, why=why, fix=fix), ExitCode.UNAVAILABLE)


def select(local_rank: int) -> None:
    """Bind this process to its GPU. Must run before any tensor is created.

    Raises:
        MegatuneError: UNAVAILABLE, if CUDA does not start: the driver may be too old for this build of torch.
    """
    if HAS_GPU:
        try:
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        except RuntimeError as error:
            raise _unusable("torch cannot use this machine's GPUs", str(error).splitlines()[0]) from error
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def bind_thread(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Bind this thread to a device: threads start with the first GPU, and would allocate memory there."""
    return torch.cuda.device(device) if HAS_GPU else contextlib.nullcontext()


def synchronize() -> None:
    """Wait until all queued work is done, so that a clock read afterwards includes it."""
    if HAS_GPU:
        torch.cuda.synchronize()


def record_time() -> Any:
    """Return the time at which all previously launched work is done: now, or on a GPU an event in its queue."""
    if not HAS_GPU:
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two recorded times; waits until a GPU has reached the second one."""
    if not HAS_GPU:
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def name() -> str:
    """Return the device's name, for the start banner."""
    return torch.cuda.get_device_name() if HAS_GPU else "CPU"


def send(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from the host to the device, without waiting for the device."""
    return tensor.pin_memory().to(current(), non_blocking=True) if HAS_GPU else tensor


_NORM_PIECE = 2**14  # elements whose squares a CPU adds up in fp32


def norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all tensors together, fp32 [], without waiting for the device.

    A CPU adds up squares one by one: of 200 million elements the norm would be 3 % too small. So it gets short pieces.
    """
    if not HAS_GPU:
        tensors = (piece for tensor in tensors for piece in tensor.reshape(-1).split(_NORM_PIECE))
    norms = torch.stack(torch._foreach_norm(list(tensors), 2, torch.float32))
    return torch.linalg.vector_norm(norms, dtype=torch.float64).float()


class HostCopy:
    """An asynchronous copy of a small tensor from the device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor
        if HAS_GPU:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """Return its values; waits until the copy is done."""
        if HAS_GPU:
            self._arrived.synchronize()
        return self._copy.tolist()


@functools.cache
def why_not_compiled() -> str:
    """Return why operators are not fused by torch.compile; "" if they are."""
    if not HAS_GPU:
        return "on a CPU torch.compile needs a C++ compiler"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if c_compiler() is None:
        return "Triton needs a C compiler, and there is neither gcc nor clang (CC names another one)"
    return ""


_compiles = True


def compile_operators(wanted: bool) -> None:
    """Choose whether `compiled` functions run as compiled kernels from now on, or operator by operator."""
    global _compiles
    _compiles = wanted


def set_deterministic(wanted: bool) -> None:
    """Make torch compute the same bits in every run from now on; on a CPU it always does.

    If torch has no deterministic kernel, an operator raises RuntimeError (`torch.use_deterministic_algorithms`).
    """
    if HAS_GPU:
        if wanted:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read in the first matrix product
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(wanted)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for dynamic shapes on a GPU, if possible: norms, SwiGLU, rotary embeddings, parts of
    cross-entropy and of quantized matrices, and Megatron-Core's fusions. Nothing else uses torch.compile."""
    if why_not_compiled():
        return function
    kernel = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (kernel if _compiles else function)(*args, **kwargs)

    return call


# GPU flash kernels need a number of channels that is a multiple of this.
FLASH_CHANNEL_MULTIPLE = 8 if HAS_GPU else 1


@functools.cache
def compute_capability() -> tuple[int, int]:
    """Return the GPU's compute capability, such as (9, 0) for Hopper; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if HAS_GPU else (0, 0)


# What `memory_bytes` and `peak_memory_bytes` count: tensors of the allocator, or the process's resident memory.
COUNTED: Literal["allocated", "resident"] = "allocated" if HAS_GPU else "resident"


def memory_bytes() -> int:
    """Return the bytes in use now."""
    return torch.cuda.memory_allocated() if HAS_GPU else int(psutil.Process().memory_info().rss)


def peak_memory_bytes() -> int:
    """Return the peak of bytes in use: the allocator's on a GPU, the process's resident memory on a CPU."""
    if HAS_GPU:
        return torch.cuda.max_memory_allocated()
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", 0) or _resident_peak() or memory.rss)


def memory_overhead_bytes() -> int:
    """Return the GPU's bytes in use beyond tensors: its context, communication libraries, and what the allocator
    reserves beyond the peak of the tensors. 0 on a CPU, where `memory_bytes` includes all."""
    if not HAS_GPU:
        return 0
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return outside + torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()


def memory_in_gib() -> dict[str, float]:
    """Return the memory in use by its name in log lines: of the allocator on a GPU, of the process on a CPU."""
    if not HAS_GPU:
        return {"memory_rss_gib": memory_bytes() / 2**30}
    counts = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }
    return {f"memory_{name}_gib": count / 2**30 for name, count in counts.items()}


def _resident_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Key by which the profiler's operator table is sorted.
PROFILER_SORT_KEY = "self_device_time_total" if HAS_GPU else "self_cpu_time_total"


def profiler_activities() -> list[torch.profiler.ProfilerActivity]:
    """Return the activities that torch.profiler records on this device."""
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU, activity.CUDA] if HAS_GPU else [activity.CPU]


def record_memory_history() -> None:
    """Record the stack of every GPU allocation from now on, for `dump_memory_history`."""
    if HAS_GPU:
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def dump_memory_history(path: Path) -> None:
    """Write what `record_memory_history` has recorded; nothing on a CPU."""
    if HAS_GPU:
        torch.cuda.memory._dump_snapshot(str(path))


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator that a step may use, Megatron-Core's by their names."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {"cpu": torch.random.get_rng_state()}
    if HAS_GPU:
        state["cuda"] = torch.cuda.get_rng_state()
    return {**state, **{f"{_TRACKED}{name}": each for name, each in get_cuda_rng_tracker().get_states().items()}}


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore the state that `rng_state` returned; a CUDA state is ignored without a GPU."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.random.set_rng_state(state["cpu"])
    if HAS_GPU and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracked = {name.removeprefix(_TRACKED): each for name, each in state.items() if name.startswith(_TRACKED)}
    tracker = get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **tracked})


class _Stream:
    """A stream whose queue is always empty: CPU operators run in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: _Stream) -> None: ...
    def wait_event(self, event: _Event) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: _Stream | None = None) -> None: ...
    def wait(self, stream: _Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Generators:
    """The CPU's default generator, for any device index."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.random.default_generator


def _nothing() -> Callable[..., None]:
    """Return a function that does nothing; a new one each time, because torch.compile rejects one under two names."""
    return lambda *args, **kwargs: None


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a factory function so that device="cuda" means the CPU."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return call


def _type_with_cuda_name(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """Let Tensor.type() return 'torch.cuda.FloatTensor': Megatron-Core's optimizer compares these names."""

    @functools.wraps(tensor_type)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = tensor_type(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return call


@functools.cache
def install() -> None:
    """Import Megatron-Core; on a machine without a GPU after patching its CUDA calls."""
    if not HAS_GPU:
        _patch_cuda_calls()
    # Megatron-Core compiles its fusions on import, even without a compiler.
    usual: Any = torch.compile
    torch.compile = lambda function=None, **options: usual(function, **options) if options else compiled(function)  # type: ignore[assignment]
    # Its inference code imports wandb if installed, which takes half a second and is not used here.
    with _absent("wandb"):
        import megatron.core  # noqa: F401  (imported for its effect)

    torch.compile = usual


@contextlib.contextmanager
def _absent(module: str) -> Iterator[None]:
    """Make a module that is not imported yet look as if it were not installed."""
    hide = module not in sys.modules
    if hide:
        sys.modules[module] = None  # type: ignore[assignment]
    yield
    if hide:
        del sys.modules[module]


def _patch_cuda_calls() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 0
    for call in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
        setattr(cuda, call, _nothing())
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.random.set_rng_state(state)
    cuda.manual_seed = torch.random.manual_seed
    cuda.default_generators = _Generators()
    # Megatron-Core defers setting a generator's state until CUDA is initialized, which is not needed here.
    cuda._lazy_call = lambda call, **unused: call()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type_with_cuda_name(torch.Tensor.type)  # type: ignore[method-assign,assignment]
    # torch's "with device" compares factories by identity: cache the originals before wrapping them.
    torch.utils._device._device_constructors()
    for factory in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like", "rand", "randn"):
        setattr(torch, factory, _on_cpu(getattr(torch, factory)))
