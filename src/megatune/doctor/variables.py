"""Environment variables that slow down or break a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatune.doctor.check import Check, Verdict, check

_ON = ("1", "true", "True", "TRUE", "yes")
# Each variable with the values that harm, () for any, what they lead to, and the fix.
_RULES = (
    ("CUDA_LAUNCH_BLOCKING", _ON, "every kernel is waited for: a step takes several times as long", "unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "collectives block the host, and nothing overlaps", "unset it"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "NCCL writes much to every rank's log", "NCCL_DEBUG=WARN"),
    ("NCCL_P2P_DISABLE", _ON, "GPUs of a machine communicate through main memory, many times slower", "unset it"),
    ("NCCL_SHM_DISABLE", _ON, "ranks of a machine communicate through the network", "unset it"),
    ("NCCL_IB_DISABLE", _ON, "machines communicate over TCP, many times slower than over InfiniBand", "unset it"),
    ("NCCL_ALGO", (), "one algorithm for all sizes is slower than NCCL's own choice", "unset it"),
    ("NCCL_PROTO", (), "one protocol for all sizes is slower than NCCL's own choice", "unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "every tensor is allocated from the driver", "unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked first: steps are slower", "unset it"),
    ("PYTHONOPTIMIZE", ("1", "2"), "assertions of this and of other packages are off", "unset it"),
    ("OMP_NUM_THREADS", ("0",), "it is not a valid number of threads", "OMP_NUM_THREADS=1"),
)
_FATAL = "OMP_NUM_THREADS"


def variables(env: Mapping[str, str], *, tensor_parallel: bool, gpus: bool) -> Iterator[Check]:
    """Check the environment.

    Args:
        env: of the process that starts the ranks.
        tensor_parallel: whether the layout splits tensors, which overlaps communication only in one order of kernels.
        gpus: whether the ranks compute on GPUs.
    """
    wrong = [
        (name, value, why, fix)
        for name, harmful, why, fix in _RULES
        if (value := env.get(name, "")) and (not harmful or value in harmful)
    ]
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if gpus and tensor_parallel and (value := env.get(name, "")) not in ("", "1"):
        why = "kernels start in another order than they are issued, and communication does not overlap with computing"
        wrong.append((name, value, why, "unset it: megatune sets 1"))
    proxies = sorted(name for name in env if name.startswith("http") and name.endswith("_proxy") and env[name])
    if proxies and not env.get("no_proxy") and not env.get("NO_PROXY"):
        why, fix = "connections between machines may be sent to the proxy", "no_proxy=localhost,127.0.0.1,..."
        wrong.append((proxies[0], "set, and no_proxy is not", why, fix))
    for name, value, why, fix in wrong:
        yield Check("environment", name, Verdict.FAIL if name == _FATAL else Verdict.WARN, value, why, fix)
    if not wrong:
        yield check("environment", "variables", "none that harms")
