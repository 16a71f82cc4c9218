"""The roles of a run, each made of its part of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from megatune.architecture import Architecture
from megatune.config.dialects.roll_engine import check_engine, read_engine, sampled_model
from megatune.config.dialects.roll_ignored import ENGINE_KEYS
from megatune.config.dialects.roll_reader import Part, Reader, place_of
from megatune.config.dialects.roll_schema import SAMPLER
from megatune.config.dialects.roll_tree import Tree, data_of
from megatune.config.rl.settings import Generating, InferRole, ModelRole, RolloutPart
from megatune.config.settings import Settings
from megatune.errors import Finding

# Settings of a role's engine -> the model's numbers and its config.json; None and {} where they cannot be read.
ModelOf = Callable[[Settings], tuple[Architecture | None, Mapping[str, Any]]]

_ACTORS = ("ActorWorker", "ActorPGWorker", "InferWorker", "CriticWorker", "BaseWorker")
_NO_MODEL: tuple[Architecture | None, Mapping[str, Any]] = (None, {})


@dataclass(slots=True)
class Roles:
    """Makes roles.

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

    def model_role(self, part: Part, name: str, default_model: str | None, *, trains: bool) -> ModelRole | None:
        """Make a role with a model of our engine; None where its strategy is not one."""
        strategy = self._strategy(part, ("megatron_train",) if trains else ("megatron_infer", "hf_infer"), trains)
        self._worker_class(part)
        if strategy is None:
            return None
        if strategy == "hf_infer":
            part.inner["strategy_args"].trees.pop("strategy_config", None)
        loaded = read_engine(part, self.reader, trains=trains)
        devices = self._devices(part, name)
        settings = self._settings(loaded.settings, part, name, default_model, len(devices), trains)
        architecture, config = self._model(settings, part)
        if "experts.moe_aux_loss_coeff" not in loaded.entries and trains and architecture is not None:
            settings = self._with_aux_loss(settings, architecture, config)
        check_engine(loaded, settings, self.reader, architecture, len(devices))
        self._world(settings, part, devices)
        return self._micro_batches(
            ModelRole(
                name,
                devices,
                settings,
                strategy="hf" if strategy == "hf_infer" else "megatron",
                training=trains,
                infer_batch_size=part["infer_batch_size"],
                warmup_steps=int(settings.optimizer.warmup_steps),
                topr_positive_weight=part["topr_positive_weight"],
                topr_negative_weight=part["topr_negative_weight"],
                model_update_frequency=part["model_update_frequency"],
                system_envs=self._envs(part),
                opd_kl_coef=part["opd_kl_coef"],
                tag_included=tuple(part["tag_included"]),
                pg_variant=self._variant(part, name),
                router_replay=self._replays(part),
            ),
            part,
        )

    def infer_role(self, part: Part, name: str, default_model: str | None, generating: Generating) -> InferRole | None:
        """Make a role that samples; None where its strategy is none that does."""
        strategy = self._strategy(part, ("vllm", "sglang", "hf_infer", "builtin"), False)
        self._worker_class(part)
        if strategy is None:
            return None
        for key in part.trees.get("training_args", {}):
            self.reader.ignore(f"{part.name}.training_args.{key}", f"{part.name} does not train")
        settings = sampled_model(part, self.reader).settings
        devices, model = self._devices(part, name), settings.model.model_name_or_path or default_model
        if model is None:
            self._no_model(part, name)
        tree = part.inner["strategy_args"].trees.get("strategy_config", {})
        ours = {key: node for key, node in tree.items() if key in SAMPLER.names}
        own = self.reader.read(ours, SAMPLER, f"{part.name}.strategy_args.strategy_config")
        config = {key: data_of(node) for key, node in tree.items() if key not in SAMPLER.names}
        engine = cast(Literal["builtin", "vllm", "sglang"], strategy.replace("hf_infer", "builtin"))
        if engine == "builtin":
            self._unused(tree, part, strategy)
            config = {}
        each = 1 if engine == "builtin" else self._per_engine(engine, config, part, tree)
        if devices and len(devices) % each:
            what = f"{name} has {len(devices)} devices, and one engine takes {each}"
            fix = f"write a device_mapping of a multiple of {each} devices, or engines of fewer devices"
            self.reader.find(what, part.where("device_mapping"), "engines are all alike", fix)
        if part["num_gpus_per_worker"] != each and "num_gpus_per_worker" in part.places:
            why = f"an engine of {engine} takes {each} device{'s' if each > 1 else ''}"
            self.reader.ignore(f"{part.name}.num_gpus_per_worker", why)
        self._lengths(engine, config, part, tree)
        return InferRole(
            devices,
            model or "",
            engine,
            dtype="fp16" if settings.precision.fp16 else "bf16" if settings.precision.bf16 else "fp32",
            devices_per_engine=each,
            generating=generating,
            config=config,
            py_executable=own["py_executable"],
            system_envs=self._envs(part),
            sleep_level=own["sleep_level"],
            infer_batch_size=part["infer_batch_size"],
            name=name,
        )

    def generating(self, part: Part, max_new_tokens: int, responses: int | None = None) -> Generating:
        """Make what a part says of sampling."""
        keys = part.inner["generating_args"]
        return Generating(
            temperature=keys["temperature"],
            top_p=keys["top_p"],
            top_k=max(0, keys["top_k"]),
            max_new_tokens=max_new_tokens,
            num_return_sequences=responses or keys["num_return_sequences"],
            repetition_penalty=keys["repetition_penalty"],
            stop_strings=tuple(keys["stop_strings"]),
            do_sample=keys["do_sample"] and keys["temperature"] > 0,
        )

    def _strategy(self, part: Part, valid: tuple[str, ...], trains: bool) -> str | None:
        strategy = part.inner["strategy_args"]
        name: str | None = strategy["strategy_name"]
        if name in valid:
            return name
        if name is not None:
            what = f"{strategy.key('strategy_name')} is {name}"
            why = f"{part.name} {'trains' if trains else 'does not train'}: expected {' or '.join(valid)}"
            self.reader.find(what, strategy.where("strategy_name"), why, f"write strategy_name: {valid[0]}")
        elif not any(finding.what.startswith(strategy.key("strategy_name")) for finding in self.reader.findings):
            what, fix = (
                f"{part.name} has no strategy_args.strategy_name",
                f"write strategy_args: {{strategy_name: {valid[0]}}}",
            )
            self.reader.find(what, part.at, f"it says what computes {part.name}", fix)
        return None

    def _settings(
        self, settings: Settings, part: Part, name: str, default_model: str | None, world_size: int, trains: bool
    ) -> Settings:
        """Return the settings of an engine with what other keys of the file say."""
        model = settings.model
        if model.model_name_or_path is None:
            if default_model is None:
                self._no_model(part, name)
            model = model.model_copy(update={"model_name_or_path": default_model})
        run = settings.run.model_copy(
            update={
                "stage": "rm" if name == "critic" else "sft",
                "output_dir": self.top["output_dir"],
                "seed": self.top["seed"],
                "num_processes": max(1, world_size),
                "ddp_timeout": max(1, round(part["backend_timeout"] * 60)),
            }
        )
        parallel = settings.parallel
        if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
            self.reader.ignore(f"{part.name}.sequence_parallel", "tensor_model_parallel_size is 1")
            parallel = parallel.model_copy(update={"sequence_parallel": False})
        batch = settings.batch.model_copy(update={"per_device_eval_batch_size": part["infer_batch_size"]})
        if not trains:
            steps = settings.parallel.pipeline_model_parallel_size
            batch = batch.model_copy(
                update={"per_device_train_batch_size": part["infer_batch_size"], "gradient_accumulation_steps": steps}
            )
        data = settings.data.model_copy(
            update={"cutoff_len": max(2, self.lengths.sequence_length), "packing": part["use_sequence_packing"]}
        )
        optimizer = settings.optimizer.model_copy(update={"max_grad_norm": self.top["max_grad_norm"]} if trains else {})
        if optimizer.lr_scheduler_type == "constant" and (optimizer.warmup_steps or optimizer.warmup_ratio):
            self.reader.lines.append(
                f"{part.name}: lr_scheduler_type constant with a warm-up is constant_with_warmup, as in ROLL's Megatron"
            )
            optimizer = optimizer.model_copy(update={"lr_scheduler_type": "constant_with_warmup"})
        return settings.model_copy(
            update={
                "model": model,
                "run": run,
                "batch": batch,
                "data": data,
                "optimizer": optimizer,
                "parallel": parallel,
            }
        )

    def _model(self, settings: Settings, part: Part) -> tuple[Architecture | None, Mapping[str, Any]]:
        if self.model_of is None or not settings.model.model_name_or_path:
            return _NO_MODEL
        return self.model_of(settings)

    def _with_aux_loss(self, settings: Settings, architecture: Architecture, config: Mapping[str, Any]) -> Settings:
        """Take the weight of the balancing loss from config.json, as ROLL does."""
        text = config.get("text_config")
        found = (text if isinstance(text, Mapping) else config).get("router_aux_loss_coef")
        if architecture.moe is None or not isinstance(found, int | float) or not found:
            return settings
        self.reader.lines.append(f"moe_aux_loss_coeff {found:g}: router_aux_loss_coef of config.json, as in ROLL")
        experts = settings.experts.model_copy(update={"moe_aux_loss_coeff": float(found)})
        return settings.model_copy(update={"experts": experts})

    def _devices(self, part: Part, name: str) -> tuple[int, ...]:
        devices = tuple(part["device_mapping"])
        self.places[name] = part.where("device_mapping")
        if not devices and not self._has_device_finding(part):
            fix = "write device_mapping: list(range(0,8))"
            self.reader.find(f"{part.name} has no device_mapping", part.at, "a model needs devices", fix)
        return devices

    def _has_device_finding(self, part: Part) -> bool:
        return any(finding.what.startswith(part.key("device_mapping ")) for finding in self.reader.findings)

    def _world(self, settings: Settings, part: Part, devices: tuple[int, ...]) -> None:
        parallel = settings.parallel
        for size, what, why in (
            (
                parallel.model_parallel_size,
                "one copy of the model",
                "tensor_model_parallel_size × pipeline_model_parallel_size × context_parallel_size",
            ),
            (
                parallel.expert_parallel_size,
                "one copy of the experts",
                "expert_tensor_parallel_size × expert_model_parallel_size × pipeline_model_parallel_size",
            ),
        ):
            if devices and len(devices) % size:
                text = f"{part.name} has {len(devices)} devices, not a multiple of the {size} that {what} takes"
                fix = f"write a device_mapping of a multiple of {parallel.smallest_world} devices, or another layout"
                self.reader.find(text, part.where("device_mapping"), f"{why} is {size}", fix)
                return

    def _micro_batches(self, role: ModelRole, part: Part) -> ModelRole:
        """Return the role with how its samples become micro-batches."""
        packing, longest = part.inner["sequence_packing_args"], self.lengths.sequence_length
        if part["use_sequence_packing"]:
            if part["use_dynamic_batching_in_train"] or part["use_dynamic_batching_in_infer"]:
                fix = "remove use_dynamic_batching_in_train and use_dynamic_batching_in_infer"
                where = part.where("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer")
                self.reader.find(f"{part.name} has use_sequence_packing and dynamic batching", where, "", fix)
            lengths = {}
            rows = {"train": role.settings.batch.per_device_train_batch_size, "forward": role.infer_batch_size}
            for phase, count in rows.items():
                key = f"max_packed_sequence_length_{phase}"
                lengths[phase] = packing[key] or max(1, count) * longest
                self._long_enough(packing, key, lengths[phase])
            return replace(
                role,
                packed_tokens_train=lengths["train"],
                packed_tokens_forward=lengths["forward"],
                packed_balanced=packing["algorithm"] == "load_balance",
                min_micro_batches_train=packing["min_num_micro_batches_train"],
                min_micro_batches_forward=packing["min_num_micro_batches_forward"],
            )
        tokens: dict[str, int | None] = {"train": None, "infer": None}
        for phase in tokens:
            key = f"max_tokens_per_microbatch_in_{phase}"
            if part[f"use_dynamic_batching_in_{phase}"]:
                if not part[key]:
                    fix = f"write {key}: {2 * longest}"
                    where = part.where(f"use_dynamic_batching_in_{phase}")
                    self.reader.find(f"{part.name} has use_dynamic_batching_in_{phase} without {key}", where, fix=fix)
                else:
                    self._long_enough(part, key, part[key])
                    tokens[phase] = part[key]
        return replace(role, dynamic_tokens_train=tokens["train"], dynamic_tokens_forward=tokens["infer"])

    def _long_enough(self, part: Part, key: str, tokens: int) -> None:
        longest = self.lengths.sequence_length
        if tokens < longest:
            what = f"{part.key(key)} {tokens} is less than sequence_length {longest}"
            self.reader.find(what, part.where(key), "the longest sample would fit nowhere", f"write {key}: {longest}")

    def _variant(self, part: Part, name: str) -> Any:
        is_pg = (part["worker_cls"] or "").endswith("ActorPGWorker")
        if part["pg_variant"] and not is_pg and name == "actor_train":
            self.reader.ignore(part.key("pg_variant"), "it takes effect with worker_cls of ActorPGWorker, as in ROLL")
        return (part["pg_variant"] or "vanilla") if is_pg else None

    def _replays(self, part: Part) -> bool:
        replay = part.inner["router_replay"]
        if replay["mode"] == "R2":
            why = "the trainer's forward pass before its updates chooses the same experts as training does, at once"
            self.reader.find(f"{replay.key('mode')} is R2", replay.where("mode"), why, "write mode: R3, or disable")
        return replay["mode"] == "R3"

    def _worker_class(self, part: Part) -> None:
        path = part["worker_cls"]
        if path and not part.name.startswith("rewards.") and path.rpartition(".")[2] not in _ACTORS:
            fix = "remove worker_cls"
            self.reader.find(f"{part.name}.worker_cls is {path}", part.where("worker_cls"), "roles are built in", fix)

    def _per_engine(self, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> int:
        """Return the devices of one engine."""
        if config.get("data_parallel_size", 1) not in (1, None):
            why = "engines beside each other follow from device_mapping"
            where = place_of(tree["data_parallel_size"])
            self.reader.find(f"{part.name}: data_parallel_size above 1", where, why, "remove data_parallel_size")
        sizes = []
        for key, default in (
            ("tensor_parallel_size", part["num_gpus_per_worker"] if engine == "sglang" else 1),
            ("pipeline_parallel_size", 1),
        ):
            size = config.get(key, default)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                fix = f"write {key}: 1"
                self.reader.find(f"{part.name}: {key} is {size}", place_of(tree[key]), "expected a whole number", fix)
                size = 1
            sizes.append(size)
        if engine == "sglang":
            if "mem_fraction_static" not in config:
                fix = "write mem_fraction_static: 0.8 in strategy_config"
                self.reader.find(f"{part.name} has no mem_fraction_static", part.at, "ROLL requires it of sglang", fix)
            if config.pop("grpc_mode", None):
                where = place_of(tree["grpc_mode"])
                self.reader.find(f"{part.name}: grpc_mode is true", where, "ROLL refuses it, too", "remove grpc_mode")
        return sizes[0] * sizes[1]

    def _unused(self, tree: Tree, part: Part, strategy: str) -> None:
        for key, node in tree.items():
            if key in SAMPLER.names or key in ENGINE_KEYS:
                self.reader.ignore(f"{part.name}.strategy_args.strategy_config.{key}", f"strategy_name is {strategy}")
            else:
                dotted = f"{part.name}.strategy_args.strategy_config.{key}"
                self.reader.unknown(key, sorted(ENGINE_KEYS), dotted, place_of(node))

    def _lengths(self, engine: str, config: dict[str, Any], part: Part, tree: Tree) -> None:
        key = {"vllm": "max_model_len", "sglang": "context_length"}.get(engine, "")
        if part.name not in ("actor_infer", "student_infer") or not isinstance(config.get(key), int):
            return
        longest = max(self.lengths.sequence_length, self.lengths.val_sequence_length or 0)
        if config[key] <= self.lengths.prompt_length:
            what = f"{part.name}: {key} {config[key]} leaves no token beside prompt_length {self.lengths.prompt_length}"
            self.reader.find(what, place_of(tree[key]), "responses would be empty", f"write {key}: {longest}")
        elif config[key] < longest:
            said = f"{part.name}: {key} {config[key]} is less than sequence_length {longest}"
            self.reader.lines.append(f"{said}: longer responses are cut there")

    def _envs(self, part: Part) -> dict[str, str]:
        top = environment(self.top["system_envs"])
        return {**top, **environment(part["system_envs"])}

    def _no_model(self, part: Part, name: str) -> None:
        key = "reward_pretrain" if name == "critic" else "pretrain"
        fix = f"write {key}: MODEL at the top level, or model_args: {{model_name_or_path: MODEL}} of {part.name}"
        self.reader.find(f"{part.name} has no model", part.at, fix=fix)


def environment(values: Mapping[str, Any]) -> dict[str, str]:
    """Write values as variables of the environment have them."""
    return {str(key): str(value) for key, value in values.items() if value is not None}


def sorted_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return findings in the order of the file's lines; those of a command line come after them."""

    def line(finding: Finding) -> float:
        _, colon, number = finding.where.rpartition(":")
        return int(number) if colon and number.isdigit() else 1e9 if finding.where else 2e9

    return tuple(sorted(findings, key=line))
