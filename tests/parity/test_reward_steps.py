"""Optimizer steps of a reward model against TRL's RewardTrainer, with margins and centred rewards.

Measured as in test_one_step: losses, metrics, gradient norms and the parameters after three steps, with SGD after one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from pairs_kit import Case, random_pairs, shard_pairs
from test_one_step import OPTIMIZERS, TOLERANCES, _checkpoint_copy, saved, update_errors
from test_preference import EVERY
from test_rewards import MARGINS, OBJECTIVE, settings_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

from megatune.bridge.assemble import assemble
from megatune.bridge.save import save_weights
from megatune.config.groups.optimizer import OptimizerSettings
from megatune.engine.model import gather_parameters
from megatune.training.train_step import train_step

VOCABULARY = 300  # and a token that pads
# With SGD weights are rounded by as much as is tolerated in several steps.
NUM_STEPS = {"adam": 3, "sgd": 1}
OPTIMIZERS = {
    "adam": OPTIMIZERS["adam, larger epsilon"],
    "sgd": {**OPTIMIZERS["sgd"], "sgd_momentum": 0.0},
}


@dataclass(frozen=True)
class Steps:
    """What training came to: weights before and after, and what was logged of each step."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logged: list[dict[str, float]]


def engine_steps(case: Case, folder: Path) -> list[dict[str, float]]:
    """On every rank: what was logged; weights are written."""
    assembly, logged = assemble(case.model, case.settings), []
    for _ in range(NUM_STEPS[case.settings.optimizer.optimizer]):
        batches = shard_pairs(case, assembly)
        result = train_step(assembly, batches, case.objective, learning_rate=case.settings.optimizer.learning_rate)
        logged.append({"loss": result.totals.loss, "grad_norm": result.grad_norm, **result.totals.metrics})
    gather_parameters(assembly.model)
    save_weights(folder, assembly.parameters, assembly.architecture, assembly.place, form=assembly.form)
    return logged


def trl_steps(model_dir: Path, optimizer: dict[str, Any], folder: Path) -> Steps:
    """All pairs in one batch of each step."""
    pairs = random_pairs(VOCABULARY)
    rows = [
        {"chosen_ids": list(pair.chosen.input_ids), "rejected_ids": list(pair.rejected.input_ids), "margin": margin}
        for pair, margin in zip(pairs, MARGINS, strict=True)
    ]
    words = Tokenizer(WordLevel({"<unk>": 0, "<pad>": VOCABULARY}, unk_token="<unk>"))
    model = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    )
    before, is_adam = _checkpoint_copy(model), optimizer["optimizer"] == "adam"
    trainer = RewardTrainer(
        model,
        args=RewardConfig(
            output_dir=str(folder), per_device_train_batch_size=len(pairs), num_train_epochs=1, logging_steps=1,
            bf16=False, gradient_checkpointing=False, max_length=None, use_cpu=True, report_to=[], save_strategy="no",
            train_sampling_strategy="sequential", disable_tqdm=True, lr_scheduler_type="constant", warmup_steps=0,
            center_rewards_coefficient=OBJECTIVE.centering, learning_rate=optimizer["learning_rate"],
            weight_decay=optimizer["weight_decay"], max_grad_norm=optimizer["max_grad_norm"],
            optim="adamw_torch" if is_adam else "sgd", adam_beta1=optimizer.get("adam_beta1", 0.9),
            adam_beta2=optimizer.get("adam_beta2", 0.999), adam_epsilon=optimizer.get("adam_epsilon", 1e-8),
        ),
        train_dataset=Dataset.from_list(NUM_STEPS[optimizer["optimizer"]] * rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"),
    )  # fmt: skip
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    return Steps(before, _checkpoint_copy(model), logged)


@pytest.fixture(scope="module")
def steps(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A reward model, and what TRL makes of it; made once."""
    made: dict[Any, tuple[Path, Steps]] = {}

    def make(family: str, optimizer: str) -> tuple[Path, Steps]:
        if (family, optimizer) not in made:
            folder = tmp_path_factory.mktemp("reward")
            torch.manual_seed(3)
            model = AutoModelForSequenceClassification.from_pretrained(model_dir(family), num_labels=1)
            model.score.weight.data.normal_()
            model.save_pretrained(folder)
            made[family, optimizer] = folder, trl_steps(folder, OPTIMIZERS[optimizer], folder / "trl")
        return made[family, optimizer]

    return make


@pytest.mark.parametrize(
    ("family", "layout", "optimizer", "size"),
    [
        *(("qwen3", layout, "adam", 1) for layout in ("1", "tp2 sp", "pp2 vpp2", "cp2 p2p", "dp2, overlaps")),
        ("qwen3", "cp2, packed", "adam", 2),
        *(("qwen3", layout, "sgd", 2) for layout in ("1", "tp2 pp2 dp2 sp")),
        ("qwen3_moe", "ep2", "adam", 1),
    ],
)
def test_steps_equal_trl(
    pool: Any, steps: Any, tmp_path: Path, family: str, layout: str, optimizer: str, size: int
) -> None:
    model, expected = steps(family, optimizer)
    settings = settings_of(layout, optimizer=OptimizerSettings(**OPTIMIZERS[optimizer]))
    pairs = random_pairs(VOCABULARY)
    case = Case(model, settings, pairs, None, OBJECTIVE, size, pad_token_id=VOCABULARY, margins=MARGINS)
    for logged in pool.run(EVERY[layout].world_size, engine_steps, case, tmp_path):
        for found, wanted in zip(logged, expected.logged, strict=True):
            names = ("loss", "grad_norm", "accuracy", "margin", "mean_reward")
            assert [found[name] for name in names] == pytest.approx(
                [float(wanted[name]) for name in names], rel=1e-4, abs=1e-4
            )
    errors = update_errors(expected.before, expected.after, saved(tmp_path))
    tolerance = TOLERANCES[optimizer]
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
