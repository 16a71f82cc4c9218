"""Settings of logging, checkpoints and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import STEPS, Count, Group, Interval, Mark, Needs, NonNegative
from megatune.references import assign, ref, remove, write

_STREAMING, _BY_STEPS = "data.streaming", "the number of steps per epoch is not known while rows are read"
_TENSORBOARD = Needs("logging.report_to", ("tensorboard", "all"))
_WANDB = Needs("logging.report_to", ("wandb", "all"))
_SWANLAB = Needs("logging.report_to", ("swanlab", "all"), otherwise=Needs("logging.use_swanlab", (True,)))
_PROFILE = Needs("logging.profile", (True,))
_SAVE_STEPS = Needs(_STREAMING, (False,), _BY_STEPS, write("save_strategy", "steps"), of=("epoch",))
_EVAL_STEPS = Needs(_STREAMING, (False,), _BY_STEPS, write("eval_strategy", "steps"), of=("epoch",))
_ROWS = Needs(
    "data.val_size",
    why="there is nothing to evaluate on",
    fix=f"{write('val_size', 0.1)} to hold out a tenth of the rows, name an {ref('eval_dataset')}, "
    f"or {write('eval_strategy', 'no')}",
    otherwise=Needs("data.eval_dataset"),
)
_EVALUATES = Needs("evaluation.eval_strategy", ("steps", "epoch"), "nothing is evaluated")
_TOKENS = Needs("run.stage", ("pt", "sft"), "other stages report how often the right answer wins")
_NAMED = Needs("data.eval_dataset", why="it names the evaluated data sets")
_PREPARED = Needs(_STREAMING, (False,), "the evaluation rows are those that the stream leaves out")
_GENERATES = Needs("evaluation.eval_generate_steps", otherwise=Needs("evaluation.predict_with_generate", (True,)))
_WRITES = Needs(
    "run.stage", ("pt", "sft", "dpo", "kto"), "a model with scores generates no text", remove("{name}"), off=(False,)
)
_WHOLE_MODEL = Needs(
    "finetuning.finetuning_type",
    ("full", "freeze"),
    "an adapter checkpoint contains no model, and Megatron-Core has no common format for adapters",
    f"{write('save_format', 'hf')} and {assign('merge_lora', True)}, then megatune export --to_mcore true of "
    "output_dir/merged",
)
_NO_SCORE = Needs(
    "run.stage", ("pt", "sft", "dpo", "kto"), "Megatron-Core's language model has no score layer",
    write("save_format", "hf"),
)  # fmt: skip
_ADAPTER = Needs("finetuning.finetuning_type", ("lora",), "there is no adapter to merge")
_PUSH = Needs("checkpoint.push_to_hub", (True,))
_PUSHED = Needs("checkpoint.push_to_hub", (True,), "nothing would be pushed", is_lenient=True)


class LoggingSettings(Group):
    logging_steps: Interval = 10
    """Steps between log lines; the logged loss is the mean over these steps. Below 1 it is a fraction of all steps.
    How: It applies to the console, metrics.jsonl, trainer_log.jsonl and TensorBoard. It is also the default of
    eval_steps.
    When: 1 for short runs, 10 to 100 for long ones."""
    report_to: list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "none", "all"]] = Field(
        default=["tensorboard"]
    )
    """Trackers that get the metrics in addition to the log files, one or several.
    How: trainer_log.jsonl and metrics.jsonl are always written to output_dir. Each tracker has its own thread on rank
    0: one that fails or hangs causes a warning and never stops the run. A resumed run continues the same run in the
    tracker.
    When: none if you do not use TensorBoard. The others need their library: pip install "megatune[wandb]".
    - tensorboard: event files in tensorboard_dir
    - wandb: Weights & Biases, also without a network (WANDB_MODE=offline)
    - swanlab: SwanLab, also without a network (swanlab_mode)
    - mlflow: MLflow, at MLFLOW_TRACKING_URI or else in files in output_dir/mlruns
    - none: the log files only
    - all: every tracker whose library is installed"""
    tensorboard_dir: Annotated[str, Mark.NAME, Mark.MACHINE, _TENSORBOARD] | None = None
    """Folder for TensorBoard's event files. null is output_dir/runs.
    How: The event files are in its subfolder with the name of the run.
    When: Set it to see the runs of many output folders in one TensorBoard."""
    wandb_project: Annotated[str, _WANDB] | None = None
    """The Weights & Biases project of the run. null takes WANDB_PROJECT, or else megatune.
    How: The run's name there is run_name; WANDB_ENTITY names the account or team, WANDB_API_KEY or `wandb login` logs
    in.
    When: Set it with wandb in report_to."""
    wandb_save_dir: Annotated[str, Mark.NAME, Mark.MACHINE, _WANDB] | None = None
    """Folder for local files of Weights & Biases. null takes WANDB_DIR, or else output_dir.
    How: They are in its subfolder wandb; `wandb sync` uploads those of an offline run later.
    When: Set it if output_dir is on a slow network file system."""
    use_swanlab: bool = False
    """Report to SwanLab, as swanlab in report_to does.
    How: It adds SwanLab to the trackers of report_to, even to none.
    When: For files that were written for LLaMA-Factory."""
    swanlab_project: Annotated[str, _SWANLAB] | None = None
    """The SwanLab project of the run. null takes SWANLAB_PROJ_NAME, or else megatune.
    How: The run's name there is run_name; SWANLAB_API_KEY or `swanlab login` logs in.
    When: Set it with swanlab in report_to."""
    swanlab_workspace: Annotated[str, _SWANLAB] | None = None
    """The SwanLab workspace of the project. null takes SWANLAB_WORKSPACE, or else that of the account.
    How: It is the name of a person or of an organization.
    When: Set it to log into an organization's project."""
    swanlab_mode: Annotated[Literal["cloud", "local", "offline"] | None, _SWANLAB] = None
    """Whether SwanLab uploads the metrics. null takes SWANLAB_MODE, or else cloud.
    How: Files are in output_dir/swanlog in every mode.
    When: offline if the training machines have no network: `swanlab sync` uploads the files later.
    - cloud: uploads them during the run
    - local: stores them for SwanLab's local dashboard
    - offline: stores them to be uploaded later"""
    swanlab_api_key: Annotated[str, Mark.SECRET] | None = None
    """API key of a SwanLab account. null takes SWANLAB_API_KEY, or the key that `swanlab login` has stored.
    How: It is never written to run.yaml, logs or checkpoints.
    When: Better leave it out and set SWANLAB_API_KEY: files are easily shared by mistake."""
    log_throughput: bool = True
    """Log tokens per second, TFLOP/s per device and the fraction of its peak (mfu).
    How: false leaves them out of the console and the trackers; metrics.jsonl always has them.
    When: Turn it off for short lines."""
    log_params_norm: bool = False
    """Log the L2 norm of all parameters as params_norm.
    How: Every parameter is counted once in any layout. It is computed at logged steps, with one read of the weights and
    one small collective.
    When: To see whether weights grow or shrink, for example with another weight_decay."""
    log_timers: bool = False
    """Log the seconds per step of forward and backward, of the optimizer and of waiting for data on rank 0.
    How: time_forward_backward, time_optimizer and time_data are means over the steps of a log line. The device is
    synchronized between the parts, which costs little.
    When: To see which part of a step is slow; profile shows why."""
    log_memory: bool = False
    """Log the memory of rank 0 at the end of a step, in addition to the peak of all ranks, in GiB.
    How: On a GPU they are memory_allocated_gib, memory_reserved_gib and memory_peak_gib of PyTorch's allocator; on a
    CPU memory_rss_gib, the resident memory of the process.
    When: To see whether memory grows from step to step."""
    log_validation_ppl: bool = True
    """Log the perplexity of an evaluation, exp(loss), in addition to its loss.
    How: false leaves it out of the console and the trackers; metrics.jsonl always has it.
    When: Turn it off if the loss is enough."""
    plot_loss: bool = True
    """Plot the loss to output_dir/training_loss.png, during training and at its end.
    How: It is plotted at most every 30 seconds, and takes at most 1 % of the time.
    When: Turn it off if matplotlib is slow to start or not wanted."""
    profile: bool = False
    """Profile a few steps with torch.profiler.
    How: output_dir/profile gets a trace of each profiled rank (rank-K.json.gz, for Perfetto or chrome://tracing) and a
    table of its slowest operators (rank-K.txt). GPU allocations are recorded, too: a rank that runs out of memory
    writes memory-rank-K.pickle, for pytorch.org/memory_viz.
    When: To see what makes a step slow. Profiled steps are slower."""
    profile_step_start: Annotated[int, Field(ge=0), "steps", _PROFILE] = 10
    """Start profiling after this step.
    How: The first steps of a process are slower than the others: 2 or more skips them.
    When: Lower it in a short run."""
    profile_step_end: Annotated[Count, "steps", _PROFILE] = 12
    """The last step to profile.
    How: A trace grows with its steps: a few hundred megabytes per step for a large model.
    When: One to three steps after profile_step_start."""
    profile_ranks: Annotated[list[int], _PROFILE] = Field(default=[0])
    """The ranks that are profiled.
    How: Each writes its own files; the other ranks have no overhead, but wait for these.
    When: Add the last stage's rank, or one that is slow."""


