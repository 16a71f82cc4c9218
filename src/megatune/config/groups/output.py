"""What a run reports, saves and evaluates, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group


class LoggingSettings(Group):
    logging_steps: Annotated[Count, "steps"] = 10
    """Steps from one log line to the next; its loss is the mean over those steps.
    How: The console, metrics.jsonl, trainer_log.jsonl and TensorBoard all have these lines. eval_steps: null takes it,
    too.
    When: 1 for short runs, 10 to 100 for long ones."""
    report_to: list[Literal["tensorboard", "none"]] = Field(default=["tensorboard"])
    """Where the numbers go beside the log files.
    How: trainer_log.jsonl and metrics.jsonl are always written to output_dir.
    When: none where nobody looks at TensorBoard.
    - tensorboard: event files in output_dir/runs
    - none: the log files only"""
    plot_loss: bool = True
    """Draw the loss to output_dir/training_loss.png, while training and at its end.
    How: It is drawn at most every 30 seconds, and never for more than a hundredth of the time.
    When: Turn it off where matplotlib is slow to start or not wanted."""
    profile: bool = False
    """Profile a few steps with torch.profiler.
    How: output_dir/profile gets a trace of each profiled rank (rank-K.json.gz, for Perfetto or chrome://tracing) and a
    table of its slowest operators (rank-K.txt). A GPU's allocations are recorded too: a rank that runs out of memory
    leaves memory-rank-K.pickle, for pytorch.org/memory_viz.
    When: To see what a slow step consists of. Profiled steps are slower."""
    profile_step_start: Annotated[int, Field(ge=0), "steps"] = 10
    """Profile from the step after this one on.
    How: The first steps of a process are slower than the others: 2 or more leaves them out.
    When: Lower it in a short run."""
    profile_step_end: Annotated[Count, "steps"] = 12
    """The last step to profile.
    How: A trace grows with its steps: of a large model a few hundred megabytes a step.
    When: One to three steps after profile_step_start."""
    profile_ranks: list[int] = Field(default=[0])
    """The ranks that profile.
    How: Each writes its own files; the other ranks are not slowed down, but wait for these.
    When: Add the last stage's rank, or one that is slow."""


class CheckpointSettings(Group):
    save_strategy: Literal["steps", "epoch", "no"] = "steps"
    """When checkpoints are saved. The end of the run always saves.
    How: A checkpoint is written beside its final name, digested and renamed: it is whole or not there. All processes
    write at the same time, and training waits, with async_save only for a copy.
    When: steps, for runs that may be interrupted.
    - steps: every save_steps
    - epoch: after every epoch
    - no: only at the end"""
    save_steps: Annotated[Count, "steps"] = 500
    """Steps from one checkpoint to the next.
    How: At most this many steps are lost when a machine fails. Each save takes the time to write the model and its
    training state, about 14 bytes a parameter in bf16.
    When: Such that a save comes every 15 to 60 minutes."""
    async_save: bool = False
    """Write checkpoints in the background: training waits only until they are copied to the host's memory.
    How: Each process copies what it will write, about 14 bytes a parameter in bf16 over all of them. One checkpoint at
    a time is written: the next waits for it. The last save of a run is not in the background, nor is one for which
    memory is short.
    When: Where a save takes much longer than a step and the machines have that much memory free."""
    save_total_limit: Annotated[Count, "checkpoints"] | None = None
    """Keep only this many checkpoints, the newest ones. null keeps all of them.
    How: Older ones are deleted after a new one is whole. The best one is kept with load_best_model_at_end.
    When: 2 or 3 where the disk is small: a checkpoint of an 8B model takes about 115 GB."""
    save_only_model: bool = False
    """Leave out the training state: checkpoints are a seventh of the size (in fp32 a third), and cannot be resumed
    from.
    How: Only the Hugging Face model is written.
    When: Where every checkpoint is to be evaluated and none will be resumed."""
    save_hf_model: bool = True
    """Always true: every checkpoint is a Hugging Face model as it is.
    How: Weights are written as safetensors with the checkpoint's own keys.
    When: Never: leave it out."""
    merge_lora: bool = False
    """With finetuning_type: lora, write the model with the trained adapter merged into it as well, at the end of the
    run.
    How: output_dir/merged gets a whole model: each matrix and the product of its adapter are added in fp32, and rounded
    once to the dtype of the base. Checkpoints keep the adapter alone.
    When: Turn it on to serve the model without peft; `megatune export` does the same later."""


class EvaluationSettings(Group):
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """When to evaluate. Needs val_size or eval_dataset.
    How: The loss over all held-out rows is computed without updates, and logged with its perplexity.
    When: steps to watch a run, epoch for a few passes over small data.
    - no: never
    - steps: every eval_steps, and at the end
    - epoch: after every epoch"""
    eval_steps: Annotated[Count, "steps"] | None = None
    """Steps from one evaluation to the next. null takes logging_steps, as Transformers does.
    How: The last step is always evaluated.
    When: Set it: logging_steps is often too frequent. With load_best_model_at_end save_steps is a multiple of it."""
    load_best_model_at_end: bool = False
    """Finish with the checkpoint of the lowest evaluation loss instead of the last.
    How: The final model in output_dir is copied from that checkpoint, which is never deleted.
    When: Where more epochs than needed are run and the evaluation loss turns up again. save_strategy must be
    eval_strategy."""
