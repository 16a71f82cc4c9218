"""Three optimizer steps of KTO against TRL's trainer: losses, gradient norms, metrics and weights, in layouts.

One batch is the whole set, so that TRL exchanges answers within it as this project does within all rows. Updates are
measured as in test_one_step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Layout
from saving import save_adapters, save_weights
from test_lora import finetuning
from test_one_step import OPTIMIZERS, saved, update_errors
from trl import KTOConfig, KTOTrainer
from trl_kit import Steps, common_arguments, config_of, data_of, steps_of

from megatune.bridge.assemble import assemble
from megatune.config.settings import Settings
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.companions import CompanionRows
from megatune.data.order import PreparedSteps
from megatune.data.rows import IGNORE_INDEX, Document, TokenRows
from megatune.engine.model import gather_parameters
from megatune.families import load_architecture
from megatune.objectives.kto import KTO
from megatune.objectives.preference import REFERENCE
from megatune.training.loaders import Loaders
from megatune.training.train_step import train_step
from megatune.verify.checkpoints import write_random_adapter
from megatune.verify.reference import load_reference_model

PROMPTS, ANSWERS = (7, 3, 12, 5, 9, 4, 6, 8), (9, 14, 3, 8, 5, 17, 2, 11)
TAGS = (True, False, True, True, False, True, False, True)
CUTOFF, NUM_STEPS = 64, 3
PACKED = 0  # rows of a micro-batch hold several answers
LOSSES = {"kto": KTO("kto", 0.03, 1.3, 0.8), "apo_zero_unpaired": KTO("apo_zero_unpaired", 0.03)}
ALL = {
    **EXPERT_LAYOUTS,
    **LAYOUTS,
    **SEQUENCE_LAYOUTS,
    "dp2": Layout(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
OPTIMIZER = {
    "adam": (OPTIMIZERS["adam, larger epsilon"], 1e-3),  # settings, and how far an update may be off
    "sgd": (OPTIMIZERS["sgd"] | {"learning_rate": 8.0}, 1e-5),
}
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")


@dataclass(frozen=True)
class Case:
    """What all ranks compute; `rows` has reference-own.npy and reference-other.npy."""

    model: Path
    rows: Path
    settings: Settings
    objective: KTO


def write(folder: Path, *, packing: bool = False) -> Path:
    """Rows of random tokens."""
    generator = np.random.default_rng(0)
    with RowsBuilder(folder, RowShape("kto", CUTOFF, packing, 0)) as builder:
        for prompt, answer, tag in zip(PROMPTS, ANSWERS, TAGS, strict=True):
            ids = generator.integers(0, 301, prompt + answer).astype(np.int32)
            labels = np.where(np.arange(len(ids)) < prompt, np.int32(IGNORE_INDEX), ids)
            builder.add([Document(ids, labels)], desirable=tag)
        builder.write_part("train", np.arange(len(PROMPTS)))
    return folder / "train"


def pack(rows: Path, folder: Path) -> Path:
    """Write the same answers side by side, each with its values of the reference; return where."""
    folder.mkdir()
    packed = write(folder, packing=True)
    single = {mine.input_ids.tobytes(): number for number, (mine,) in enumerate(TokenRows(rows))}
    order = [single[mine.input_ids.tobytes()] for row in TokenRows(packed) for mine in row]
    assert order != sorted(order)
    for name in ("reference-own.npy", "reference-other.npy"):
        np.save(packed / name, np.load(rows / name)[order])
    return packed


def engine_steps(case: Case, folder: Path) -> list[dict[str, float]]:
    """On every rank: losses, norms and metrics; weights are written."""
    assembly = assemble(case.model, case.settings)
    own = TokenRows(case.rows).with_column(REFERENCE, case.rows / "reference-own.npy")
    other = CompanionRows(case.rows).with_column(REFERENCE, case.rows / "reference-other.npy")
    loaders, batch = Loaders(case.settings, assembly.coords, 0), case.settings.batch
    size = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * assembly.coords.dp_size
    batches, others = (
        loaders.training(PreparedSteps(rows, size, shuffle=False), range(NUM_STEPS)) for rows in (own, other)
    )
    log = []
    for (_, mine), mismatched in zip(batches, others, strict=True):
        objective = case.objective
        objective.before_step(assembly.model, [mismatched[1]])
        result = train_step(assembly, mine, objective, learning_rate=case.settings.optimizer.learning_rate)
        assert result.updated
        found = objective.reported(result.totals.metrics)
        log.append({"loss": result.totals.loss, "grad_norm": result.grad_norm, **found})
    gather_parameters(assembly.model)
    if (adapters := case.settings.finetuning).finetuning_type == "lora":
        save_adapters(folder, assembly.parameters, assembly.architecture, assembly.coords, adapters)
    else:
        save_weights(folder, assembly.parameters, assembly.architecture, assembly.coords, form=assembly.form)
    return log


class _KTO(KTOTrainer):
    """Takes rows of tokens, and of the reference's log-probabilities, as they are."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def trl_rows(rows: Path, model: Any) -> list[dict[str, Any]]:
    """Rows as TRL has them, and a reference that is apart from the model: so z is above 0."""
    own, other = TokenRows(rows), CompanionRows(rows)
    generator, found = np.random.default_rng(1), []
    for number, ((mine,), (mismatched,)) in enumerate(zip(own, other, strict=True)):
        size = PROMPTS[number]
        row = {"prompt_ids": mine.input_ids[:size].tolist(), "completion_ids": mine.input_ids[size:].tolist()}
        row |= {"KL_completion_ids": mismatched.input_ids[size:].tolist(), "label": TAGS[number]}
        for key, document in (("ref_logps", mine), ("ref_KL_logps", mismatched)):
            ids, labels = (torch.from_numpy(np.array(each)).long() for each in document[:2])
            with torch.no_grad():
                log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            trained = labels[1:] >= 0
            value = log_probs[trained].gather(1, labels[1:][trained, None]).sum()
            row[key] = float(np.float32(value - generator.normal(0.5 if "KL" in key else 0, 1)))
        found.append(row)
    np.save(rows / "reference-own.npy", np.array([row["ref_logps"] for row in found], np.float32))
    np.save(rows / "reference-other.npy", np.array([row["ref_KL_logps"] for row in found], np.float32))
    return found


