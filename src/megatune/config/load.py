"""Load settings from a file, overrides and flags, through a dialect, and report all problems at once.

The settings of a run are written as run.yaml, each with its origin, so that they can be loaded again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.config.dialects.dialect import ACCUMULATION, LLAMAFACTORY, Dialect, foreign_keys
from megatune.config.entry import Builder, SettingEntry, Written, read_file
from megatune.config.flags import read_flags, read_overrides
from megatune.config.rules import RULES, check
from megatune.config.rules.rule import Rule, multiples_around
from megatune.config.setting import Mark
from megatune.config.settings import GROUPS, Settings, all_settings, marked, setting_value, with_settings
from megatune.config.values import Value, coerce, has_undecoded_bytes, is_long_name, quoted, shown
from megatune.errors import ExitCode, Finding, MegatuneError, in_order, names_with, nearest_names
from megatune.references import either, ref

_ORIGIN_COLUMN = 52  # of run.yaml


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded settings, and what is wrong with them.

    Attributes:
        settings: refused settings have their defaults here, and so have secrets, which therefore are never written.
        findings: problems of single settings; `check` adds those between settings.
        invalid: "group.name" of settings that were refused, or that depend on the world size. Rules skip them.
        entries: what a user wrote, by the "group.name" that it sets.
        rows: rows of a micro-batch on all replicas; None if the world size is not known.
        secrets: "group.name" -> what a user wrote.
        accepted: reason -> the keys of a user that have no effect.
    """

    settings: Settings
    findings: list[Finding]
    invalid: frozenset[str] = frozenset()
    entries: Mapping[str, SettingEntry] = field(default_factory=dict)
    dialect: Dialect = LLAMAFACTORY
    rows: int | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    accepted: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def origins(self) -> dict[str, str]:
        """ "group.name" of every setting -> "run.yaml:7", "override", "flag" or "default"."""
        return {path: self.entries[path].origin if path in self.entries else "default" for path in all_settings()}

    @property
    def places(self) -> dict[str, str]:
        """ "group.name" of what a user wrote -> its place in messages: "run.yaml:7", "--learning_rate"."""
        return {path: entry.where for path, entry in self.entries.items()}

    @property
    def written(self) -> dict[str, SettingEntry]:
        """Entries of a user by "group.name", without those that are null, which is the default."""
        return {path: entry for path, entry in self.entries.items() if entry.value.data is not None}

    @property
    def without_secrets(self) -> Loaded:
        """A copy without secrets, which may be written to a file."""
        entries = {path: entry for path, entry in self.entries.items() if path not in self.secrets}
        return replace(self, entries=entries, secrets={})

    def with_values(self, changes: Mapping[str, Any], where: str, origin: str) -> Loaded:
        """Return a copy with other values, by "group.name", as if a user had written them at a place."""
        entries = {
            path: SettingEntry(all_settings()[path].name, Value(v), where, origin) for path, v in changes.items()
        }
        return replace(self, settings=with_settings(self.settings, changes), entries={**self.entries, **entries})

    def accepted_notes(self) -> list[str]:
        """Return a note for each reason why keys have no effect."""
        return [f"{', '.join(keys)}: {why}" for why, keys in self.accepted.items()]

    def for_world(self, world_size: int | None) -> Loaded:
        """Resolve what depends on the world size: gradient_accumulation_steps of a global batch.

        Args:
            world_size: processes over all machines; None takes num_processes, if set.
        """
        settings, entry = self.settings, self.entries.get(ACCUMULATION)
        world_size = settings.run.num_processes if world_size is None else world_size
        if world_size is None or self.rows is not None or world_size % settings.parallel.model_parallel_size:
            return self
        rows = settings.batch.per_device_train_batch_size * (world_size // settings.parallel.model_parallel_size)
        if entry is None or not _is_global_batch(entry, self.dialect):
            return replace(self, rows=rows)
        asked = coerce(entry.value, all_settings()[ACCUMULATION])
        if not isinstance(asked, int) or asked < 1:  # reported already
            return self
        if asked % rows:
            what = f"{entry.key} {asked} is not a multiple of {rows}"
            of_rows = ref("per_device_train_batch_size")
            why = f"every data-parallel process computes as many micro-batches, of {of_rows} rows each"
            fix = "write " + self.dialect.written(entry.key, either(multiples_around(asked, rows)))
            finding = self.phrased(Finding(what, entry.where, why, fix))
            return replace(self, rows=rows, findings=[*self.findings, finding])
        settings = with_settings(settings, {ACCUMULATION: asked // rows})
        return replace(self, rows=rows, settings=settings, invalid=self.invalid - {ACCUMULATION})

    def check(
        self, architecture: Architecture | None = None, world_size: int | None = None, rules: Iterable[Rule] = RULES
    ) -> list[Finding]:
        """Return all findings, with those of the rules, in the order of the file's lines."""
        loaded = self.for_world(world_size)
        return in_order([*loaded.findings, *loaded.check_rules(architecture, world_size, rules=rules)])

    def check_rules(
        self,
        architecture: Architecture | None = None,
        world_size: int | None = None,
        *,
        rules: Iterable[Rule] = RULES,
        leave_out: Collection[str] = (),
    ) -> list[Finding]:
        """Check the rules between settings; findings use the dialect's names.

        Args:
            leave_out: "group.name" of settings that are not checked.
        """
        invalid = self.invalid.union(leave_out)
        return check(
            *(self.settings, architecture, world_size),
            rules=rules,
            origins=self.places,
            invalid=invalid,
            written=self.written,
            phrase=self.phrased,
        )

    def phrased(self, finding: Finding) -> Finding:
        """Rewrite a finding with the dialect's names, or those that the user wrote."""
        what, why = (self.dialect.translate(text, self._typed, self.rows) for text in (finding.what, finding.why))
        return Finding(what, finding.where, why, self.advice(finding.fix))

    def placed(self, finding: Finding) -> Finding:
        """Return a finding that names a setting with the place where a user wrote it."""
        name = finding.where or finding.what.partition(":")[0]
        entry = next((each for path, each in self.entries.items() if all_settings()[path].name == name), None)
        if entry is None:
            return finding
        what = finding.what.removeprefix(f"{name}: ")
        is_named = entry.origin in ("flag", "override")  # by its place
        return replace(finding, where=entry.where, what=what if is_named else f"{entry.key}: {what}")

    def advice(self, text: str) -> str:
        """Rewrite a fix with the dialect's names."""
        return self.dialect.translate(text, self._typed, self.rows, is_fix=True)

    @property
    def _typed(self) -> dict[str, str]:
        return {path: entry.name for path, entry in self.entries.items() if entry.is_given}

    def require_valid(
        self, architecture: Architecture | None = None, world_size: int | None = None, rules: Iterable[Rule] = RULES
    ) -> Settings:
        """Return the settings if they are valid.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        if findings := self.check(architecture, world_size, rules):
            raise MegatuneError(findings, ExitCode.SETTINGS)
        return self.for_world(world_size).settings


def load(
    source: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Sequence[str] = (),
    dialect: Dialect = LLAMAFACTORY,
) -> Loaded:
    """Load settings. Flags override overrides, these the file; on a command line the last value counts.

    Args:
        source: path of a YAML file as the user typed it, which findings and origins show. None reads no file.
        overrides: `key=value` words, the value in YAML.
        flags: `--key value`, `--key=value`, or `--key` for true.
        dialect: whose keys are valid in addition to our own.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). All other problems are findings.
    """
    reading = _Reading(dialect=dialect)
    if source is not None:
        entries, findings = read_file(source)
        reading.findings += findings
        if findings and not entries:  # nothing of the file is known, so rules have nothing to check
            reading.refused.update(all_settings())
        reading.take(entries, last_wins=False)
    for entries, findings in (read_overrides(overrides), read_flags(flags)):
        reading.findings += findings
        reading.take(entries, last_wins=True)
    return reading.finish()


def load_entries(
    places: Iterable[Iterable[SettingEntry]], dialect: Dialect, findings: Iterable[Finding] = ()
) -> Loaded:
    """Build settings from entries that were already read.

    Args:
        places: entries of each place; later places override earlier ones, and later entries of the same place.
        findings: problems of reading them.
    """
    reading = _Reading([*findings], dialect=dialect)
    for entries in places:
        reading.take(entries, last_wins=True)
    return reading.finish()


def dump(settings: Settings, origins: Mapping[str, str]) -> str:
    """Write every setting as a line of YAML under our own name, with its origin as a comment.

    Secrets are left out.

    Args:
        origins: "group.name" -> "run.yaml:7", "override", "flag" or "default", which is that of missing ones.
    """
    lines: list[str] = []
    for path, info in all_settings().items():
        value = setting_value(settings, path)
        if f"# {info.group}" not in lines:
            lines += ["", f"# {info.group}"] if lines else [f"# {info.group}"]
        if Mark.SECRET not in info.marks:
            line = f"{info.name}: {shown(value, quoted=True)}"
            lines.append(f"{line:<{_ORIGIN_COLUMN}}  # {' '.join(origins.get(path, 'default').split())}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Reading(Builder):
    """Collects entries by what they set, and builds settings from them; `refused` has "group.name"."""

    dialect: Dialect = LLAMAFACTORY
    # "group.name", or the key of an entry that sets none -> the entry and the value.
    chosen: dict[str, tuple[SettingEntry, Any]] = field(default_factory=dict)
    yielding: dict[str, SettingEntry] = field(default_factory=dict)  # keys that set what no other key sets

    def take(self, entries: Iterable[SettingEntry], *, last_wins: bool) -> None:
        """Add the entries of one place; they override those of earlier places."""
        here: dict[str, tuple[SettingEntry, Any]] = {}
        for entry in entries:
            if not self.dialect.knows(entry.key):
                finding, meant = _unknown_key(entry, self.dialect)
                self.findings.append(finding)
                self.refused.update(meant)  # so that they are not also reported as missing
                continue
            row = self.dialect.row_of(entry.key)
            if row is not None and row.yields:
                self.yielding[entry.key] = entry
                continue
            sets = row.read(entry.value) if row is not None and row.paths else {}
            for target, value in (sets or {entry.key: entry.value.data}).items():
                first = None if last_wins else here.get(target)
                if first is None:
                    here[target] = (entry, value)
                elif first[0].key == entry.key or first[1] != value:
                    # Many files have two keys with the same meaning: packing and neat_packing.
                    what = f"{entry.key} sets the same setting as {first[0].key} at {first[0].where}"
                    fix = f"keep one of the two lines, preferably {first[0].key}"
                    self.findings.append(Finding(what, entry.where, fix=fix))
                    break
        self.chosen.update(here)

    def _yield(self) -> None:
        """Apply keys that only set what no other key sets, and report those."""
        for key, entry in self.yielding.items():
            row = self.dialect.rows[key]
            for target, value in (row.read(entry.value) or {key: entry.value.data}).items():
                taken = self.chosen.setdefault(target, (entry, value))[0]
                if target in all_settings() and value != all_settings()[target].default:
                    why = row.yields if taken is entry else f"{taken.key} says it"
                    self.ignored.setdefault(why, []).append(key)

    def finish(self) -> Loaded:
        self._yield()
        infos = all_settings()
        written: dict[str, dict[str, Written]] = {group: {} for group in GROUPS}
        secrets: dict[str, str] = {}
        for target, (entry, value) in self.chosen.items():
            row = self.dialect.row_of(entry.key)
            assert row is not None, "unknown keys were reported"
            read = entry.value.data if target not in infos else coerce(entry.value, infos[target])
            if not self.passes(entry, row, read, target):
                continue
            if target in marked(Mark.NAME) and is_long_name(value):
                why, fix = "file systems allow at most 255 bytes per name and 4095 per path", "write a shorter one"
                self.add(Finding(f"{entry.key} is {quoted(entry.value.data)}", entry.where, why, fix), target)
            elif target not in marked(Mark.NAME) and has_undecoded_bytes(value):
                why, fix = "only names and paths may have bytes that are not UTF-8", "write it as UTF-8"
                self.add(Finding(f"{entry.key} is {quoted(entry.value.data)}", entry.where, why, fix), target)
            elif target in marked(Mark.SECRET) and isinstance(value, str):
                secrets[target] = value
            elif target in infos:
                info = row.describe(target, self.dialect.version)
                written[info.group][info.name] = Written(entry, value, info, target)
            elif row.paths:
                self.wrong(Written(entry, value, row.describe(row.paths[0]), row.paths[0]))
        groups = {group: self.group(model, written[group]) for group, model in GROUPS.items()}
        entries = {path: entry for path, (entry, _) in self.chosen.items() if path in infos}
        settings, steps = Settings.model_validate(groups), entries.get(ACCUMULATION)
        if settings.model.model_name_or_path is None and settings.model.mcore_model is not None:
            # mcore_model alone also names the model.
            settings = with_settings(settings, {"model.model_name_or_path": settings.model.mcore_model})
        settings = _training_new_rows(settings)
        if steps is not None and _is_global_batch(steps, self.dialect):
            settings = with_settings(settings, {ACCUMULATION: infos[ACCUMULATION].default})
            self.refused.add(ACCUMULATION)
        invalid, findings = frozenset(self.refused & set(infos)), in_order(self.findings)
        return Loaded(settings, findings, invalid, entries, self.dialect, secrets=secrets, accepted=self.ignored)


def _training_new_rows(settings: Settings) -> Settings:
    """Return settings with trained embeddings if adapters are trained and tokens are added, as LLaMA-Factory does."""
    finetuning = settings.finetuning
    is_open = finetuning.finetuning_type == "lora" and not finetuning.additional_target
    if not (is_open and settings.model.adds_tokens) or finetuning.freeze_language_model:
        return settings
    whole = ["embed_tokens"] if settings.run.stage in ("rm", "cls") else ["embed_tokens", "lm_head"]
    return with_settings(settings, {"finetuning.additional_target": whole})


def _is_global_batch(entry: SettingEntry, dialect: Dialect) -> bool:
    row = dialect.row_of(entry.key)
    return row is not None and row.global_batch


def _unknown_key(entry: SettingEntry, dialect: Dialect) -> tuple[Finding, Collection[str]]:
    """Suggest the setting of an unknown key: another program's name of it, or a misspelt one of any dialect.

    Returns:
        The finding, and "group.name" of the most likely settings.
    """
    foreign, key = foreign_keys(), entry.key.lower().replace("-", "_")
    names = dict.fromkeys((*dialect.names, *foreign))
    close = nearest_names(key, names, cutoff=0.85) or [*nearest_names(key, names), *names_with(key, dialect.names)]
    # Among similar keys supported ones come first, and those of training.
    close.sort(key=lambda name: (dialect.refuses(name), "eval" in name and "eval" not in key))
    near = [key] if key in names else close[:1]
    sets: Collection[str] = ()
    if not near:
        fix = "remove it; `megatune explain --all` lists every setting"
    elif dialect.knows(near[0]):
        fix, row = f"did you mean {near[0]}?", dialect.row_of(near[0])
        sets = row.paths if row is not None else ()
    else:
        what, sets = foreign[near[0]]
        keys = " and ".join(dialect.prefix + dialect.key_of(path) for path in sets)
        said = f"{near[0]} is {what}" if near[0] == key else f"did you mean {near[0]}, {what}?"
        fix = f"{said}; write {keys}" if keys else said
    return Finding(f"unknown setting {entry.key!r}", entry.where, fix=fix), sets
