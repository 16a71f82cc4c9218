"""Builds the keys of an RL file from a command line of Megatron-SWIFT: the roles, with devices, engines and rewards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatune.config.dialects.dialect import read_part, table
from megatune.config.dialects.roll_roles import LORA_KEYS, QUANTIZATION_KEYS
from megatune.config.dialects.roll_tree import Reading
from megatune.config.dialects.swift import SwiftRun
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded
from megatune.config.rl.settings import REWARD_MODEL
from megatune.config.rules.rule import divisors
from megatune.config.settings import is_default, setting_value
from megatune.config.values import is_number, parse, shown

_OF_ROLES = ("parallel", "experts", "performance", "precision")
# Settings that have other keys, or belong to the whole run.
_NOT_OF_ROLES = ("precision.bf16", "precision.fp16", "optimizer.max_steps", "optimizer.num_train_epochs")
_OF_REWARDS = ("cosine", "repetition_n", "repetition_max", "soft")


@dataclass(slots=True)
class Keys:
    """The keys of the RL file under construction.

    Attributes:
        devices: number of training processes; the engines time-share the same devices.
        used: "group.name" of settings, and flags, that were translated.
    """

    run: SwiftRun
    loaded: Loaded
    devices: int
    reading: Reading = field(default_factory=Reading)
    used: set[str] = field(default_factory=set)

    @property
    def stage(self) -> str:
        """grpo or gkd."""
        return self.run.command.stage

    @property
    def has_vision(self) -> bool:
        """Whether the model has a vision encoder."""
        return "vision_config" in self.run.command.config

    def value(self, flag: str) -> Any:
        """Return the value of a flag of grpo or gkd, or its default."""
        entry = self.run.command.rollouts.get(flag)
        if entry is not None and entry.value.data is not None:
            return entry.value.data
        row = table("swift")[flag]
        return row.passes[0] if row.passes else None

    def choice(self, flag: str) -> Any:
        """Return ROLL's value for that of a flag; one that the table does not list is refused, and the default used."""
        row = table("swift")[flag]
        if self.value(flag) not in row.values:
            *others, last = (str(value) for value in row.values if value is not None)
            valid = f"{', '.join(others)} or {last}" if others else last
            self.refuse(flag, row.reason, f"write --{flag} {valid}")
            del self.run.command.rollouts[flag]
        return row.values[self.value(flag)]

    def written(self, key: str) -> Any:
        """Return the value of a top-level key that was put; None if it was not."""
        return self.reading.data.get(key)

    def setting(self, path: str) -> Any:
        self.used.add(path)
        return setting_value(self.loaded.settings, path)

    def put(self, dotted: str, value: Any, *flags: str) -> None:
        """Write a key.

        Args:
            flags: sources: flags of grpo or gkd, or "group.name" of settings. The first that was typed is its place.
        """
        command = self.run.command
        self.used.update(flags)
        typed = (command.rollouts.get(flag) or self.loaded.entries.get(flag) for flag in flags)
        entry = next(filter(None, typed), None)
        where = entry.where if entry is not None else command.default_origin
        if entry is not None and flags[0] in command.rollouts:
            command.whys.setdefault(where, f"{dotted.rpartition('.')[2]}: {shown(value)}")
        origin = entry.origin if entry is not None else command.default_origin
        self.reading.put(dotted.split("."), value, where, origin)

    def role(self, name: str) -> None:
        """Write the devices of a role, which are all devices, and the dtype of its model."""
        precision = self.loaded.settings.precision
        dtype = "fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32"
        self.put(f"{name}.device_mapping", [*range(self.devices)], "run.num_processes")
        self.put(f"{name}.model_args.dtype", dtype, "precision.bf16", "precision.fp16")

    def refuse(self, flag: str, why: str, fix: str, value: Any = None) -> None:
        """Report that a flag's value, or `value` which follows from other flags, is not supported."""
        entry = self.run.command.rollouts.get(flag)
        where = f"--{flag}" if entry is None else entry.where
        self.reading.report(f"{flag}: {shown(value or self.value(flag))} is not supported", where, why, fix)

    def refuse_others(self) -> None:
        """Refuse settings that were not translated and whose effect users would miss."""
        typed = {entry.where: entry for entry in self.run.command.typed.values()}
        for entry, is_missed in self._others():
            if is_missed:
                entry = typed.get(entry.where, entry)  # it may set something with another name
                what = f"{entry.key}: {shown(entry.value.data)} is not supported"
                self.reading.report(
                    what, entry.where, f"{self.stage} does not support it here", f"remove {entry.where}"
                )

    def note_others(self) -> None:
        """Note which flags have no effect."""
        whys = self.run.command.whys
        for flag, entry in self.run.command.rollouts.items():
            whys.setdefault(entry.where, f"ignored: {table('swift')[flag].idle or 'it has no effect in this run'}")
        for entry, is_missed in self._others():
            if not is_missed:
                whys[entry.where] = f"it has no effect with {self.stage}"

    def _others(self) -> Iterator[tuple[SettingEntry, bool]]:
        """Yield typed settings that were not translated, and whether users would miss their effect."""
        entries, settings, of_roles = self.loaded.entries, self.loaded.settings, (*_OF_ROLES, "optimizer", "recompute")
        harmless, missed = (read_part("swift", "grpo")[part] for part in ("harmless", "missed"))
        places = {entries[path].where for path in self.used if path in entries}
        for path, entry in entries.items():
            group = path.partition(".")[0]
            is_changed = not (entry.where.startswith(self.run.command.default_origin) or is_default(settings, path))
            if is_changed and group not in of_roles and entry.where not in places:
                is_of_model = group in ("finetuning", "model", "data") and path not in harmless
                yield entry, is_of_model or path in missed


