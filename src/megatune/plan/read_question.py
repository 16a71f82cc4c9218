"""Reads the command line of `megatune plan`: flags, settings, the model and the machines, checked together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megatune.config.derived import with_adapter_settings, with_device_defaults, with_model_defaults
from megatune.config.load import load
from megatune.config.options import ParsedArguments
from megatune.config.rules import RULES, finetuning, trained
from megatune.config.rules.rule import Rule
from megatune.config.settings import Settings, with_settings
from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.models import is_hub_id
from megatune.plan.answer import Question
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine, find_model, machine_assumptions
from megatune.plan.layouts import NUM_RESHAPED
from megatune.plan.machine import Machine
from megatune.plan.options import PlanOptions
from megatune.plan.pages.words import amount
from megatune.plan.rows import RowLengths

T = TypeVar("T")
# Settings that a plan does not need, and whose rules are skipped.
_NOT_HERE = ("data.dataset", "run.output_dir", "run.stage", "model.model_name_or_path")
_ROWS = 64
_LAYOUT_GROUPS = ("parallel", "batch", "recompute")
_OF_RL = "only a file of reinforcement learning has prompts and responses"


@dataclass
class PlanReader:
    """Reads a question and collects all problems to report them at once.

    Attributes:
        given: the command line, with the findings about its options.
        count_gpus: counts the GPUs of this machine.
        describe_machine: describes this machine for a number of processes, of GPUs, and a calibration file; or returns
            None and the reason.
        notes: assumptions, in sentences.
        missing: findings about missing inputs, with the exit code `missing_code` if the settings are valid.
    """

    given: ParsedArguments[PlanOptions]
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
        """Return the result of a function; or record the findings that it raises, and return None."""
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
        """Raise all findings, if there are any."""
        if self.findings:
            raise MegatuneError([*self.findings, *self.missing], ExitCode.SETTINGS)
        if self.missing:
            raise MegatuneError(self.missing, self.missing_code)

    def refuse(self, reasons: dict[str, str], with_what: str = "") -> None:
        """Refuse options that have no effect here, by name with the reason."""
        for name, why in reasons.items():
            if self.given.origin(name) is not None:
                self.findings.append(Finding(f"--{name}{with_what}", "", why, f"leave --{name} out"))

    def catalogued(self, world: int | None, per_node: int | None) -> Machine | None:
        """Return the machine of --gpu, and note the assumptions about it."""
        return self.found(lambda: self._catalogued(world, per_node))

    def _catalogued(self, world: int | None, per_node: int | None) -> Machine:
        from megatune.plan.catalogue.own import calibration_for

        options = self.options
        assert options.gpu is not None
        machine = find_machine(
            options.gpu, gpus_per_node=per_node, link=options.link, network=options.network,
            devices_file=options.devices,
        )  # fmt: skip
        # Interconnects are not used by a run on one device, or on one machine.
        inside, across = world != 1, world is None or world > machine.gpus_per_node
        self.notes += machine_assumptions(
            machine,
            gpus_per_node=per_node if inside else machine.gpus_per_node,
            link=options.link if inside else machine.link.name,
            network=options.network if across else machine.network.name,
        )
        return replace(machine, calibration=calibration_for(machine.device.name, options.calibration))

    def this_machine(self, world: int, num_gpus: int) -> Machine | None:
        """Return this machine; None with a finding if the catalogue does not have it."""
        here = min(world, num_gpus) if num_gpus else world
        found = self.found(lambda: self.describe_machine(here, num_gpus, self.options.calibration))
        if found is not None and found[1]:
            self.missing.append(Finding(found[1], fix="--gpu KIND, one of the catalogue or of --devices FILE"))
        return found[0] if found is not None else None

    def need_gpu(self) -> None:
        """Refuse options that describe machines if there is no --gpu."""
        for name in ("gpus_per_node", "link", "network", "devices"):
            if getattr(self.options, name) is not None:
                self.findings.append(Finding(f"--{name} without --gpu", fix="--gpu KIND, such as --gpu h100-80g"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """The rows of a plan.

    Attributes:
        lengths: None to assume cutoff_len tokens for each.
        image_tokens, largest_picture: as in `Case`.
        tokens: of one epoch; None if not all rows were read.
        note: the assumption about the rows.
    """

    lengths: RowLengths | None = None
    image_tokens: int | None = None
    largest_picture: int | None = None
    tokens: float | None = None
    note: str = ""


def stated_rows(settings: Settings, mean: float | None, longest: int | None) -> PlannedRows:
    """Return rows with these lengths; None is as long as possible."""
    cutoff = settings.data.cutoff_len
    longest = min(longest or cutoff, cutoff)
    mean = min(mean or longest, longest)
    if settings.packing or mean == longest == cutoff:
        return PlannedRows()
    return PlannedRows(lengths=RowLengths.stated(mean, longest, "as stated"))


@dataclass
class QuestionReader(PlanReader):
    """Reads a `Question`; `rows_of` reads the lengths of the rows of the settings' data."""

    rows_of: Callable[[Settings, PlannedModel], PlannedRows] = field(kw_only=True)

    def question(self) -> Question:
        """Read the flags, the settings, the model and the machine, and check them together.

        Raises:
            MegatuneError: SETTINGS, or INPUT if only a model, a device or a file is missing.
        """
        words = self.given.settings
        self.source = words.source
        is_file = words.source is not None and words.source.endswith((".yaml", ".yml"))
        self.file = words.source if is_file else None
        self.refuse(dict.fromkeys(("prompt_tokens", "response_tokens"), _OF_RL))
        cutoff = [] if self.options.seq is None else ["--cutoff_len", str(self.options.seq)]
        loaded = load(self.file, words.overrides, [*words.flags, *cutoff])
        if (method := self.options.trainable) is not None:
            changed = with_settings(loaded.settings, {"finetuning.finetuning_type": method})
            loaded = replace(loaded, settings=changed)
        self.findings.extend(loaded.findings)
        self.findings.extend(loaded.check_rules(rules=(*finetuning.RULES, finetuning.preference_needs)))
        self.notes += loaded.accepted_notes()
        self.loaded = loaded
        # Groups with a setting that the user set.
        self.written = {path.partition(".")[0] for path in loaded.written}
        model = self._model(loaded.settings)
        if model is not None:
            self.loaded = self.found(lambda: with_adapter_settings(loaded, model.architecture)) or loaded
            self.loaded, lines = with_model_defaults(self.loaded, model.architecture)
            self.notes += lines
        world, machine = self._machine(self.loaded.settings)
        self.keys = frozenset(self.loaded.written)
        if self.file is not None and machine is not None and not machine.device.on_cpu:
            self.loaded, lines = with_device_defaults(self.loaded, machine.device.gpu, world)
            self.notes += lines
        before = len(self.loaded.findings)
        self.loaded = self.loaded.for_world(world)
        self.findings.extend(self.loaded.findings[before:])
        if self.options.launch_file is not None and self.options.launch in (None, "torchrun"):
            fix = "--launch slurm, skypilot or kubernetes"
            self.findings.append(
                Finding("--launch_file without a cluster's --launch", why="there is no file to write", fix=fix)
            )
        self.stop()
        assert model is not None
        assert machine is not None
        assert world is not None
        return self._checked(model, machine, world)

    def _model(self, settings: Settings) -> PlannedModel | None:
        written = settings.model.model_name_or_path
        name = written if self.file is not None else self.source or written
        if name is not None:
            return self.found(lambda: find_model(name, settings))
        what, fix = "there is no model to plan", "megatune plan FILE.yaml, or megatune plan MODEL"
        if self.file:
            what, fix = "model_name_or_path is missing", "write model_name_or_path: FOLDER, or an id on a hub"
        self.findings.append(Finding(what, self.file or "", fix=fix))
        return None

    def _machine(self, settings: Settings) -> tuple[int | None, Machine | None]:
        options = self.options
        smallest = settings.parallel.smallest_world
        world = options.gpus or settings.run.num_processes
        if options.gpu is not None:
            if world is None and (self.file is not None or smallest > 1):
                world = smallest
                self.notes.append(f"{world} devices, the fewest for this layout (--gpus)")
            elif world is None and not any(finding.where == "--gpus" for finding in self.findings):
                self.findings.append(Finding("the number of GPUs is missing", fix="--gpus 8"))
            return world, self.catalogued(world, options.gpus_per_node)
        self.need_gpu()
        num_gpus = self.count_gpus()
        if not num_gpus and options.gpus is not None:
            why = "this machine has no visible GPU to use as the default"
            self.findings.append(
                Finding("the kind of GPU is missing", why=why, fix="--gpu KIND, such as --gpu h100-80g")
            )
            return None, None
        world = world or num_gpus or smallest
        return world, self.this_machine(world, num_gpus)

    def _checked(self, model: PlannedModel, machine: Machine, world: int) -> Question:
        """Check the rules of the layout for the model and the world, and return the question."""
        plans_own = self.file is not None or not self.written.isdisjoint(_LAYOUT_GROUPS)
        settings, rows = self._batch(self._precision(machine), world, plans_own)
        if self.file is None:
            is_known = Path(model.name).expanduser().is_dir() or is_hub_id(model.name)
            settings = with_settings(settings, {"model.model_name_or_path": model.name if is_known else None})
        rules: tuple[Rule, ...] = RULES if plans_own else (*finetuning.RULES, *trained.RULES)
        # A model without a file is also planned for rows longer than its positions, with a note.
        left_out = {*_NOT_HERE, *(["data.cutoff_len"] if self.file is None else [])} if plans_own else set()
        planned = replace(self.loaded, settings=settings)
        self.findings.extend(planned.check_rules(model.architecture, world, rules=rules, leave_out=left_out))
        self._note_other_rows(world, rows)
        limit = model.architecture.max_position_embeddings
        if settings.data.cutoff_len > limit:
            self.notes.append(f"{model.name} has {limit:,} positions, and megatune train refuses longer rows")
        self._whole_machines(machine, world)
        self.stop()
        known = self._rows(settings, model)
        case = Case(
            model=model,
            settings=settings,
            world_size=world,
            machine=machine,
            document_length=self._documents(settings) if known.lengths is None else None,
            image_tokens=self._images(model, known),
            largest_picture=known.largest_picture,
            lengths=known.lengths,
        )
        return Question(
            case=case,
            global_batch_size=rows,
            origins=self.loaded.origins if self.file else {},
            plans_own=plans_own,
            dataset_tokens=self._tokens(settings, known),
            notes=tuple(self.notes),
            keep=max(self.options.top, NUM_RESHAPED),
            file=self.file,
            written=self.keys,
        )

    def _note_other_rows(self, world: int, rows: int) -> None:
        """Note if a step has another number of rows than on the devices of the file."""
        written = self.loaded.settings
        own_world = written.run.num_processes or world
        replicas, left = divmod(own_world, written.parallel.model_parallel_size)
        own = written.batch.per_device_train_batch_size * written.batch.gradient_accumulation_steps * replicas
        if self.file is None or left or own == rows:
            return
        by = f"the file's batch on {counted(own_world, 'device')}"
        why = "learning_rate, warmup and steps were chosen for those"
        self.notes.append(
            f"a step has {counted(rows, 'row')}, {own:,} by {by}: {why} (--global_batch {own} keeps them)"
        )

    def _tokens(self, settings: Settings, known: PlannedRows) -> float | None:
        """Return the tokens of the whole run: --dataset_tokens, or those of the data times the epochs."""
        optimizer = settings.optimizer
        if self.options.dataset_tokens is not None or known.tokens is None or optimizer.max_steps > 0:
            return self.options.dataset_tokens
        epochs = optimizer.num_train_epochs
        self.notes.append(f"the data has about {amount(known.tokens)} tokens, in {epochs:g} epochs (--dataset_tokens)")
        return epochs * known.tokens

    def _whole_machines(self, machine: Machine, world: int) -> None:
        """Note devices that do not fill whole machines, and refuse them with --launch."""
        size = machine.gpus_per_node
        if world <= size or world % size == 0:
            return
        what = f"{world} devices do not fill machines of {size}"
        per_node = next(each for each in range(size, 0, -1) if world % each == 0)
        if self.options.launch is None:
            last = f"the last one has {world % size}"
            alike = f"; --gpus_per_node {per_node} plans {world // per_node} equal machines" if per_node > 1 else ""
            self.notes.append(f"{what}: {last}{alike}")
            return
        why = "every machine starts the same number of processes"
        fix = f"--gpus {world // size * size}, --gpus {-(-world // size) * size}, or --gpus_per_node {per_node}"
        self.findings.append(Finding(what, "--launch", why, fix))

    def _precision(self, machine: Machine) -> Settings:
        """Use 16 bits for a model without a file on GPUs, if no precision is set."""
        settings = self.loaded.settings
        if self.file is not None or "precision" in self.written or machine.device.on_cpu:
            return settings
        dtype = "bf16" if machine.device.gpu.has_bf16 else "fp16"
        self.notes.append(f"{dtype}: true, which this device computes fastest")
        return with_settings(settings, {f"precision.{dtype}": True})

    def _batch(self, settings: Settings, world: int, plans_own: bool) -> tuple[Settings, int]:
        """Return the settings with the requested batch, and the rows of a step."""
        parallel, batch, rows = settings.parallel, settings.batch, self.options.global_batch
        replicas = max(world // parallel.model_parallel_size, 1)
        if rows is None and (self.file is not None or "batch" in self.written):
            return settings, batch.per_device_train_batch_size * batch.gradient_accumulation_steps * replicas
        if rows is None:
            rows = -(-_ROWS // world) * world
            self.notes.append(f"{counted(rows, 'row')} a step (--global_batch)")
        if not plans_own:
            return settings, rows
        size = batch.per_device_train_batch_size if self.file or "batch" in self.written else 1
        if rows % (size * replicas):
            if (
                self.options.global_batch is not None
            ):  # otherwise the world does not fit the layout, which is reported elsewhere
                near = max(1, round(rows / (size * replicas))) * size * replicas
                why = f"{counted(size, 'row')} a micro-batch times {replicas} data-parallel processes do not divide it"
                self.findings.append(Finding(f"--global_batch {rows}", "", why, f"--global_batch {near}"))
            return settings, rows
        steps = rows // (size * replicas)
        changed = {"batch.per_device_train_batch_size": size, "batch.gradient_accumulation_steps": steps}
        return with_settings(settings, changed), rows

    def _rows(self, settings: Settings, model: PlannedModel) -> PlannedRows:
        """Return rows with the given lengths, or else those of the data of the file."""
        mean, longest = self.options.document_length, self.options.longest_document
        if mean is not None or longest is not None:
            return stated_rows(settings, mean, longest)
        rows = self.rows_of(settings, model) if settings.data.dataset else PlannedRows()
        self.notes += [rows.note] if rows.note else []
        return rows

    def _documents(self, settings: Settings) -> float | None:
        """Return the mean tokens of a document in full packed rows."""
        length = self.options.document_length
        if length is not None and length > settings.data.cutoff_len:
            self.notes.append("documents longer than a row are split: each row is one document")
            return None
        if not settings.packing:
            return None
        if length is None:
            self.notes.append(
                "each packed row counts as one document; shorter ones need less attention (--document_length)"
            )
        return length

    def _images(self, model: PlannedModel, rows: PlannedRows) -> int | None:
        tokens = self.options.image_tokens
        if tokens is None:
            return rows.image_tokens
        if tokens and model.architecture.vision is None:
            self.notes.append(f"{model.name} reads no images: --image_tokens has no effect")
        return tokens
