"""What a run reports, saves and evaluates, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import STEPS, Count, Group, Interval, Mark, Needs, NonNegative

_STREAMING, _BY_STEPS = "data.streaming", "how many steps an epoch has is not known while rows are read"
_TENSORBOARD = Needs("logging.report_to", ("tensorboard", "all"))
_WANDB = Needs("logging.report_to", ("wandb", "all"))
_SWANLAB = Needs("logging.report_to", ("swanlab", "all"), otherwise=Needs("logging.use_swanlab", (True,)))
_PROFILE = Needs("logging.profile", (True,))
_SAVE_STEPS = Needs(_STREAMING, (False,), _BY_STEPS, "write `save_strategy: steps`", of=("epoch",))
_EVAL_STEPS = Needs(_STREAMING, (False,), _BY_STEPS, "write `eval_strategy: steps`", of=("epoch",))
_ROWS = Needs(
    "data.val_size",
    why="there is nothing to evaluate on",
    fix="write `val_size: 0.1` to hold out a tenth of the rows, name an `eval_dataset`, or write `eval_strategy: no`",
    otherwise=Needs("data.eval_dataset"),
)
_EVALUATES = Needs("evaluation.eval_strategy", ("steps", "epoch"), "nothing is evaluated")
_TOKENS = Needs("run.stage", ("pt", "sft"), "other stages report how often the right answer wins")
_NAMED = Needs("data.eval_dataset", why="it names the data sets that are evaluated")
_PREPARED = Needs(_STREAMING, (False,), "rows to evaluate are those that the stream leaves out")
_GENERATES = Needs("evaluation.eval_generate_steps", otherwise=Needs("evaluation.predict_with_generate", (True,)))
_WRITES = Needs(
    "run.stage", ("pt", "sft", "dpo", "kto"), "a model with scores writes no text", "remove `{name}`", off=(False,)
)
_WHOLE_MODEL = Needs(
    "finetuning.finetuning_type",
    ("full", "freeze"),
    "a checkpoint of adapters holds no model, and Megatron-Core has no form of them that others read",
    "write `save_format: hf` and `merge_lora: true`, then megatune export --to_mcore true of output_dir/merged",
)
_NO_SCORE = Needs(
    "run.stage",
    ("pt", "sft", "dpo", "kto"),
    "Megatron-Core's language model has no place for scores",
    "write `save_format: hf`",
)
_ADAPTER = Needs("finetuning.finetuning_type", ("lora",), "there is no adapter to merge")
_PUSH = Needs("checkpoint.push_to_hub", (True,))
_PUSHED = Needs("checkpoint.push_to_hub", (True,), "nothing would be pushed", is_lenient=True)


class LoggingSettings(Group):
    logging_steps: Interval = 10
    """Steps from one log line to the next; its loss is the mean over those steps. Below 1 it is a share of all steps.
    How: The console, metrics.jsonl, trainer_log.jsonl and TensorBoard all have these lines. eval_steps: null takes it,
    too.
    When: 1 for short runs, 10 to 100 for long ones."""
    report_to: list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "none", "all"]] = Field(
        default=["tensorboard"]
    )
    """Where the numbers go beside the log files, one or several.
    How: trainer_log.jsonl and metrics.jsonl are always written to output_dir. A tracker has a thread of its own on rank
    0: one that fails or hangs costs a warning, never the run. A resumed run goes on in the tracker's run it began.
    When: none where nobody looks at TensorBoard. The others need their library: pip install "megatune[wandb]".
    - tensorboard: event files in tensorboard_dir
    - wandb: Weights & Biases, also without a network (WANDB_MODE=offline)
    - swanlab: SwanLab, also without a network (swanlab_mode)
    - mlflow: the store that MLFLOW_TRACKING_URI names, or else files in output_dir/mlruns
    - none: the log files only
    - all: every one of them whose library is installed"""
    tensorboard_dir: Annotated[str, Mark.NAME, Mark.MACHINE, _TENSORBOARD] | None = None
    """Folder for TensorBoard's event files. null is output_dir/runs.
    How: The event files lie in a folder of the run's name in it.
    When: Set it where one TensorBoard looks at the runs of many output folders."""
    wandb_project: Annotated[str, _WANDB] | None = None
    """Project of Weights & Biases that the run belongs to. null takes WANDB_PROJECT, or else megatune.
    How: The run is called run_name there; WANDB_ENTITY names the account or team, WANDB_API_KEY or `wandb login` logs
    in.
    When: Set it with wandb in report_to."""
    wandb_save_dir: Annotated[str, Mark.NAME, Mark.MACHINE, _WANDB] | None = None
    """Folder in which Weights & Biases keeps its files of the run. null takes WANDB_DIR, or else output_dir.
    How: They lie in a folder called wandb in it; `wandb sync` sends those of an offline run later.
    When: Set it where output_dir is on a slow network file system."""
    use_swanlab: bool = False
    """Report to SwanLab, as swanlab in report_to does.
    How: It adds SwanLab to what report_to names, also to none.
    When: For files that were written for LLaMA-Factory."""
    swanlab_project: Annotated[str, _SWANLAB] | None = None
    """Project of SwanLab that the run belongs to. null takes SWANLAB_PROJ_NAME, or else megatune.
    How: The run is called run_name there; SWANLAB_API_KEY or `swanlab login` logs in.
    When: Set it with swanlab in report_to."""
    swanlab_workspace: Annotated[str, _SWANLAB] | None = None
    """Workspace of SwanLab that has the project. null takes SWANLAB_WORKSPACE, or else that of the account.
    How: It is the name of a person or of an organization.
    When: Set it to log into an organization's project."""
    swanlab_mode: Annotated[Literal["cloud", "local", "offline"] | None, _SWANLAB] = None
    """Whether SwanLab's numbers leave the machine. null takes SWANLAB_MODE, or else cloud.
    How: Files are in output_dir/swanlog in every mode.
    When: offline where training machines have no network: `swanlab sync` sends the files later.
    - cloud: sends them while the run goes on
    - local: keeps them for SwanLab's own page on this machine
    - offline: keeps them to be sent later"""
    swanlab_api_key: Annotated[str, Mark.SECRET] | None = None
    """Key of an account of SwanLab. null takes SWANLAB_API_KEY, or what `swanlab login` has stored.
    How: It is never written: neither to run.yaml nor to logs or checkpoints.
    When: Better leave it out and set SWANLAB_API_KEY: a file is easily shared by mistake."""
    log_throughput: bool = True
    """Log tokens per second, TFLOP/s per device and their share of its peak (mfu).
    How: false leaves them out of the console and the trackers; metrics.jsonl always has them.
    When: Turn it off for short lines."""
    log_params_norm: bool = False
    """Log the L2 norm of all parameters as params_norm.
    How: Every parameter is counted once in any layout. It is computed at the steps that are logged, with one read of
    the weights and one small exchange.
    When: To see whether weights grow or shrink, such as with another weight_decay."""
    log_timers: bool = False
    """Log the seconds of a step that forward and backward, the optimizer and waiting for data take on rank 0.
    How: time_forward_backward, time_optimizer and time_data are means over the steps of a line. The device is waited
    for between the parts, which costs little.
    When: To see which part of a step is slow; profile says why."""
    log_memory: bool = False
    """Log what memory rank 0 holds at the end of a step, beside the peak of all ranks, in GiB.
    How: Of a GPU memory_allocated_gib, memory_reserved_gib and memory_peak_gib, as PyTorch's allocator counts them; on
    a CPU memory_rss_gib, all that the process holds.
    When: To see whether memory grows from step to step."""
    log_validation_ppl: bool = True
    """Log the perplexity of an evaluation, exp(loss), beside its loss.
    How: false leaves it out of the console and the trackers; metrics.jsonl always has it.
    When: Turn it off where the loss says enough."""
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
    profile_step_start: Annotated[int, Field(ge=0), "steps", _PROFILE] = 10
    """Profile from the step after this one on.
    How: The first steps of a process are slower than the others: 2 or more leaves them out.
    When: Lower it in a short run."""
    profile_step_end: Annotated[Count, "steps", _PROFILE] = 12
    """The last step to profile.
    How: A trace grows with its steps: of a large model a few hundred megabytes a step.
    When: One to three steps after profile_step_start."""
    profile_ranks: Annotated[list[int], _PROFILE] = Field(default=[0])
    """The ranks that profile.
    How: Each writes its own files; the other ranks are not slowed down, but wait for these.
    When: Add the last stage's rank, or one that is slow."""