def trl_steps(case: Case, optimizer: dict[str, Any], folder: Path, adapter: Path | None) -> Steps:
    model, objective = load_reference_model(case.model, torch.float32), case.objective
    rows = trl_rows(case.rows, model)
    arguments = KTOConfig(
        **common_arguments(optimizer, NUM_STEPS, folder), per_device_train_batch_size=len(rows), max_length=None,
        precompute_ref_log_probs=True, router_aux_loss_coef=0.0, loss_type=objective.name, beta=objective.beta,
        desirable_weight=objective.chosen_weight, undesirable_weight=objective.rejected_weight,
    )  # fmt: skip
    trainer = _KTO(model, None, arguments, **data_of(rows), peft_config=config_of(adapter))
    names = ("loss", "grad_norm", *(name for name in NAMES if name != "kl" or objective.has_companions))
    return steps_of(trainer, optimizer, names, adapter)


Truth = Callable[..., tuple[Case, Steps]]


@pytest.fixture(scope="module")
def truth(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """What the engine is to compute, but for its layout, and TRL's steps, which are made once."""
    made: dict[Any, tuple[Case, Steps]] = {}

    def make(loss: str, optimizer: str, family: str, *, lora: bool) -> tuple[Case, Steps]:
        if (key := (loss, optimizer, family, lora)) not in made:
            model, folder, (options, _) = model_dir(family), tmp_path_factory.mktemp("trl"), OPTIMIZER[optimizer]
            settings, adapter = ALL["1"].settings(options), None
            if lora:
                adapter = tmp_path_factory.mktemp("adapter")
                settings = settings.model_copy(update={"finetuning": finetuning("LoRA", adapter)})
                write_random_adapter(adapter, model, load_architecture(model), settings.finetuning, seed=7)
            case = Case(model, write(tmp_path_factory.mktemp("rows")), settings, LOSSES[loss])
            made[key] = case, trl_steps(case, options, folder, adapter)
        return made[key]

    return make


# Of pairs test_trl_steps.py has steps with experts, and test_router_losses.py has KTO with them.
@pytest.mark.extended("cp2 p2p", "dp2", "ep2")
@pytest.mark.covering
@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize(
    ("loss", "layout", "size", "lora"),
    [
        *(("kto", layout, 1, False) for layout in ("1", "tp2 sp", "pp2 vpp2", "cp2 p2p", "dp2")),
        # Answers of a micro-batch do not matter.
        *(("kto", layout, 4, False) for layout in ("1", "dp2")),
        *(("kto", layout, PACKED, False) for layout in ("1", "cp2 p2p", "dp2")),
        # Gradients and steps of adapters are compared in tests/parity/test_preference.py and test_lora.py.
        pytest.param("kto", "tp2 sp", 2, True, marks=pytest.mark.extended),
        ("kto", "ep2", 1, False),
        ("apo_zero_unpaired", "1", 2, False),
    ],
)
def test_three_steps_equal_those_of_trl(
    pool: Any, truth: Truth, tmp_path: Path, loss: str, layout: str, size: int, lora: bool, optimizer: str
) -> None:
    case, expected = truth(loss, optimizer, "qwen3_moe" if "ep" in layout else "qwen3", lora=lora)
    chosen, bound = ALL[layout], OPTIMIZER[optimizer][1]
    settings = case.settings.model_copy(update={"parallel": chosen.settings().parallel})
    num_rows = len(TAGS)
    if size == PACKED:
        case = replace(case, rows=pack(case.rows, tmp_path / "packed"))
        num_rows, size = len(TokenRows(case.rows)), 1
    accumulation = -(-num_rows // (size * (chosen.world_size // settings.parallel.model_parallel_size)))
    batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    settings = settings.model_copy(update={"batch": settings.batch.model_copy(update=batch)})
    case = replace(case, settings=settings)
    for log in pool.run(chosen.world_size, engine_steps, case, tmp_path):
        for found, step in zip(log, expected.log, strict=True):
            assert {name: found[name] for name in step} == pytest.approx(step, rel=1e-5, abs=2e-5)
    if loss == "kto":
        assert expected.log[0]["kl"] > 0.1
    errors = update_errors(expected.before, expected.after, saved(tmp_path))
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= bound}
