"""The files of LLaMA-Factory's folder `examples`, as settings: see config/llamafactory_examples.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatune.config.dialects.dialect import table
from megatune.config.load import load
from megatune.errors import Finding

FACTS = Path(__file__).parent / "config" / "llamafactory_examples.yaml"


@dataclass(frozen=True)
class Example:
    """One file: what it says, and what becomes of it."""

    name: str
    verb: str
    keys: dict[str, Any]
    family: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @property
    def processes(self) -> int:
        sizes = ("tensor", "pipeline", "expert")
        found = [self.keys.get(f"{name}_model_parallel_size", 1) for name in sizes]
        return int(found[0] * found[1] * found[2])

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write it as a file; keys that are None are left out."""
        keys = {key: value for key, value in (self.keys | changes).items() if value is not None}
        path = folder / Path(self.name).with_suffix(".yaml").name
        path.write_text(yaml.safe_dump(keys, allow_unicode=True))
        return path


def examples() -> list[Example]:
    """Read the facts."""
    facts = yaml.load(FACTS.read_text(encoding="utf-8"), yaml.CSafeLoader)
    found = []
    for name, example in facts["files"].items():
        usual = facts["usual"] if example.pop("usual", False) else {}
        without = example.pop("without", ())
        keys = {key: value for key, value in usual.items() if key not in without} | example.pop("keys")
        found.append(Example(name, keys=keys, **example))
    return found


def refused_keys(findings: list[Finding]) -> set[str]:
    """Which keys are refused by name."""
    known = {key for key, row in table("llamafactory").items() if row.unsupported}
    return {word for each in findings if (word := each.what.split(":")[0].split(" ")[0]) in known} | {
        "mixed_precision" for each in findings if each.what.startswith("mixed_precision is")
    }


def findings_of(path: Path, processes: int) -> list[Finding]:
    """Everything that is wrong with a file before its model and data are looked at."""
    return load(path).check(world_size=processes)
