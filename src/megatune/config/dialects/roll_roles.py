"""What roles of both kinds have in common: devices, a strategy, variables, and how findings speak of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatune.architecture import Architecture
from megatune.config.dialects.roll_reader import Part, Reader
from megatune.config.rl.settings import RolloutPart
from megatune.config.settings import Settings
from megatune.config.values import is_variable

# Settings of a role's engine -> the model's numbers; None where they cannot be read.
ModelOf = Callable[[Settings], Architecture | None]

_ACTORS = ("ActorWorker", "ActorPGWorker", "InferWorker", "CriticWorker", "BaseWorker")


@dataclass(slots=True)
class Roles:
    """What roles are made with.

    Attributes:
        top: the keys of the top level.
        lengths: of prompts and responses, as far as they are valid.
        places: "actor_train.device_mapping" -> where it was written, for what is checked between roles.
    """

    reader: Reader
    top: Part
    lengths: RolloutPart
    model_of: ModelOf | None = None
    places: dict[str, str] = field(default_factory=dict)

    def strategy(self, part: Part, valid: tuple[str, ...], trains: bool) -> str | None:
        strategy = part.inner["strategy_args"]
        name: str | None = strategy["strategy_name"]
        if name in valid:
            return name
        if name is not None:
            what = f"{strategy.key('strategy_name')} is {name}"
            why = f"{part.name} {'trains' if trains else 'does not train'}: expected {' or '.join(valid)}"
            self.reader.find(what, strategy.where("strategy_name"), why, f"write strategy_name: {valid[0]}")
        elif not self.reader.has_refused(strategy.key("strategy_name")):
            what, fix = (
                f"{part.name} has no strategy_args.strategy_name",
                f"write strategy_args: {{strategy_name: {valid[0]}}}",
            )
            self.reader.find(what, part.at, f"it says what computes {part.name}", fix)
        return None

    def devices(self, part: Part, name: str) -> tuple[int, ...]:
        devices = tuple(part["device_mapping"])
        self.places[name] = part.where("device_mapping")
        if not devices and not self.reader.has_refused(part.key("device_mapping")):
            fix = "write device_mapping: list(range(0,8))"
            self.reader.find(f"{part.name} has no device_mapping", part.at, "a model needs devices", fix)
        return devices

    def check_class(self, part: Part) -> None:
        path = part["worker_cls"]
        if path and not part.name.startswith("rewards.") and path.rpartition(".")[2] not in _ACTORS:
            fix = "remove worker_cls"
            self.reader.find(f"{part.name}.worker_cls is {path}", part.where("worker_cls"), "roles are built in", fix)

    def leave_out(self, part: Part, sections: tuple[str, ...], *, generates: bool = False) -> None:
        """Say which mappings of a role nobody reads."""
        for name in (*sections, *(() if generates else ("generating_args",))):
            if name in part.places:
                why = "prompts are made with actor_train's" if name == "data_args" else f"{part.name} samples nothing"
                self.reader.ignore(part.key(name), why)

    def environment_of(self, part: Part) -> dict[str, str]:
        return {**environment(self.top, self.reader), **environment(part, self.reader)}

    def no_model(self, part: Part, name: str) -> None:
        key = {"critic": "reward_pretrain", "actor_train": "pretrain", "actor_infer": "pretrain"}.get(name, "")
        key = "pretrain" if name == "reference" else key
        fix = f"write model_args: {{model_name_or_path: MODEL}} in {part.name}"
        fix += f", or {key}: MODEL at the top level" if key else ""
        self.reader.find(f"{part.name} has no model", part.at, fix=fix)


def environment(part: Part, reader: Reader) -> dict[str, str]:
    """Write a part's system_envs as variables of the environment have them."""
    said = {str(key): str(value) for key, value in part["system_envs"].items() if value is not None}
    for name in said:
        if not is_variable(name):
            what, fix = f"{part.key('system_envs')}: {name!r} is no name of a variable", "write NAME: value"
            reader.find(what, part.where("system_envs"), fix=fix)
    return said
