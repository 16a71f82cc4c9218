"""What a run reports, saves and evaluates, and how often."""

from __future__ import annotations

from typing import Literal

from megatune.config.setting import Group, setting


class LoggingSettings(Group):
    logging_steps: int = setting(
        10,
        unit="steps",
        ge=1,
        advice="A log line every so many steps. The loss of a line is the mean over those steps.",
    )
    report_to: list[Literal["tensorboard", "none"]] = setting(
        ["tensorboard"], advice="tensorboard writes event files to output_dir/runs; none writes only the log files."
    )
    plot_loss: bool = setting(
        True, advice="Draw the loss to output_dir/training_loss.png, while training and at its end."
    )


class CheckpointSettings(Group):
    save_strategy: Literal["steps", "epoch", "no"] = setting(
        "steps",
        advice="When checkpoints are saved: every save_steps, after every epoch, or only at the end, which always "
        "saves.",
    )
    save_steps: int = setting(
        500,
        unit="steps",
        ge=1,
        advice="A checkpoint every so many steps. At most this many steps are lost when a machine fails; each save "
        "costs the time to write the model and its training state.",
    )
    save_total_limit: int | None = setting(
        None, unit="checkpoints", ge=1, advice="Keep only the newest so many checkpoints. null keeps all of them."
    )
    save_only_model: bool = setting(
        False,
        advice="Leave out the training state: checkpoints are a quarter of the size or less, and cannot be resumed "
        "from.",
    )
    save_hf_model: bool = setting(True, advice="Always true: every checkpoint is a Hugging Face model as it is.")


class EvaluationSettings(Group):
    eval_strategy: Literal["no", "steps", "epoch"] = setting(
        "no", advice="When to evaluate: never, every eval_steps, or after every epoch. Needs val_size or eval_dataset."
    )
    eval_steps: int | None = setting(
        None, unit="steps", ge=1, advice="Evaluate every so many steps. null takes logging_steps, as Transformers does."
    )
    load_best_model_at_end: bool = setting(
        False,
        advice="Finish with the checkpoint of the lowest evaluation loss instead of the last. It is never deleted.",
    )
