"""The machines of a plan: devices and their interconnects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatune.config.derived import Gpu

_WITHOUT_BF16 = ("volta", "turing")  # their tensor cores support fp16 and no bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator, with the numbers of its data sheet.

    Attributes:
        name: as in the catalogue: "a100-80g".
        generation: "ampere", "hopper", "cpu"; devices of one generation share their efficiencies.
        memory: bytes that a process can allocate at most.
        flops: peak FLOP/s of dense matrix products by torch dtype; "float32" as the engine computes it.
        bandwidth: memory bandwidth in bytes/s.
        link: name of the interconnect of the devices in one machine.
        watts: power limit of its board; None if unknown, which assumes that of its generation's reference device.
        multiprocessors: number of streaming multiprocessors; None for that of the reference device.
    """

    name: str
    generation: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: str
    watts: float | None = None
    multiprocessors: int | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))  # a cache key although it has a mapping

    @property
    def on_cpu(self) -> bool:
        """Whether it is a share of a CPU: a process is the device, and nothing overlaps with its computation."""
        return self.generation == "cpu"

    @property
    def gpu(self) -> Gpu:
        """The properties that defaults of settings on this GPU depend on."""
        has_bf16 = self.generation not in _WITHOUT_BF16
        speedup = self.flops["bfloat16" if has_bf16 else "float16"] / self.flops["float32"]
        return Gpu(self.name, has_bf16, speedup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An interconnect.

    Attributes:
        bandwidth: bytes/s that one device sends while it receives as much; of a network, each device's share of it.
        latency: seconds of the shortest message.
    """

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors fitted to measured runs; these defaults leave predictions as they are.

    Attributes:
        compute: measured over predicted seconds of computation.
        communication: the same for communication.
        activations: measured over predicted bytes of activations and loss.
        framework: measured less predicted bytes beyond tensors.
        num_runs: number of runs that they were fitted to.
    """

    compute: float = 1.0
    communication: float = 1.0
    activations: float = 1.0
    framework: int = 0
    num_runs: int = 0

    @property
    def of_time(self) -> bool:
        """Whether seconds were fitted."""
        return self.num_runs > 0 and (self.compute, self.communication) != (1.0, 1.0)

    @property
    def of_memory(self) -> bool:
        """Whether bytes were fitted."""
        return self.num_runs > 0 and (self.activations, self.framework) != (1.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machines of one kind, as many as a run needs.

    Attributes:
        gpus_per_node: devices of one machine; ranks fill one machine after the other.
        link: the interconnect inside a machine.
        network: the interconnect between machines.
    """

    device: Device
    gpus_per_node: int
    link: Link
    network: Link
    calibration: Calibration = field(default_factory=Calibration)