class CheckpointSettings(Group):
    save_strategy: Annotated[Literal["steps", "epoch", "no"], _SAVE_STEPS] = "steps"
    """When checkpoints are saved. The end of the run always saves.
    How: A checkpoint is written under a temporary name, checksummed and renamed, so it is either complete or not there.
    All processes write at the same time, and training waits; with async_save it waits only for a copy.
    When: steps, for runs that may be interrupted.
    - steps: every save_steps
    - epoch: after every epoch
    - no: only at the end"""
    save_steps: Annotated[Interval, Needs("checkpoint.save_strategy", ("steps",))] = 500
    """Steps between checkpoints. Below 1 it is a fraction of all steps, rounded up, as in Transformers.
    How: At most this many steps are lost if a machine fails. Each save takes the time to write the model and its
    training state, about 14 bytes per parameter in bf16.
    When: Choose it so that the run saves every 15 to 60 minutes."""
    async_save: bool = False
    """Write checkpoints in the background: training waits only until they are copied to host memory.
    How: Each process copies what it will write, about 14 bytes per parameter in bf16 over all processes. Only one
    checkpoint is written at a time: the next one waits for it. The last save of a run is synchronous, and so is one
    that there is not enough memory for.
    When: Use it if a save takes much longer than a step and the machines have that much free memory."""
    save_total_limit: Annotated[Count, "checkpoints"] | None = None
    """Keep only this many checkpoints, the newest ones. null keeps all of them.
    How: Older ones are deleted after a new one is complete. The best one is kept with load_best_model_at_end.
    When: 2 or 3 if the disk is small: a checkpoint of an 8B model takes about 115 GB."""
    save_only_model: bool = False
    """Leave out the training state: checkpoints are a seventh of the size (in fp32 a third), and cannot be resumed
    from.
    How: Only the Hugging Face model is written.
    When: Use it if checkpoints will be evaluated but not resumed from."""
    save_format: Annotated[Literal["hf", "torch_dist"], _WHOLE_MODEL, _NO_SCORE] = "hf"
    """Whether the model is also written in Megatron-Core's format.
    How: One process writes it from the finished safetensors, tensor by tensor, while the others wait: a checkpoint
    takes the model's size once more on disk, and the time to read and write it. Resuming does not need it; adapters
    alone do not have this format.
    When: torch_dist, to continue with Megatron-LM or Megatron-SWIFT; `megatune export --to_mcore true` converts any
    checkpoint later.
    - hf: a Hugging Face model only
    - torch_dist: also iter_N and latest_checkpointed_iteration.txt"""
    merge_lora: Annotated[bool, _ADAPTER] = False
    """With finetuning_type: lora: also write the model with the trained adapter merged into it, at the end of the run.
    How: output_dir/merged gets a full model: each matrix and the product of its adapter are added in fp32, and rounded
    once to the dtype of the base. Checkpoints contain the adapter only.
    When: Turn it on to serve the model without peft; `megatune export` does the same later."""
    push_to_hub: bool = False
    """Upload the model to a hub: Hugging Face's, or ModelScope's with USE_MODELSCOPE_HUB=1.
    How: A thread of rank 0 uploads the files of the model and a generated model card, without the training state. A
    push that fails or hangs causes a warning that says how to push later, and never stops the run.
    When: To share a model, or to keep it if the machine is temporary."""
    hub_model_id: Annotated[str, Mark.NAME, _PUSHED] | None = None
    """The repository to push to: OWNER/NAME, or NAME in the account of the token. null takes output_dir's name.
    How: It is created if it does not exist.
    When: Set it if the model should not have the name of output_dir."""
    hub_private_repo: Annotated[bool, _PUSH] | None = None
    """Whether a repository that a push creates is private. null takes the hub's default: public, unless the
    organization has another default.
    How: An existing repository does not change.
    When: true if nobody else should see the model yet."""
    hub_strategy: Annotated[Literal["every_save", "end"], _PUSH] = "every_save"
    """When to push.
    How: At most one push runs at a time; of the checkpoints saved meanwhile, the newest is pushed next.
    When: end if the upload is slow, or if checkpoints in between are not needed.
    - every_save: every checkpoint, and the final model
    - end: the final model only"""
    hub_token: Annotated[str, Mark.SECRET] | None = None
    """Token of the hub, with write access. null takes HF_TOKEN, or MODELSCOPE_API_TOKEN for ModelScope, or the one that
    the hub's login has stored.
    How: It is never written to run.yaml, logs or checkpoints. Models and data sets are also downloaded with it.
    When: Better leave it out and set the variable: files are easily shared by mistake."""