def write_roles(keys: Keys) -> None:
    """Write the roles, which time-share all devices."""
    command = keys.run.command
    if command.env.get("NNODES", "1") not in ("", "1") or command.env.get("LOCAL_RANK"):
        what, why = f"{keys.stage} must be started once, on one machine", "Ray starts the processes on all machines"
        fix = "join the machines to a Ray cluster, and write a file with all their devices: docs/rl.md"
        keys.reading.report(what, "environment", why, fix)
    keys.put("num_gpus_per_node", keys.devices, "run.num_processes")
    if (model := keys.setting("model.model_name_or_path")) is None:
        keys.reading.report("model is missing", why="there is nothing to train", fix="write --model MODEL")
    keys.put("pretrain", model or "missing", "model.model_name_or_path")
    keys.put("output_dir", keys.setting("run.output_dir"), "run.output_dir")
    keys.put("seed", keys.setting("run.seed"), "run.seed")
    if command.variables.get("USE_MODELSCOPE_HUB") == "1":
        keys.put("model_download_type", "MODELSCOPE")
    reference = ["reference"] if keys.written("use_kl_loss") else []
    is_lora = keys.setting("finetuning.finetuning_type") == "lora"
    if is_lora:
        reference = []  # the reference is the model without its adapters
    for role in ("actor_train", "actor_infer", *reference):
        keys.role(role)
    for role in ("actor_train", *reference):
        _engine(keys, role)
    if is_lora:
        bits = keys.setting("finetuning.quantization_bit")
        for name in (*LORA_KEYS, *(QUANTIZATION_KEYS if bits else ())):
            if (value := keys.setting(f"finetuning.{name}")) or value is False:
                keys.put(f"actor_train.model_args.{name}", value, f"finetuning.{name}")
        if keys.setting("checkpoint.merge_lora"):
            keys.put("actor_train.strategy_args.strategy_config.save_merged_model", True, "checkpoint.merge_lora")
    _encoder(keys, is_lora=is_lora)
    if (model := keys.value("ref_model")) is not None:
        if reference:
            keys.put("reference.model_args.model_name_or_path", model, "ref_model")
        else:
            keys.refuse("ref_model", "no reference model is used", "remove --ref_model")
    _replay(keys)
    _sampler(keys)


