"""What both questions of `megatune plan` are read with: its options, the machines, and all that is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import Field

from megatune.cli.command import Given
from megatune.cli.options import Flag
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue import find_machine, machine_assumptions
from megatune.training.this_machine import this_machine

if TYPE_CHECKING:
    from megatune.plan.machine import Machine

T = TypeVar("T")
_AMOUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _amount(text: str) -> float | None:
    """Read 1B, 250M or 3_000_000."""
    plain = text.replace("_", "").replace(",", "").lower()
    factor = _AMOUNTS.get(plain[-1:], 1.0)
    try:
        value = float(plain[:-1] if factor != 1.0 else plain) * factor
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class PlanOptions(Group):
    """The options of `megatune plan`."""

    gpu: Annotated[str | None, Flag("KIND")] = None
    """a device of the catalogue, such as a100-80g (this machine's)"""
    gpus: Count | None = None
    """devices of the whole run (num_processes, or this machine's)"""
    gpus_per_node: Count | None = None
    """devices of one machine (as machines of the kind have)"""
    link: Annotated[str | None, Flag("NAME")] = None
    """interconnect of the devices of a machine (as machines of the kind have)"""
    network: Annotated[str | None, Flag("NAME")] = None
    """network between machines, such as ib-400 or ethernet-100g (as machines of the kind have)"""
    seq: Count | None = None
    """tokens of a row: cutoff_len (2048)"""
    global_batch: Count | None = None
    """rows of a step (those of the settings; 64, or one a device, for a bare model)"""
    trainable: Literal["full", "lora"] | None = None
    """what is trained (full)"""
    document_length: Annotated[float | None, Flag("L"), Field(ge=1)] = None
    """tokens of the mean sequence: of a row, or of those packed into one (the data's)"""
    longest_document: Count | None = None
    """tokens of the longest sequence (the data's, or cutoff_len)"""
    image_tokens: Annotated[int | None, Field(ge=0)] = None
    """image tokens of a row (one image of image_max_pixels)"""
    dataset_tokens: Annotated[
        float | None, Flag("N", read=_amount, expected="a number above 0, such as 1B, 250M or 3000000"), Field(ge=1)
    ] = None
    """tokens of the whole run, such as 1B or 250M: says how long they take"""
    prompt_tokens: Annotated[float | None, Flag("N"), Field(ge=1)] = None
    """tokens of the mean prompt of an RL file (a quarter of the longest)"""
    response_tokens: Annotated[float | None, Flag("N"), Field(ge=1)] = None
    """tokens of the mean response of an RL file (half of the longest)"""
    top: Count = 10
    """number of layouts to list"""
    output: Annotated[str | None, Flag("FILE.yaml")] = None
    """write the best layout as a settings file for megatune train"""
    figures: Annotated[str | None, Flag("DIR")] = None
    """draw memory against time, and the pipeline, as PNG files in this folder"""
    launch: Annotated[Literal["torchrun", "slurm"] | None, Flag(bare="torchrun")] = None
    """print how the run is started on each machine"""
    devices: Annotated[str | None, Flag("FILE")] = None
    """devices and interconnects of your own"""
    calibration: Annotated[str | None, Flag("FILE")] = None
    """factors that --calibrate fitted (those of the device, if there are any)"""
    calibrate: Annotated[list[str], Flag("RUN ...")] = Field(default=[])
    """fit the planner to the measurements of these runs"""
    json_: bool = False
    """print one JSON document"""


@dataclass
class PlanReader:
    """Reads a question, and gathers what is wrong until all of it can be reported at once.

    Attributes:
        given: the command line, with what was wrong with its options.
        notes: what was assumed.
        missing: what ends with `missing_code` where nothing is wrong with the settings.
    """

    given: Given[PlanOptions]
    notes: list[str] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    missing_code: ExitCode = ExitCode.INPUT

    @property
    def options(self) -> PlanOptions:
        return self.given.options

    @property
    def findings(self) -> list[Finding]:
        return self.given.findings

    def found(self, find: Callable[[], T]) -> T | None:
        """Return what a function finds; or note what it raises, once, and return None."""
        try:
            return find()
        except MegatuneError as error:
            if error.exit_code == ExitCode.SETTINGS:
                self.findings.extend(error.findings)
            else:
                self.missing += [each for each in error.findings if each not in self.missing]
                self.missing_code = error.exit_code
            return None

    def stop(self) -> None:
        """Raise everything that was noted, if anything was."""
        if self.findings:
            raise MegatuneError([*self.findings, *self.missing], ExitCode.SETTINGS)
        if self.missing:
            raise MegatuneError(self.missing, self.missing_code)

    def refuse(self, reasons: dict[str, str], with_what: str = "") -> None:
        """Refuse options that have no effect here, for these reasons."""
        for name, why in reasons.items():
            if self.given.origin(name) is not None:
                self.findings.append(Finding(f"--{name}{with_what}", "", why, f"leave --{name} out"))

    def catalogued(self, world: int | None, per_node: int | None) -> Machine | None:
        """Return the machine that --gpu names, and note what was assumed of it."""
        return self.found(lambda: self._catalogued(world, per_node))

    def _catalogued(self, world: int | None, per_node: int | None) -> Machine:
        from megatune.plan.calibration import calibration_for

        options = self.options
        assert options.gpu is not None
        machine = find_machine(
            options.gpu, gpus_per_node=per_node, link=options.link, network=options.network,
            devices_file=options.devices,
        )  # fmt: skip
        # What connects devices is nothing to a run that has one of them, or one machine.
        inside, across = world != 1, world is None or world > machine.gpus_per_node
        self.notes += machine_assumptions(
            machine,
            gpus_per_node=per_node if inside else machine.gpus_per_node,
            link=options.link if inside else machine.link.name,
            network=options.network if across else machine.network.name,
        )
        return replace(machine, calibration=calibration_for(machine.device.name, options.calibration))

    def this_machine(self, world: int, num_gpus: int) -> Machine | None:
        """Return this machine, as far as the catalogue knows it."""
        here = min(world, num_gpus) if num_gpus else world
        machine, unknown = self.found(lambda: this_machine(here, num_gpus, self.options.calibration)) or (None, "")
        if unknown:
            self.missing.append(Finding(unknown, fix="--gpu KIND, one of the catalogue or of --devices FILE"))
        return machine

    def need_gpu(self) -> None:
        """Refuse what describes machines of a kind where no kind is named."""
        for name in ("gpus_per_node", "link", "network", "devices"):
            if getattr(self.options, name) is not None:
                self.findings.append(Finding(f"--{name} without --gpu", fix="--gpu KIND, such as --gpu h100-80g"))
