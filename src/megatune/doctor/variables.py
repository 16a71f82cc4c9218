"""Environment variables that help or harm a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatune.doctor.check import Check, Verdict


@dataclass(frozen=True, slots=True)
class _Rule:
    """A variable whose values, or those that `harmful` names, lead to `why`."""

    name: str
    why: str
    fix: str = "unset it"
    harmful: tuple[str, ...] = ()
    verdict: Verdict = Verdict.WARN


_ON = ("1", "true", "True", "TRUE", "yes")
_RULES = (
    _Rule("CUDA_LAUNCH_BLOCKING", "every kernel is waited for: a step takes several times as long", harmful=_ON),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", "collectives block the host, and nothing overlaps", harmful=_ON),
    _Rule("NCCL_DEBUG", "NCCL writes much to every rank's log", "NCCL_DEBUG=WARN", ("INFO", "TRACE")),
    _Rule("NCCL_P2P_DISABLE", "GPUs of a machine communicate through main memory, many times slower", harmful=_ON),
    _Rule("NCCL_SHM_DISABLE", "ranks of a machine communicate through the network", harmful=_ON),
    _Rule("NCCL_IB_DISABLE", "machines communicate over TCP, many times slower than over InfiniBand", harmful=_ON),
    _Rule("NCCL_ALGO", "one algorithm for all sizes is slower than NCCL's own choice"),
    _Rule("NCCL_PROTO", "one protocol for all sizes is slower than NCCL's own choice"),
    _Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor is allocated from the driver", harmful=_ON),
    _Rule("TORCH_DISTRIBUTED_DEBUG", "every collective is checked first: steps are slower", harmful=("DETAIL",)),
    _Rule("PYTHONOPTIMIZE", "assertions of this and of other packages are off", harmful=("1", "2")),
    _Rule(
        "OMP_NUM_THREADS",
        "processes would share something that is not a number of threads",
        "OMP_NUM_THREADS=1",
        ("0",),
        Verdict.FAIL,
    ),
)


def variables(env: Mapping[str, str], *, tensor_parallel: bool, gpus: bool) -> Iterator[Check]:
    """Check the environment.

    Args:
        env: of the process that starts the ranks.
        tensor_parallel: whether the layout splits tensors, which overlaps communication only in one order of kernels.
        gpus: whether the ranks compute on GPUs.
    """
    found = False
    for rule in _RULES:
        value = env.get(rule.name, "")
        if value and (not rule.harmful or value in rule.harmful):
            found = True
            yield Check("environment", rule.name, rule.verdict, value, rule.why, rule.fix)
    if gpus and tensor_parallel and (value := env.get("CUDA_DEVICE_MAX_CONNECTIONS", "")) not in ("", "1"):
        found = True
        why = "kernels start in another order than they are issued, and communication does not overlap with computing"
        yield Check("environment", "CUDA_DEVICE_MAX_CONNECTIONS", Verdict.WARN, value, why, "unset it: megatune sets 1")
    for name in sorted(name for name in env if name.startswith("http") and name.endswith("_proxy") and env[name]):
        if not env.get("no_proxy") and not env.get("NO_PROXY"):
            found = True
            why = "connections between machines may be sent to the proxy"
            yield Check(
                "environment", name, Verdict.WARN, "set, and no_proxy is not", why, "no_proxy=localhost,127.0.0.1,..."
            )
            break
    if not found:
        yield Check("environment", "variables", Verdict.PASS, "none that harms")