class CheckpointSettings(Group):
    save_strategy: Annotated[Literal["steps", "epoch", "no"], _SAVE_STEPS] = "steps"
    """When checkpoints are saved. The end of the run always saves.
    How: A checkpoint is written beside its final name, digested and renamed: it is whole or not there. All processes
    write at the same time, and training waits, with async_save only for a copy.
    When: steps, for runs that may be interrupted.
    - steps: every save_steps
    - epoch: after every epoch
    - no: only at the end"""
    save_steps: Annotated[Interval, Needs("checkpoint.save_strategy", ("steps",))] = 500
    """Steps from one checkpoint to the next. Below 1 it is a share of all steps, rounded up, as in Transformers.
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
    save_format: Annotated[Literal["hf", "torch_dist"], _WHOLE_MODEL, _NO_SCORE] = "hf"
    """Whether the model is written in Megatron-Core's format, too.
    How: One process writes it from the safetensors, tensor by tensor, after those are whole, and the others wait: a
    checkpoint takes the model's size once more on disk, and the time of reading and writing it. Resuming does not need
    it; adapters alone have no such form.
    When: torch_dist, to hand on to Megatron-LM or Megatron-SWIFT; `megatune export --to_mcore true` makes the same of
    any checkpoint later.
    - hf: a Hugging Face model only
    - torch_dist: iter_N and latest_checkpointed_iteration.txt beside it"""
    merge_lora: Annotated[bool, _ADAPTER] = False
    """With finetuning_type: lora, write the model with the trained adapter merged into it as well, at the end of the
    run.
    How: output_dir/merged gets a whole model: each matrix and the product of its adapter are added in fp32, and rounded
    once to the dtype of the base. Checkpoints keep the adapter alone.
    When: Turn it on to serve the model without peft; `megatune export` does the same later."""
    push_to_hub: bool = False
    """Upload the model to a hub: Hugging Face's, or ModelScope's with USE_MODELSCOPE_HUB=1.
    How: The files of the model and a card made from the run are sent, without the training state, by a thread of rank
    0. A push that fails or hangs costs a warning that says how to push later, never the run.
    When: To share a model, or to have it where the machine does not stay."""
    hub_model_id: Annotated[str, Mark.NAME, _PUSHED] | None = None
    """The repository to push to: OWNER/NAME, or NAME of the token's own account. null takes output_dir's name.
    How: It is created where there is none.
    When: Set it where the name of output_dir is not to be that of the model."""
    hub_private_repo: Annotated[bool, _PUSH] | None = None
    """Whether a repository that a push creates is private. null leaves that to the hub: public, unless the organization
    has another default.
    How: A repository that is there stays as it is.
    When: true where nobody else is to see the model yet."""
    hub_strategy: Annotated[Literal["every_save", "end"], _PUSH] = "every_save"
    """When to push.
    How: At most one push is under way; of checkpoints that were saved meanwhile the newest is sent next.
    When: end where the upload is slow, or checkpoints in between are of no use.
    - every_save: every checkpoint, and the final model
    - end: the final model only"""
    hub_token: Annotated[str, Mark.SECRET] | None = None
    """Token of the hub, with the right to write. null takes HF_TOKEN, or for ModelScope MODELSCOPE_API_TOKEN, or what
    the hub's login has stored.
    How: It is never written: neither to run.yaml nor to logs or checkpoints. Models and data sets are fetched with it,
    too.
    When: Better leave it out and set the variable: a file is easily shared by mistake."""


class EvaluationSettings(Group):
    eval_strategy: Annotated[Literal["no", "steps", "epoch"], _ROWS, _EVAL_STEPS] = "no"
    """When to evaluate. Needs val_size or eval_dataset.
    How: The loss over all held-out rows is computed without updates, and logged with its perplexity.
    When: steps to watch a run, epoch for a few passes over small data.
    - no: never
    - steps: every eval_steps, and at the end
    - epoch: after every epoch"""
    eval_steps: Annotated[Interval, Needs("evaluation.eval_strategy", ("steps",))] | None = None
    """Steps from one evaluation to the next. null takes logging_steps, as Transformers does.
    How: Below 1 it is a share of all steps, rounded up. The last step is always evaluated.
    When: Set it: logging_steps is often too frequent. With load_best_model_at_end save_steps is a multiple of it."""
    load_best_model_at_end: bool = False
    """Finish with the checkpoint of the lowest evaluation loss instead of the last.
    How: The final model in output_dir is copied from that checkpoint, which is never deleted.
    When: Where more epochs than needed are run and the evaluation loss turns up again. save_strategy must be
    eval_strategy."""
    early_stopping_steps: Annotated[Count, "evaluations", _EVALUATES] | None = None
    """Finish the run after this many evaluations in a row without a lower loss than before. null trains all steps.
    How: The step of the last of them is saved as the last one of a run is. The learning rate follows all steps that
    were given.
    When: 2 to 5, with load_best_model_at_end, where more epochs are given than may be needed."""
    eval_on_start: Annotated[bool, _EVALUATES] = False
    """Evaluate before the first step, too.
    How: It is logged as step 0, and is no candidate for the best checkpoint.
    When: To see what training changes, and that evaluation works before hours of it."""
    eval_delay: Annotated[NonNegative, "steps, or epochs", _EVALUATES] = 0.0
    """Evaluate, and write answers, no earlier than after this many steps; with eval_strategy: epoch, epochs.
    How: The last step is always evaluated, and eval_on_start evaluates before the first one all the same.
    When: Where evaluation takes long, and nobody asks for the loss of an early step."""
    compute_accuracy: Annotated[bool, _EVALUATES, _TOKENS] = False
    """At every evaluation, count how often the label is the likeliest token.
    How: eval_accuracy is the share of a text's trained tokens, as a mean over all texts with such tokens. The output
    layer computes the logits of evaluation rows a second time.
    When: For answers that are one token, such as a class or a letter; the loss says more of longer ones."""
    eval_on_each_dataset: Annotated[bool, Mark.ROWS, _NAMED, _EVALUATES, _TOKENS, _PREPARED] = False
    """Log the loss of each data set of eval_dataset by itself, too, as eval_NAME_loss.
    How: Each is evaluated in rows of its own; eval_loss is that of all their tokens, by which the best checkpoint is
    chosen. With compute_accuracy there is an eval_NAME_accuracy.
    When: Where data sets are of several tasks, and one may become worse while all together become better."""
    predict_with_generate: Annotated[bool, _WRITES] = False
    """Write answers at every evaluation, and score them, beside the loss.
    How: The prompts of held-out rows, or eval_generate_prompts, are answered by the weights as they are on all
    processes, greedily. generations.jsonl keeps the answers, metrics.jsonl and trackers the scores: exact_match,
    choice_accuracy where all answers are letters, rouge1, rouge2, rougeL and bleu.
    When: To read what a run learns. Needs pip install "megatune[evaluate]" for ROUGE and BLEU."""
    eval_generate_steps: Annotated[Count, "steps", STEPS, _WRITES] | None = None
    """Write answers every so many steps, and at the end; as predict_with_generate does. null leaves it to that.
    How: Evaluation of the loss keeps its own steps, and is not needed. Training has no cache of keys and values: each
    token of the longest answer costs one forward pass over all prompts that are not answered yet.
    When: 100 to 1000, so that answers take a small part of the time."""
    eval_generate_samples: Annotated[Count, "prompts", _GENERATES] = 16
    """How many prompts are answered: the first ones.
    How: They are dealt to the data-parallel processes, in micro-batches of per_device_eval_batch_size.
    When: Raise it for scores that say something: with 16 prompts one answer moves exact_match by 0.06."""
    eval_generate_tokens: Annotated[Count, "tokens", _GENERATES] = 64
    """Tokens of such an answer at most.
    How: An answer ends before that at a token of the model's generation_config.json. All answers that have ended cost
    nothing more.
    When: As long as the answers that are wanted; twice as many take about twice as long."""
    eval_generate_prompts: Annotated[str, Mark.NAME, _GENERATES] | None = None
    """A file or data set with the prompts, in place of held-out rows: as eval_dataset names one, or a .txt file with a
    prompt a line.
    How: Rows are read as those of training, and written by the same template. An answer of their own is what scores
    compare with; of rows without one the answers are only kept. In stage pt texts are continued.
    When: For a fixed set of questions that says what the model is for, also where nothing is held out."""