class EvaluationSettings(Group):
    eval_strategy: Annotated[Literal["no", "steps", "epoch"], _ROWS, _EVAL_STEPS] = "no"
    """When to evaluate. It needs val_size or eval_dataset.
    How: The loss over all held-out rows is computed without training on them, and logged with its perplexity.
    When: steps to monitor a run, epoch for a few passes over small data.
    - no: never
    - steps: every eval_steps, and at the end
    - epoch: after every epoch"""
    eval_steps: Annotated[Interval, Needs("evaluation.eval_strategy", ("steps",))] | None = None
    """Steps between evaluations. null takes logging_steps, as Transformers does.
    How: Below 1 it is a fraction of all steps, rounded up. The last step is always evaluated.
    When: Set it: logging_steps is often too frequent. With load_best_model_at_end save_steps must be a multiple of
    it."""
    load_best_model_at_end: bool = False
    """Use the checkpoint with the lowest evaluation loss as the final model, instead of the last one.
    How: The final model in output_dir is copied from that checkpoint, which is never deleted.
    When: Use it if the run has more epochs than needed and the evaluation loss rises again. save_strategy must equal
    eval_strategy."""
    early_stopping_steps: Annotated[Count, "evaluations", _EVALUATES] | None = None
    """Stop the run after this many evaluations in a row without a new lowest loss. null trains all steps.
    How: The run then saves as at its last step. The learning-rate schedule still is that of all configured steps.
    When: 2 to 5, with load_best_model_at_end, if the run has more epochs than it may need."""
    eval_on_start: Annotated[bool, _EVALUATES] = False
    """Also evaluate before the first step.
    How: It is logged as step 0, and is not a candidate for the best checkpoint.
    When: To have a baseline, and to know that evaluation works before hours of training."""
    eval_delay: Annotated[NonNegative, "steps, or epochs", _EVALUATES] = 0.0
    """Evaluate and generate answers only after this many steps, or epochs with eval_strategy: epoch.
    How: The last step is always evaluated, and eval_on_start still evaluates before the first step.
    When: Use it if evaluation takes long, and the loss of early steps does not matter."""
    compute_accuracy: Annotated[bool, _EVALUATES, _TOKENS] = False
    """At every evaluation, compute the accuracy: how often the label is the most likely token.
    How: eval_accuracy is the accuracy over the trained tokens of each sample, averaged over all samples with such
    tokens. The output layer computes the logits of evaluation rows a second time.
    When: For answers of one token, such as a class or a letter; for longer ones the loss is more informative."""
    eval_on_each_dataset: Annotated[bool, Mark.ROWS, _NAMED, _EVALUATES, _TOKENS, _PREPARED] = False
    """Also log the loss of each data set of eval_dataset separately, as eval_NAME_loss.
    How: Each is evaluated in separate rows; eval_loss is that of all their tokens, and decides the best checkpoint.
    With compute_accuracy eval_NAME_accuracy is logged, too.
    When: Use it if the data sets are different tasks, of which one may become worse while the mean improves."""
    predict_with_generate: Annotated[bool, _WRITES] = False
    """Generate and score answers at every evaluation, in addition to the loss.
    How: All processes answer the prompts of held-out rows, or of eval_generate_prompts, by greedy decoding with the
    current weights. generations.jsonl gets the answers, metrics.jsonl and trackers the scores: exact_match,
    choice_accuracy if all answers are letters, rouge1, rouge2, rougeL and bleu.
    When: To read what the model learns. ROUGE and BLEU need pip install "megatune[evaluate]"."""
    eval_generate_steps: Annotated[Count, "steps", STEPS, _WRITES] | None = None
    """Generate answers every this many steps, and at the end, as predict_with_generate does. null leaves it to that
    setting.
    How: It is independent of the evaluation of the loss. There is no KV cache in training: each token of the longest
    answer costs one forward pass over all unfinished prompts.
    When: 100 to 1000, so that generation takes a small part of the time."""
    eval_generate_samples: Annotated[Count, "prompts", _GENERATES] = 16
    """How many of the first prompts are answered.
    How: They are distributed over the data-parallel processes, in micro-batches of per_device_eval_batch_size.
    When: Raise it for meaningful scores: with 16 prompts one answer changes exact_match by 0.06."""
    eval_generate_tokens: Annotated[Count, "tokens", _GENERATES] = 64
    """Maximum number of tokens per generated answer.
    How: An answer ends earlier at a stop token of the model's generation_config.json. Finished answers cost nothing
    more.
    When: The length of the expected answers; twice as many take about twice as long."""
    eval_generate_prompts: Annotated[str, Mark.NAME, _GENERATES] | None = None
    """A file or data set with the prompts, instead of held-out rows: named as in eval_dataset, or a .txt file with one
    prompt per line.
    How: Rows are read like training rows, with the same template. If a row has an answer, the generated one is compared
    with it; otherwise it is only stored. In stage pt texts are continued.
    When: For a fixed set of questions that represents the model's use, also if nothing is held out."""
