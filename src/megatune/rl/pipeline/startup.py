"""Starts the roles of a run, fetches and loads their models, and chooses the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatune.config.derived import resolve_finetuning
from megatune.config.rl.settings import InferRole, ModelRole, RLSettings, SentAdapter
from megatune.config.settings import Settings, with_settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.families.adapters import is_standard_lora
from megatune.families.peft_form import adapter_config, trained_tensors
from megatune.generation.inputs import check_writes, find_model
from megatune.generation.vllm import lora_arguments
from megatune.hub.models import is_hub_id, open_model
from megatune.rl.cluster.cluster import Cluster
from megatune.rl.cluster.role import RoleSpec
from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup
from megatune.rl.rewards.judge_client import judge_context
from megatune.training.source import RunModel
from megatune.training.storage.store import checkpoint_step, list_checkpoints

# Worker classes by role name; all roles that are not trained have the same.
_WORKERS = {
    "actor_train": "megatune.rl.worker.policy:PolicyWorker",
    "critic": "megatune.rl.worker.training:ValueWorker",
}
_FROZEN = "megatune.rl.worker.model:ReferenceWorker"
_DISTILLED = "megatune.rl.worker.distillation:DistillationWorker"  # for a role with a teacher


@dataclass(frozen=True, slots=True)
class Roles:
    """The actors of a run, by role name; an evaluation has no other models than reward models.

    Attributes:
        engines: of the policy.
    """

    engines: EngineGroup
    judges: Mapping[str, EngineGroup]
    models: Mapping[str, ModelGroup]

    @property
    def scheduler(self) -> DeviceScheduler:
        """A new scheduler of the devices of these roles."""
        return DeviceScheduler(self.engines, list(self.models.values()), list(self.judges.values()))

    def close(self) -> None:
        """Let all engines end their subprocesses."""
        for engines in (self.engines, *self.judges.values()):
            engines.close()


def with_folders(settings: RLSettings) -> tuple[RLSettings, Path]:
    """Fetch models from hubs, and return the settings with local model folders and output folders, and the policy's
    model folder.

    Raises:
        MegatuneError: INPUT, or the error of a hub.
    """

    output, actor = Path(settings.run.output_dir), settings.actor_train
    for role in settings.models:
        settings = settings.with_role(_with_folder(role, output if role is actor else output / role.name))
    source = str(settings.actor_train.settings.model.model_name_or_path)
    infer = settings.actor_infer
    if infer.model_name_or_path == actor.settings.model.model_name_or_path:
        settings = settings.with_role(infer.model_copy(update={"model_name_or_path": source}))
    for sampler in settings.samplers:
        settings = settings.with_role(_sampled(sampler, gets_weights=sampler is settings.actor_infer))
    return _with_adapter(settings, Path(source)), Path(source)


def _with_folder(role: ModelRole, output: Path) -> ModelRole:
    """Return a role with model and output folders for itself and its teacher."""
    teacher = None if role.teacher is None else _fetched(role.teacher, output / "teacher")
    return role.model_copy(update={"settings": _fetched(role.settings, output), "teacher": teacher})


def _fetched(engine: Settings, output: Path) -> Settings:
    """Return settings with a local model folder and an output folder."""
    model, asked = RunModel(engine, asks=True), engine.model.model_name_or_path
    assert asked is not None, "refused by the settings' checks"
    model.config_dir(asked)
    changes = {"model.model_name_or_path": model.fetch() or asked, "run.output_dir": str(output)}
    return with_settings(model.settings, changes)


def _with_adapter(settings: RLSettings, source: Path) -> RLSettings:
    """Configure engines that support adapters to load the base themselves and receive only the trained adapter.

    vLLM supports low-rank adapters of linear layers; all other adapters are merged into the weights that are sent.
    """
    role, selection = settings.actor_infer, settings.actor_train.settings.finetuning
    continues = len(selection.adapter_name_or_path or ()) > 1 or selection.create_new_adapter
    if role.engine != "vllm" or selection.finetuning_type != "lora" or continues:
        return settings
    architecture = load_architecture(source, settings.actor_train.settings.run.stage)
    selection = resolve_finetuning(selection, architecture)
    if not is_standard_lora(architecture, selection) or role.model_name_or_path != str(source):
        return settings
    shapes = {place.name: place.shape for _, place in trained_tensors(architecture, selection)}
    adapter = SentAdapter(adapter_config(architecture, selection, str(source)), shapes)
    config = {**role.config, "load_format": "auto", **lora_arguments(selection.lora_rank)}
    return settings.with_role(role.model_copy(update={"adapter": adapter, "config": config}))


def evaluation_settings(settings: RLSettings, model: Path) -> RLSettings:
    """Return the settings with engines that sample from `model`, and local folders of judges and reward models."""
    # The model may have no experts, and nothing replays them.
    infer = settings.actor_infer.model_copy(update={"model_name_or_path": str(model), "return_routing": False})
    settings = settings.with_role(infer)
    for role in settings.scorers.values():
        settings = settings.with_role(_with_folder(role, Path(settings.run.output_dir) / role.name))
    for sampler in settings.samplers:
        settings = settings.with_role(_sampled(sampler, gets_weights=False))
    return settings


def _sampled(role: InferRole, *, gets_weights: bool) -> InferRole:
    """Return a role with a local model folder; it loads its weights itself unless it gets them in updates.

    Raises:
        MegatuneError: INPUT, if it is a reward model, which cannot generate text.
    """
    name = role.model_name_or_path
    folder = str(open_model(name).fetch()) if is_hub_id(name) else name
    is_judge = role.name != "actor_infer"
    check_writes(find_model(Path(folder)), fix="write worker_cls: reward_model in rewards.DOMAIN" if is_judge else None)
    loads = {} if gets_weights or role.engine == "builtin" else {"load_format": "auto"}
    return role.model_copy(update={"model_name_or_path": folder, "config": {**role.config, **loads}})


def start_roles(cluster: Cluster, settings: RLSettings, *, evaluates: bool = False) -> Roles:
    """Start all actors; for an evaluation, of the models only the reward models.

    Raises:
        MegatuneError: see `Cluster.start`.
    """
    infer, most = settings.actor_infer, settings.rollout.max_running_requests
    models = list(settings.scorers.values()) if evaluates else settings.models
    specs = [_model_spec(settings, role) for role in models]
    found = cluster.start([*specs, *(_engine_spec(settings, role) for role in settings.samplers)])
    level = 1 if evaluates else settings.sleep_level
    return Roles(
        EngineGroup(infer, found[infer.name], most, level, static_weights=evaluates),
        {
            role.name: EngineGroup(role, found[role.name], role.infer_batch_size, static_weights=True)
            for role in settings.samplers[1:]
        },
        {role.name: ModelGroup(role, found[role.name]) for role in models},
    )


def _model_spec(settings: RLSettings, role: ModelRole) -> RoleSpec:
    return RoleSpec(
        name=role.name,
        target=_WORKERS.get(role.name, _FROZEN) if role.teacher is None else _DISTILLED,
        arguments={"settings": settings, "role": role},
        devices=role.devices,
        rendezvous=True,
        environment={**settings.run.system_envs, **role.system_envs},
    )


def _engine_spec(settings: RLSettings, role: InferRole) -> RoleSpec:
    rollout = settings.rollout
    is_judge = role is not settings.actor_infer
    return RoleSpec(
        name=role.name,
        target="megatune.rl.rollout.server:engine_server",
        arguments={
            "role": role,
            "seed": settings.run.seed,
            "max_running": role.infer_batch_size if is_judge else rollout.max_running_requests,
            "length": judge_context(rollout, role) if is_judge else rollout.longest_sequence,
        },
        devices=role.devices,
        devices_per_actor=role.devices_per_engine,
        is_server=True,
        restarts=settings.run.max_engine_restarts,
        environment={**settings.run.system_envs, **role.system_envs},
        py_executable=role.py_executable,
    )


def load_roles(roles: Roles, scheduler: DeviceScheduler, settings: RLSettings) -> tuple[Path | None, list[str]]:
    """Initialize the process groups, choose the checkpoint to resume from, and load all models.

    Returns:
        The checkpoint, and lines for the user.

    Raises:
        MegatuneError: INPUT, SETTINGS: a model or checkpoint cannot be used; CANNOT_WRITE, if the folder has another
            run.
    """
    policy, critic = roles.models["actor_train"], roles.models.get("critic")
    for joining in [model.group.start("join") for model in roles.models.values()]:
        joining.result()
    asked = settings.run.resume_from_checkpoint
    # `true` resumes if there is a checkpoint, and otherwise starts from the beginning.
    chosen, notes = policy.group.call("find_checkpoint", None if asked is True else asked)[0]
    checkpoint = None if chosen is None else Path(chosen)
    _refuse_later(settings, checkpoint)
    scheduler.load(policy, chosen)
    if critic is not None:
        wanted = False if checkpoint is None else str(checkpoint.parent / "critic" / checkpoint.name)
        found, more = critic.group.call("find_checkpoint", wanted)[0]
        notes = [*notes, *more]
        scheduler.load(critic, found)
    for model in roles.models.values():
        if model.info is None:
            scheduler.load(model)
    return checkpoint, notes


def check_resume(settings: RLSettings) -> None:
    """Refuse a missing checkpoint, or an output folder with later checkpoints, before anything is started.

    Raises:
        MegatuneError: INPUT, CANNOT_WRITE.
    """
    asked = settings.run.resume_from_checkpoint
    if isinstance(asked, str) and not Path(asked).is_dir():
        fix = "name a folder checkpoint-N, or write true for the newest one in output_dir"
        raise MegatuneError(Finding(f"resume_from_checkpoint: no folder {asked!r}", fix=fix), ExitCode.INPUT)
    if asked is False:
        _refuse_later(settings, None)


def _refuse_later(settings: RLSettings, resumed: Path | None) -> None:
    """Refuse an output folder with checkpoints after the step at which the run begins. An automatic resume skips only
    damaged checkpoints, which the run will replace."""
    output_dir = Path(settings.run.output_dir)
    if resumed is not None and settings.run.resume_from_checkpoint is True:
        return
    step = 0 if resumed is None else checkpoint_step(resumed) or 0
    if resumed is not None and resumed.parent.resolve() != output_dir.resolve():
        step = 0
    beyond = [path.name for path in list_checkpoints(output_dir) if (checkpoint_step(path) or 0) > step]
    if beyond:
        what = f"{output_dir} has {', '.join(beyond[-3:])} of an earlier run"
        why = f"this run begins at step {step}, and the next resume could not distinguish them from this run's"
        fix = "write resume_from_checkpoint: true to continue that run, or another output_dir to keep it"
        raise MegatuneError(Finding(what, "output_dir", why, fix), ExitCode.CANNOT_WRITE)
