"""Seconds of an update on the host: its Adam, beside which gradients come over PCIe and weights go back.

All of it is assumed: nothing was measured on a GPU.
"""

from __future__ import annotations

from megatune.plan.case import Case
from megatune.plan.memory.parameters import StageParameters, optimizer_rules

# Bytes/s that a copy between a device and page-locked memory reaches in one direction, each device at its own port:
# some 80 % of sixteen lanes of PCIe 3, 4 and 5.
_PCIE = {"volta": 12e9, "turing": 12e9, "ampere": 25e9, "ada": 25e9, "hopper": 50e9, "blackwell": 50e9}
# Bytes/s that Adam reads and writes on all processors of a machine: ZeRO-Offload (arXiv:2101.06840, table 4) updates
# 10 billion parameters in 2.7 s on two sockets of DDR4, 32 bytes each.
_MACHINE = 120e9
_FP32 = 4


def host_seconds(case: Case, elements: StageParameters) -> float:
    """Time what a rank updates on the host; 0 where that is nothing.

    Of an element the device sends the gradient in fp32, of an fp32 model also the weight, and is sent the weight. The
    host reads the gradient, reads and writes the master weight and both averages, and writes the weight. Both go on
    side by side: the longer one counts.
    """
    rules, size = optimizer_rules(case.settings), case.itemsize
    updated = rules.host_fraction * elements.updated
    if not updated:
        return 0.0
    out = _FP32 + (size if size == _FP32 else 0)
    computed = _FP32 + 2 * _FP32 + 2 * rules.element_bytes + size
    device = case.machine.device
    if device.generation == "cpu":
        return updated * (out + size + computed) / device.bandwidth
    ranks = min(case.machine.gpus_per_node, case.world_size)
    # Both directions of PCIe are used at once.
    return updated * max(max(out, size) / _PCIE.get(device.generation, _PCIE["ampere"]), computed * ranks / _MACHINE)
