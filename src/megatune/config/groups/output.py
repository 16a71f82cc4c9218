"""What a run reports, saves and evaluates, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, setting


class LoggingSettings(Group):
    logging_steps: Annotated[Count, "steps"] = setting(
        10,
        advice="Steps from one log line to the next; its loss is the mean over those steps.",
        how="The console, metrics.jsonl, trainer_log.jsonl and TensorBoard all have these lines. eval_steps: null "
        "takes it, too.",
        when="1 for short runs, 10 to 100 for long ones.",
    )
    report_to: list[Literal["tensorboard", "none"]] = setting(
        ["tensorboard"],
        advice="Where the numbers go beside the log files.",
        how="trainer_log.jsonl and metrics.jsonl are always written to output_dir.",
        when="none where nobody looks at TensorBoard.",
        values={"tensorboard": "event files in output_dir/runs", "none": "the log files only"},
    )
    plot_loss: bool = setting(
        True,
        advice="Draw the loss to output_dir/training_loss.png, while training and at its end.",
        how="It is drawn at most every 30 seconds, and never for more than a hundredth of the time.",
        when="Turn it off where matplotlib is slow to start or not wanted.",
    )
    profile: bool = setting(
        False,
        advice="Profile a few steps with torch.profiler.",
        how="output_dir/profile gets a trace of each profiled rank (rank-K.json.gz, for Perfetto or chrome://tracing) "
        "and a table of its slowest operators (rank-K.txt). A GPU's allocations are recorded too: a rank that runs out "
        "of memory leaves memory-rank-K.pickle, for pytorch.org/memory_viz.",
        when="To see what a slow step consists of. Profiled steps are slower.",
    )
    profile_step_start: Annotated[int, Field(ge=0), "steps"] = setting(
        10,
        advice="Profile from the step after this one on.",
        how="The first steps of a process are slower than the others: 2 or more leaves them out.",
        when="Lower it in a short run.",
    )
    profile_step_end: Annotated[Count, "steps"] = setting(
        12,
        advice="The last step to profile.",
        how="A trace grows with its steps: of a large model a few hundred megabytes a step.",
        when="One to three steps after profile_step_start.",
    )
    profile_ranks: list[int] = setting(
        [0],
        advice="The ranks that profile.",
        how="Each writes its own files; the other ranks are not slowed down, but wait for these.",
        when="Add the last stage's rank, or one that is slow.",
    )


class CheckpointSettings(Group):
    save_strategy: Literal["steps", "epoch", "no"] = setting(
        "steps",
        advice="When checkpoints are saved. The end of the run always saves.",
        how="A checkpoint is written beside its final name, digested and renamed: it is whole or not there. All "
        "processes write at the same time, and training waits.",
        when="steps, for runs that may be interrupted.",
        values={"steps": "every save_steps", "epoch": "after every epoch", "no": "only at the end"},
    )
    save_steps: Annotated[Count, "steps"] = setting(
        500,
        advice="Steps from one checkpoint to the next.",
        how="At most this many steps are lost when a machine fails. Each save takes the time to write the model and "
        "its training state, about 14 bytes a parameter in bf16.",
        when="Such that a save comes every 15 to 60 minutes.",
    )
    save_total_limit: Annotated[Count, "checkpoints"] | None = setting(
        None,
        advice="Keep only this many checkpoints, the newest ones. null keeps all of them.",
        how="Older ones are deleted after a new one is whole. The best one is kept with load_best_model_at_end.",
        when="2 or 3 where the disk is small: a checkpoint of an 8B model takes about 115 GB.",
    )
    save_only_model: bool = setting(
        False,
        advice="Leave out the training state: checkpoints are a seventh of the size (in fp32 a third), and cannot be "
        "resumed from.",
        how="Only the Hugging Face model is written.",
        when="Where every checkpoint is to be evaluated and none will be resumed.",
    )
    save_hf_model: bool = setting(
        True,
        advice="Always true: every checkpoint is a Hugging Face model as it is.",
        how="Weights are written as safetensors with the checkpoint's own keys.",
        when="Never: leave it out.",
    )


class EvaluationSettings(Group):
    eval_strategy: Literal["no", "steps", "epoch"] = setting(
        "no",
        advice="When to evaluate. Needs val_size or eval_dataset.",
        how="The loss over all held-out rows is computed without updates, and logged with its perplexity.",
        when="steps to watch a run, epoch for a few passes over small data.",
        values={"no": "never", "steps": "every eval_steps, and at the end", "epoch": "after every epoch"},
    )
    eval_steps: Annotated[Count, "steps"] | None = setting(
        None,
        advice="Steps from one evaluation to the next. null takes logging_steps, as Transformers does.",
        how="The last step is always evaluated.",
        when="Set it: logging_steps is often too frequent. With load_best_model_at_end save_steps is a multiple of it.",
    )
    load_best_model_at_end: bool = setting(
        False,
        advice="Finish with the checkpoint of the lowest evaluation loss instead of the last.",
        how="The final model in output_dir is copied from that checkpoint, which is never deleted.",
        when="Where more epochs than needed are run and the evaluation loss turns up again. save_strategy must be "
        "eval_strategy.",
    )
