"""The settings themselves: each fully declared, none added without a decision, cheap to import."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatune.config.settings import GROUPS, Settings, all_settings

OPTIONS = Path(__file__).with_name("options.txt")


def test_public_options_are_frozen():
    """Adding, renaming or removing an option is a decision: write it into options.txt too."""
    assert [f"{info.path}: {info.expected}" for info in all_settings().values()] == OPTIONS.read_text().splitlines()


def test_every_setting_has_a_name_of_its_own_and_advice():
    names = [info.name for info in all_settings().values()]
    assert len(names) == len(set(names))
    for info in all_settings().values():
        assert info.texts.what.endswith(".")
        assert 1 <= info.texts.what.count(". ") + 1 <= 3, info.path


def test_groups_are_those_of_settings():
    assert {name: field.annotation for name, field in Settings.model_fields.items()} == GROUPS


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ("batch.per_device_train_batch_size", 8),
        ("batch.gradient_accumulation_steps", 1),
        ("optimizer.learning_rate", 5e-5),
        ("optimizer.num_train_epochs", 3.0),
        ("optimizer.max_steps", -1),
        ("optimizer.lr_scheduler_type", "linear"),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.max_grad_norm", 1.0),
        ("optimizer.adam_beta1", 0.9),
        ("optimizer.adam_beta2", 0.999),
        ("optimizer.adam_epsilon", 1e-8),
        ("checkpoint.save_steps", 500),
        ("run.seed", 42),
        ("data.cutoff_len", 2048),
    ],
)
def test_defaults_are_what_users_of_llama_factory_rely_on(path, default):
    assert all_settings()[path].default == default


def test_settings_are_frozen_strict_and_closed():
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.run.seed = 1
    with pytest.raises(ValidationError, match="valid integer"):
        Settings.model_validate({"run": {"seed": "1"}})
    with pytest.raises(ValidationError, match="Extra inputs"):
        Settings.model_validate({"run": {"sead": 1}})


@pytest.mark.parametrize(
    ("precision", "dtype"), [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16")]
)
def test_params_dtype(precision, dtype):
    assert Settings.model_validate({"precision": precision}).precision.params_dtype == dtype


def test_derived_numbers():
    settings = Settings.model_validate(
        {
            "parallel": {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 3,
            },
            "logging": {"logging_steps": 7},
        }
    )
    assert settings.parallel.model_parallel_size == 8
    assert settings.eval_interval == 7
    assert Settings.model_validate({"evaluation": {"eval_steps": 3}}).eval_interval == 3


def test_expected_in_words():
    infos = all_settings()
    assert infos["optimizer.adam_beta1"].expected == "a number, at least 0, below 1"
    assert infos["run.resume_from_checkpoint"].expected == "true or false or text, or null"
    assert infos["checkpoint.save_strategy"].expected == "one of: steps, epoch, no"
    assert infos["data.cutoff_len"].unit == "tokens"


def test_import_needs_no_torch():
    script = (
        "import sys, megatune.config.load\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_losses_of_pairs():
    """They are named apart from what computes them, which needs torch."""
    from megatune.objectives.pair_losses import PAIR_LOSSES, WITHOUT_REFERENCE

    names = all_settings()["preference.pref_loss"].choices
    assert {*PAIR_LOSSES} == set(names)
    preference = Settings.model_validate({"preference": {"pref_loss": ["simpo", "sigmoid"]}}).preference
    assert preference.losses == {"simpo": 1.0, "sigmoid": 1.0}
    assert preference.has_reference
    without = [Settings.model_validate({"preference": {"pref_loss": [name]}}).preference for name in names]
    assert {each.pref_loss[0] for each in without if not each.has_reference} == set(WITHOUT_REFERENCE)
