"""Steps on preference pairs by TRL's own trainers, in fp64 on this process.

What TRL means in another way than this project is set so that both are the same. Its likelihood of chosen answers is a
mean over the tokens of a micro-batch: losses that have one take a pair at a time, and accumulate gradients. ORPO's is
of the prompt, too: prompts are of one token, which no token predicts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from pairs_kit import PROMPTS, SamplePair
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer

from megatune.data.rows import IGNORE_INDEX
from megatune.objectives.preference import LOG_PROBS, REWARDS, Preference
from megatune.verify.reference import checkpoint_tensors, load_reference_model
from megatune.verify.samples import Sample

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

PROMPTS_OF_ORPO = (1,) * len(PROMPTS)
_PADDING = "<pad>"


@dataclass(frozen=True)
class Steps:
    """What three steps came to.

    Attributes:
        before, after: tensors by their names in checkpoints, or in an adapter's file.
        log: loss, gradient norm and metrics of each step.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    log: list[dict[str, float]]


class _DPO(DPOTrainer):
    """Takes rows of tokens as they are."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


class _CPO(CPOTrainer):
    """Takes rows of tokens as they are."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        return feature


class _ORPO(ORPOTrainer):
    """Takes rows of tokens as they are."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        return feature


def trl_steps(
    model_dir: Path,
    pairs: Sequence[SamplePair],
    objective: Preference,
    optimizer: dict[str, Any],
    num_steps: int,
    folder: Path,
    *,
    adapter: Path | None = None,
) -> Steps:
    """Train on all pairs at each step; the reference is the model at the start, or the model without its adapter.

    Args:
        optimizer: settings, by their names here.
        folder: for what TRL writes.
    """
    one_by_one = objective.likelihood or "orpo" in objective.losses
    common = common_arguments(optimizer, num_steps, folder) | {
        "per_device_train_batch_size": 1 if one_by_one else len(pairs),
        "gradient_accumulation_steps": len(pairs) if one_by_one else 1,
        "beta": objective.options.beta,
    }
    model = load_reference_model(model_dir, torch.float64)
    if objective.has_reference:
        trainer = _dpo(model, pairs, objective, common, model_dir, adapter)
    else:
        trainer = (_orpo if "orpo" in objective.losses else _cpo)(model, pairs, objective, common)
    names = ("loss", "grad_norm", *REWARDS, *(LOG_PROBS if objective.has_reference else ()))
    return steps_of(trainer, optimizer, names, adapter)


def common_arguments(optimizer: dict[str, Any], num_steps: int, folder: Path) -> dict[str, Any]:
    """Arguments of every trainer."""
    common = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "max_steps": num_steps,
        "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant",
        "max_grad_norm": optimizer["max_grad_norm"], "learning_rate": optimizer["learning_rate"],
        "weight_decay": optimizer["weight_decay"],
    }  # fmt: skip
    if optimizer["optimizer"] == "adam":
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        common |= {"optim": "adamw_torch", **{name: optimizer[name] for name in names}}
    return common


def steps_of(trainer: Trainer, optimizer: dict[str, Any], names: Sequence[str], adapter: Path | None) -> Steps:
    """Train, and return what it came to; of the log these names.

    Args:
        optimizer: that the trainer's arguments are of; TRL has no SGD with a decay of matrices alone.
        adapter: what is trained, in place of what peft begins with; None for all parameters.
    """
    if adapter is not None:
        _fill(trainer.model, adapter)
    if optimizer["optimizer"] == "sgd":
        decayed = set(trainer.get_decay_parameter_names(trainer.model))
        named = [(name, each) for name, each in trainer.model.named_parameters() if each.requires_grad]
        groups = [
            {"params": [each for name, each in named if name in decayed], "weight_decay": optimizer["weight_decay"]},
            {"params": [each for name, each in named if name not in decayed], "weight_decay": 0.0},
        ]
        trainer.optimizer = torch.optim.SGD(groups, optimizer["learning_rate"], optimizer["sgd_momentum"])
    before = _tensors(trainer.model)
    trainer.train()
    log = [each for each in trainer.state.log_history if "grad_norm" in each]
    assert len(log) == trainer.args.max_steps
    return Steps(before, _tensors(trainer.model), [{name: each[name] for name in names} for each in log])


def _dpo(
    model: Any, pairs: Sequence[SamplePair], objective: Preference, common: dict[str, Any], model_dir: Path,
    adapter: Path | None,
) -> Trainer:  # fmt: skip
    losses = dict(objective.losses) | ({"sft": objective.likelihood} if objective.likelihood else {})
    arguments = DPOConfig(
        **common, loss_type=list(losses), loss_weights=list(losses.values()), max_length=None,
        label_smoothing=objective.options.smoothing, router_aux_loss_coef=0.0,
    )  # fmt: skip
    reference = load_reference_model(model_dir, torch.float64) if adapter is None else None
    rows = []
    for pair in pairs:
        (prompt, chosen), (_, rejected) = map(_split, (pair.chosen, pair.rejected))
        rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return _DPO(model, reference, arguments, **data_of(rows), peft_config=config_of(adapter))


def _cpo(model: Any, pairs: Sequence[SamplePair], objective: Preference, common: dict[str, Any]) -> Trainer:
    (loss,), options = objective.losses, objective.options
    arguments = CPOConfig(
        **common, loss_type="sigmoid" if loss == "cpo" else loss, cpo_alpha=objective.likelihood, max_length=128,
        simpo_gamma=options.gamma, label_smoothing=options.smoothing, remove_unused_columns=False,
    )  # fmt: skip
    return _CPO(model, arguments, **data_of(list(map(_whole, pairs))))


def _orpo(model: Any, pairs: Sequence[SamplePair], objective: Preference, common: dict[str, Any]) -> Trainer:
    assert all(len(_split(pair.chosen)[0]) == 1 for pair in pairs)
    arguments = ORPOConfig(**common, max_length=128, remove_unused_columns=False)
    return _ORPO(model, arguments, **data_of(list(map(_whole, pairs))))


def config_of(adapter: Path | None) -> Any:
    """Return peft's config of an adapter that is to be trained."""
    from peft import LoraConfig

    if adapter is None:
        return None
    config = LoraConfig.from_pretrained(str(adapter))
    config.inference_mode = False
    return config


def data_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a trainer's rows, of tokens, and a tokenizer that nothing is tokenized with."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({_PADDING: 0}, _PADDING)))
    tokenizer.pad_token = tokenizer.eos_token = _PADDING
    return {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}


def _split(sample: Sample) -> tuple[list[int], list[int]]:
    """A prompt and its answer."""
    length = sum(label == IGNORE_INDEX for label in sample.labels)
    return list(sample.input_ids[:length]), list(sample.input_ids[length:])


def _whole(pair: SamplePair) -> dict[str, Any]:
    prompt, _ = _split(pair.chosen)
    row: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for side, sample in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        row[f"{side}_input_ids"], row[f"{side}_labels"] = list(sample.input_ids), list(sample.labels)
        row[f"{side}_attention_mask"] = [1] * len(sample.input_ids)
    return row


def _fill(model: Any, adapter: Path) -> None:
    """In place of what peft begins an adapter with."""
    from peft import set_peft_model_state_dict

    found = set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    assert not found.unexpected_keys


def _tensors(model: Any) -> dict[str, Tensor]:
    """Copies of what is trained, named and cut as in files."""
    from peft import PeftModel, get_peft_model_state_dict

    if isinstance(model, PeftModel):
        return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model, parameters).items()}
