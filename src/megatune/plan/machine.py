"""The machines that a plan is for: devices, and what joins them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatune.config.derived import Gpu

_WITHOUT_BF16 = ("volta", "turing")  # whose tensor cores compute in 16 bits as fp16 only


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator, by the numbers of its data sheet.

    Attributes:
        name: as in the catalogue: "a100-80g".
        generation: devices of one generation share their efficiencies: "ampere", "hopper", "cpu".
        memory: bytes that a process can allocate at most.
        flops: peak of dense matrix products, FLOP/s, by torch name of the dtype; "float32" as the engine computes it.
        bandwidth: of the device's memory, bytes/s.
        link: name of what joins the devices of one machine.
        watts: what its board draws at most; None where that is unknown: its clocks then last as those of the device
            that its generation's efficiencies were found on.
        multiprocessors: over which kernels distribute their tiles; None for those of that device.
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
        return hash((self.name, self.memory, self.bandwidth))  # a key of caches, in spite of its mapping

    @property
    def on_cpu(self) -> bool:
        """Whether it is the processors of a host: a process is the device, and nothing runs next to its computing."""
        return self.generation == "cpu"

    @property
    def gpu(self) -> Gpu:
        """What the defaults of settings on this GPU follow from."""
        has_bf16 = self.generation not in _WITHOUT_BF16
        speedup = self.flops["bfloat16" if has_bf16 else "float16"] / self.flops["float32"]
        return Gpu(self.name, has_bf16, speedup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects devices.

    Attributes:
        bandwidth: bytes/s that one device sends while it receives as many; of a network, each device's share of it.
        latency: seconds of the shortest message.
    """

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors fitted to measured runs; these defaults leave predictions as they are.

    Attributes:
        compute: measured over predicted seconds of what one device computes.
        communication: the same of what devices exchange.
        activations: measured over predicted bytes of activations and loss.
        framework: bytes measured beyond what was predicted, of whatever is no tensor.
        num_runs: how many runs they were fitted to.
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
        link: joins the devices of one machine.
        network: joins machines.
    """

    device: Device
    gpus_per_node: int
    link: Link
    network: Link
    calibration: Calibration = field(default_factory=Calibration)