def _encoder(keys: Keys, *, is_lora: bool) -> None:
    """Write whether the vision encoder and its projector are trained."""
    paths = ("finetuning.freeze_vision_tower", "finetuning.freeze_multi_modal_projector")
    tower, projector, _ = (keys.setting(path) for path in (*paths, "finetuning.freeze_deepstack_mergers"))
    if not keys.has_vision:
        return
    if tower != projector or (is_lora and not tower):
        where = next((keys.loaded.entries[path].where for path in paths if path in keys.loaded.entries), "")
        what = f"freeze_vit {shown(tower)} with freeze_aligner {shown(projector)} is not supported"
        why = "adapters are on the language model only" if is_lora else "they are trained together, or not at all"
        fix = "write --freeze_vit true --freeze_aligner true" + ", or both false" * (not is_lora)
        keys.reading.report(what, where, why, fix)
    elif not is_lora:
        value = "vision_model" if tower else "none"
        keys.put("actor_train.model_args.freeze_module_prefix", value, "finetuning.freeze_vision_tower")


def _engine(keys: Keys, role: str) -> None:
    """Write the trainer settings of a role; the reference and reward model only get layout, precision and kernels."""
    trains, above = role == "actor_train", f"{role}.strategy_args"
    keys.put(f"{above}.strategy_name", "megatron_train" if trains else "megatron_infer")
    for path in keys.loaded.entries:
        group, _, name = path.partition(".")
        is_of_role = group in (*_OF_ROLES, "optimizer", "recompute") if trains else group in _OF_ROLES
        if (
            is_of_role
            and path not in (*_NOT_OF_ROLES, "optimizer.max_grad_norm")
            and not is_default(keys.loaded.settings, path)
        ):
            keys.put(f"{above}.strategy_config.{name}", keys.setting(path), path)
    if trains:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            keys.put(f"{above}.strategy_config.{name}", keys.setting(f"batch.{name}"), f"batch.{name}")
    if keys.run.command.has_experts and keys.setting("parallel.expert_tensor_parallel_size") is None:
        tp = keys.setting("parallel.tensor_model_parallel_size")
        keys.put(f"{above}.strategy_config.expert_tensor_parallel_size", tp)
    keys.put(f"{role}.infer_batch_size", keys.setting("batch.per_device_train_batch_size"))
    keys.put(f"{role}.use_sequence_packing", True)
    keys.put(f"{role}.backend_timeout", keys.setting("run.ddp_timeout") / 60, "run.ddp_timeout")


def _sampler(keys: Keys) -> None:
    """Write actor_infer, which samples with vLLM, or without GPUs with the built-in engine."""
    is_builtin = not keys.value("use_vllm") or keys.run.command.on_cpu
    keys.choice("vllm_mode")
    above = "actor_infer.strategy_args"
    keys.put(f"{above}.strategy_name", "builtin" if is_builtin else "vllm", "use_vllm")
    if is_builtin:
        keys.reading.lines.append("the built-in engine is used" + ": there is no GPU" * keys.run.command.on_cpu)
        return
    for flag, row in table("swift").items():
        if row.engine and (value := keys.value(flag)) is not None:
            keys.put(f"{above}.strategy_config.{row.engine}", value, flag)
    for name, value in (keys.value("vllm_engine_kwargs") or {}).items():
        keys.put(f"{above}.strategy_config.{name}", value, "vllm_engine_kwargs")
    if (most := keys.value("vllm_max_num_seqs")) is not None:
        keys.put("max_running_requests", most, "vllm_max_num_seqs")
    each = keys.value("vllm_tensor_parallel_size")
    if keys.devices % each:
        size = max(size for size in divisors(keys.devices) if size < each)
        why = f"the engines use all {keys.devices} devices"
        keys.refuse("vllm_tensor_parallel_size", why, f"write --vllm_tensor_parallel_size {size}")
        keys.put(f"{above}.strategy_config.tensor_parallel_size", each := 1)
    keys.put("actor_infer.num_gpus_per_worker", each, "vllm_tensor_parallel_size")


def _replay(keys: Keys) -> None:
    """Write router_replay, with which the trainer routes tokens to the same experts as the engine."""
    command, share = keys.run.command, keys.written("opd_lmbda")
    if (mode := keys.choice("router_replay_mode")) is None:
        return
    if command.config and not command.has_experts:
        keys.refuse("router_replay_mode", "the model has no experts", "write --router_replay_mode disabled")
    elif share is not None and share < 1:
        why = "no engine has routed the data set's answers, so there is nothing to replay"
        keys.refuse("router_replay_mode", why, "write --lmbda 1, or --router_replay_mode disabled")
    else:
        keys.put("actor_train.router_replay.mode", mode, "router_replay_mode")


