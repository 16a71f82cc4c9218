"""What both questions of `megatune plan` are read with: the machines, and all that is wrong with the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megatune.config.options import Given
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue import find_machine, machine_assumptions
from megatune.plan.machine import Machine
from megatune.plan.options import PlanOptions

T = TypeVar("T")


@dataclass
class PlanReader:
    """Reads a question, and gathers what is wrong until all of it can be reported at once.

    Attributes:
        given: the command line, with what was wrong with its options.
        count_gpus: counts those of this machine.
        describe_machine: describes this machine for a number of processes, GPUs and a file of factors; or returns None
            and why it cannot be planned for.
        notes: what was assumed.
        missing: what ends with `missing_code` where nothing is wrong with the settings.
    """

    given: Given[PlanOptions]
    count_gpus: Callable[[], int]
    describe_machine: Callable[[int, int, str | None], tuple[Machine | None, str]]
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
        from megatune.plan.calibration.store import calibration_for

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
        found = self.found(lambda: self.describe_machine(here, num_gpus, self.options.calibration))
        if found is not None and found[1]:
            self.missing.append(Finding(found[1], fix="--gpu KIND, one of the catalogue or of --devices FILE"))
        return found[0] if found is not None else None

    def need_gpu(self) -> None:
        """Refuse what describes machines of a kind where no kind is named."""
        for name in ("gpus_per_node", "link", "network", "devices"):
            if getattr(self.options, name) is not None:
                self.findings.append(Finding(f"--{name} without --gpu", fix="--gpu KIND, such as --gpu h100-80g"))