def write_rewards(keys: Keys) -> None:
    """Write one domain, whose reward is the weighted sum of all rewards."""
    names, models = keys.value("reward_funcs") or [], keys.value("reward_model") or []
    if not names and not models:
        fix = "write --reward_funcs accuracy format, or names from a file of --external_plugins"
        keys.reading.report("reward_funcs is missing", why="there is no reward", fix=fix)
    weights = keys.value("reward_weights") or []
    numbers = [float(number) for each in weights if is_number(number := parse(shown(each)).data)]
    if weights and (len(numbers) != len(names) + len(models) or len(numbers) != len(weights)):
        of_model = ", and for reward_model" * bool(models)
        keys.refuse("reward_weights", "", f"write a number for each of reward_funcs{of_model}")
    arguments: dict[str, Any] = {"reward_funcs": list(names), "reward_weights": numbers[: len(names)]}
    if plugins := keys.value("external_plugins"):
        arguments["external_plugins"] = [os.path.abspath(path) for path in plugins]
        for path in plugins:
            if not os.path.isfile(path):
                keys.refuse("external_plugins", f"there is no file {path}", "check the path")
    length, typed = int(keys.value("max_completion_length")), keys.run.command.rollouts
    for flag, row in table("swift").items():
        is_of_reward = row.of == "grpo" and flag.startswith(_OF_REWARDS) and keys.value(flag) is not None
        if is_of_reward and (flag in typed or flag.partition("_")[0] in names):
            arguments[flag] = keys.value(flag)
    if "cosine" in names:
        arguments.setdefault("cosine_max_len", length)
    if "soft_overlong" in names:
        cache, longest = keys.value("soft_cache_length"), arguments.setdefault("soft_max_length", length)
        if cache is None or not 0 < cache < longest:
            fix = f"write --soft_cache_length {max(1, longest // 4)}"
            keys.refuse("soft_cache_length", f"soft_overlong needs a number below soft_max_length {longest}", fix)
    why = f"arguments of rewards.grpo, whose scores are summed: {', '.join(names)}"
    for flag in ("reward_funcs", "reward_weights", "external_plugins", *arguments) if names else ():
        if flag in typed:
            keys.run.command.whys[typed[flag].where] = why if flag == "reward_funcs" else "in rewards.grpo"
    above = "rewards.grpo"
    keys.put(f"{above}.tag_included", [""])
    if names or not models:
        keys.put(f"{above}.worker_cls", "swift", "reward_funcs")
        keys.put(f"{above}.world_size", 8)
        keys.put(f"{above}.arguments", arguments, "reward_funcs")
    else:
        keys.put(f"{above}.worker_cls", REWARD_MODEL, "reward_model")
    if models:
        _reward_model(keys, above, numbers[len(names) :])
    if keys.value("dynamic_sample"):
        keys.put(f"{above}.query_filter_config.type", "std_filter", "dynamic_sample")
        keys.put(f"{above}.query_filter_config.filter_args", {"std_threshold": 0}, "dynamic_sample")
        keys.put("is_use_additional_prompts", True, "dynamic_sample")


def _reward_model(keys: Keys, above: str, weights: Sequence[float]) -> None:
    """Write a reward model, whose score is the last one in the sum, as in ms-swift's training without Megatron; with
    Megatron ms-swift never calls the model."""
    first, *more = keys.value("reward_model")
    if more:
        keys.refuse("reward_model", "only one reward model is supported", f"write --reward_model {first}")
    if keys.value("reward_model_plugin") not in (None, ["default"]):
        why, fix = "its score is used directly, as with the plugin default", "use a function of --external_plugins"
        keys.refuse("reward_model_plugin", why, fix)
    keys.put(f"{above}.model_args.model_name_or_path", first, "reward_model")
    keys.role(above)
    _engine(keys, above)
    if weights:
        keys.put(f"{above}.score_weight", weights[0], "reward_weights")
