"""Settings of the run, and of the model that it starts from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Limit, Mark, Needs, Positive
from megatune.references import assign, remove, write

# Stages that train on preference pairs.
PAIR_STAGES = ("dpo", "rm")


_NO_OVERWRITE = Needs(
    "run.overwrite_output_dir", (False,),
    "one starts over, the other resumes from the newest checkpoint of the same folder", of=(True,),
)  # fmt: skip
_WHOLE_MODEL = Needs(
    "finetuning.finetuning_type", ("full", "freeze"),
    "an adapter does not record that its base model has scaled rotary embeddings",
    f"{write('merge_lora', True)}, or {remove('rope_scaling')}", otherwise=Needs("checkpoint.merge_lora", (True,)),
)  # fmt: skip
_ONE_MORE = Limit(1, "published checkpoints have one such layer, and more are not supported")
_TOKENS = Needs("run.stage", ("pt", "sft"), "they predict tokens of texts, and other stages train on whole answers")
_WEIGHTS = Needs(
    "finetuning.finetuning_type",
    ("full",),
    "peft does not support adapters of such layers, so their weights are fully trained",
)
_HF = Needs("checkpoint.save_format", ("hf",), "Megatron-Core's format is written without such layers")
_FILES = Needs("model.mcore_model", (None,), "such layers are read from a Hugging Face checkpoint")
_NO_NOISE = Needs(
    "finetuning.neftune_noise_alpha",
    (None,),
    "noise is added to the decoder's inputs, and is not defined for the inputs of such a layer",
)
_PREDICTS = Needs("model.mtp_num_layers", least=1)
_DESCRIBED = Needs(
    "model.new_special_tokens_config", (), "new tokens are initialized from the descriptions in its file"
)
_SAVES = Needs(
    "checkpoint.save_strategy", ("steps", "epoch"), "there would be no checkpoint to go back to",
    f"{write('save_strategy', 'steps')}, or {assign('on_bad_step', 'skip')}", of=("go_back",),
)  # fmt: skip
_WHOLE = Needs(
    "checkpoint.save_only_model", (False,), "a run cannot resume from a checkpoint without its training state",
    f"{write('save_only_model', False)}, or {assign('on_bad_step', 'skip')}", of=("go_back",),
)  # fmt: skip
_GOES_ON = Needs("run.on_bad_step", ("skip", "go_back"), "the first bad step ends the run", is_method=True)
_CLASSIFIES = Needs("run.stage", ("cls",), "it sets what a classifier outputs for a row", is_method=True)
_MOST_LABELS = Limit(100_000, "every rank holds the whole score layer, and its outputs for every token")
_CLOCK = Limit(10**9, "a billion seconds are 31 years, and clocks that count nanoseconds end at 292")


class RunSettings(Group):
    stage: Annotated[Literal["pt", "sft", "dpo", "kto", "rm", "cls"], Mark.ROWS] = "sft"
    """The kind of training: it decides which form of data is read and which tokens are trained.
    How: The stage decides how a row becomes tokens and labels; model, optimizer and layout are the same in all stages.
    The loss is the mean over all trained tokens of the global batch; for dpo and rm it is the mean over pairs, for kto
    over answers, for cls over rows.
    When: pt teaches a language or a domain from plain text; sft teaches behaviour from conversations; dpo comes after
    sft, and teaches which of two answers is better; kto does so with single answers that people liked or disliked, if
    there are no pairs; rm trains a model that scores answers, for reinforcement learning or to choose among answers;
    cls trains a model that assigns classes, or numbers, to texts. Rows of pt are packed unless packing says otherwise.
    - pt: trains on every token of plain text
    - sft: trains on the assistant's turns of conversations
    - dpo: trains on pairs of a chosen and a rejected answer, with the loss that pref_loss names
    - kto: trains on answers labelled desirable or undesirable, with the loss that kto_loss names
    - rm: trains a reward model on pairs of answers: a score replaces the output layer
    - cls: trains a classifier on conversations with a label: num_labels scores replace the output layer"""
    num_labels: Annotated[Count, "scores", _MOST_LABELS, Mark.ROWS, _CLASSIFIES] | None = None
    """With stage cls: the number of scores that the classifier outputs for a row: its classes, or the values of a
    regression.
    How: They are read at the row's last token, and replace the output layer. A model that is already a classifier must
    have the same number; a language model gets new ones, initialized from the seed.
    When: Required with stage cls. Labels count from 0, so this is one more than the largest."""
    problem_type: (
        Annotated[
            Literal["regression", "single_label_classification", "multi_label_classification"], Mark.ROWS, _CLASSIFIES
        ]
        | None
    ) = None
    """With stage cls: what labels are, which decides the loss. null is regression with num_labels 1, and
    single_label_classification otherwise.
    How: The losses are those of Transformers' ...ForSequenceClassification, whose config.json keeps the choice.
    When: Set it if several classes may apply at once, or if a row has several numbers.
    - regression: a number, or a list of num_labels of them; the mean squared error
    - single_label_classification: the number of a class; cross-entropy of the classes
    - multi_label_classification: a list of class numbers, which may be empty; binary cross-entropy of each class"""
    output_dir: Annotated[str, Mark.NAME] | None = None
    """Folder for checkpoints, logs and the final model.
    How: A run that is started again with the same folder resumes from its newest complete checkpoint. Every checkpoint
    takes the model's size on disk, plus about 12 bytes per parameter for its training state (8 in fp32).
    When: Use a new folder for every new run, on a disk that all machines of the run share. Use the old folder to
    continue a run."""
    overwrite_output_dir: Annotated[bool, Mark.START] = False
    """Start from the first step even if output_dir has checkpoints to resume from; they are deleted.
    How: If resume_from_checkpoint names a checkpoint, only those of later steps are deleted, just before training
    starts.
    When: Turn it on to repeat a run in the same folder. Leave it off in jobs that a scheduler restarts: each restart
    would begin at step 0."""
    resume_from_checkpoint: Annotated[bool | str | None, Mark.NAME, Mark.START, _NO_OVERWRITE] = None
    """The checkpoint to resume from: null takes the newest complete one of output_dir if there is one, true requires
    one, false never resumes, a path names the checkpoint.
    How: Optimizer, learning-rate schedule, random states and the position in the data are restored, and checksums are
    verified while files are read. The layout may differ from the one that saved it; in the same layout the run
    continues bit for bit, on GPUs with deterministic_mode.
    When: null is right for nearly every run. Use true if a start from step 0 would be a mistake, and a path to return
    to an earlier step."""
    no_load_optim: bool = False
    """Resume with a fresh optimizer: without moments and loss scale; master weights are copied from the model's
    weights.
    How: Step, schedule, position in the data and random states still come from the checkpoint. It has no effect on a
    run that does not resume.
    When: Use it if the optimizer or its settings were changed, or if its state is damaged."""
    no_load_rng: bool = False
    """Resume with random states derived from seed instead of those of the checkpoint.
    How: It changes the dropout masks, but not the order of rows. Without dropout the run is the same bit for bit.
    When: Rarely needed: if the states of the random number generators cannot be read."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Mark.ROWS] = 42
    """Seeds the order of rows, the held-out split, packing and the random numbers of training.
    How: The order of rows is a pure function of the seed and the epoch, in every layout. The same seed in the same
    layout gives the same run, bit for bit; on GPUs with deterministic_mode.
    When: Change it to measure how much of a result is due to chance. It also changes which rows val_size holds out."""
    num_processes: Annotated[Count, "processes"] | None = None
    """Number of processes of the whole run, one per GPU. null takes one for each GPU, and on a CPU as few as the layout
    allows.
    How: Processes that tensor, pipeline and context parallelism do not take become data parallelism. A run that
    torchrun starts has torchrun's processes instead.
    When: Set it on a CPU, to try the layout of a larger machine there, or to use only some of a machine's GPUs. On a
    CPU more data-parallel processes help only as long as there are cores for them."""
    use_cpu: bool = False
    """Train on the CPU of a machine that has GPUs.
    How: The run sees no GPU, as with an empty CUDA_VISIBLE_DEVICES. Without it, a run on a machine whose GPUs torch
    cannot use is refused, with the reason: a CPU build of torch, or a driver that is too old.
    When: Set it to try a layout with more processes than GPUs, or to look for a difference between the devices."""
    ddp_timeout: Annotated[int, Field(gt=0), "seconds", _CLOCK] = 1800
    """How long a collective operation may wait for the other processes before the run is stopped.
    How: It limits start-up, loading, saving and every collective. A process that makes no progress for this long, or
    for half an hour if that is less, is reported and the run stops.
    When: Raise it for slow storage or very large models, whose loading or saving takes longer. With a larger value a
    hang is noticed later."""
    exit_duration_in_mins: Annotated[float, Field(gt=0), "minutes"] | None = None
    """The time that the run may take, from the start of the command: before it is over, the run saves a checkpoint and
    exits with code 75, so that it can be resumed. null is no limit.
    How: The run stops after a step if the slowest step so far plus twice the longest save so far would not fit into the
    remaining time; before the first save, the loading time is used instead. Restarts by max_restarts share this time;
    running the command again starts with the full time.
    When: Set it a few minutes below the time limit of a job, such as Slurm's: a job that is killed at its limit has no
    time to save. In a job array each job continues where the previous one ended."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often a run that crashed or hung is restarted automatically from its newest complete checkpoint; 0 is never.
    How: A process that raises an error, dies, hangs or is killed for lack of memory is restarted; wrong settings, bad
    data, a full disk and non-finite numbers are not. The first wait is 5 seconds and doubles each time; the run gives
    up if it fails in the same way from the same checkpoint again.
    When: Set it to 3 for long unattended runs, with save_steps small enough that little is lost. It works on one
    machine only; torchrun restarts its own processes."""
    check_agreement_interval: Annotated[Count, "steps"] | None = None
    """Steps between checks that all copies of the same weights and gradients are equal across processes; null is off.
    How: At those steps gradients are compared before the update and weights after it, across all replicas. The first
    difference stops the run and names the ranks.
    When: Use it on new machines and to look for hardware faults: 100 finds a broken device at little cost. Leave it off
    once the machines are trusted."""
    on_bad_step: Annotated[Literal["stop", "skip", "go_back"], _SAVES, _WHOLE] = "stop"
    """What happens at a bad step: one whose loss or gradient norm is not finite, or above loss_spike_bound or
    grad_norm_spike_bound. Its gradients are never used.
    How: All processes take the same decision, from numbers that they exchange anyway, before the optimizer step. A
    skipped step counts as done: its rows are consumed, schedule and random states advance, weights and optimizer state
    stay unchanged, and a resumed run does the same bit for bit. The step, its numbers and its rows are recorded in
    output_dir/bad_steps.jsonl.
    When: Leave it at stop until you know what causes the spikes. skip is for single bad rows; go_back also helps if a
    hardware fault has damaged weights or optimizer state, since it reloads them from the checkpoint.
    - stop: ends the run with exit code 77 and names the rows
    - skip: leaves the weights unchanged and continues with the next step
    - go_back: restarts from the newest complete checkpoint, and leaves out this step and the one before it"""
    loss_spike_bound: Annotated[float, Field(gt=1)] | None = None
    """A step is bad if its loss is above m + (bound − 1) · |m|, which is bound times m for a positive loss. m is the
    median loss of the last 32 steps that were not bad. null is off.
    How: Steps are checked from the ninth such step on, at no cost. For losses near 0, such as preference losses, the
    ratio is meaningless: use grad_norm_spike_bound there.
    When: 2 or 3 in long runs, with on_bad_step. The larger the batch, the less noisy its loss, and the lower the bound
    may be."""
    grad_norm_spike_bound: Annotated[float, Field(gt=1)] | None = None
    """A step is bad if its gradient norm before clipping is above bound times the median of the last 32 steps that were
    not bad. null is off.
    How: Steps are checked from the ninth such step on, at no cost. max_grad_norm scales gradients down instead, and
    keeps their direction.
    When: 10 or more, with on_bad_step: gradients of single batches differ by a factor of a few in good runs, too."""
    max_bad_steps: Annotated[Count, "steps", _GOES_ON] = 10
    """How many bad steps a run with on_bad_step: skip or go_back tolerates; the next one stops it.
    How: They are counted over the whole run, including its resumes, so that a run in which nothing is learned does not
    continue forever.
    When: Raise it for runs of very many steps."""
    memory_check: Literal["error", "warn", "off"] = "error"
    """Whether the memory of every pipeline stage is estimated before the run starts, and what happens if it does not
    fit.
    How: Weights, gradients and optimizer state are counted exactly, activations and buffers are estimated: two of three
    published runs used between 1 / 1.25 and 1.25 times the estimate, with experts between 1 / 1.4 and 1.4 times. The
    fullest stage is compared with the device's memory: a run whose lower estimate does not fit is refused, and one that
    lies between the lower estimate and the estimate starts with a warning, which gives the numbers and what would help.
    When: Leave it at error. Use warn if the estimate refuses a run that you know fits, off to start without an
    estimate.
    - error: refuses a run that does not fit even at the lower end of the estimate's uncertainty
    - warn: prints a warning instead
    - off: estimates nothing"""
    run_name: Annotated[str, Mark.NAME] | None = None
    """Name of the run in its log lines and in trackers. null takes output_dir's name.
    How: Trackers show it as the name of the run, and TensorBoard's event files are in a folder of this name.
    When: Set it if several output folders have the same last part."""

    @property
    def label_kind(self) -> str | None:
        """The problem type of stage cls, derived from num_labels if not set; None in other stages."""
        if self.stage != "cls":
            return None
        return self.problem_type or ("regression" if self.num_labels == 1 else "single_label_classification")


class ModelSettings(Group):
    @property
    def adds_tokens(self) -> bool:
        """Whether tokens are added to the model, unless it has them already."""
        return any((self.add_tokens, self.add_special_tokens, self.new_special_tokens_config, self.resize_vocab))

    model_name_or_path: Annotated[str, Mark.NAME] | None = None
    """The Hugging Face checkpoint to train: a folder with config.json, safetensors and tokenizer, or the id of a model
    on a hub, such as Qwen/Qwen3-0.6B.
    How: A folder takes precedence over an id. From a hub (ModelScope's with USE_MODELSCOPE_HUB=1) only the safetensors
    and the configuration and tokenizer files are downloaded, once per machine, into the hub's cache. Each process reads
    only its slices of the safetensors; the final model has the same format and the same keys.
    When: Required. Start from an instruction-tuned model for behaviour, from a base model for continued pretraining."""
    mcore_model: Annotated[str, Mark.NAME] | None = None
    """A folder in Megatron-Core's torch_dist format to load the weights from, such as one that Megatron-SWIFT or
    Megatron-LM wrote.
    How: It is the folder with latest_checkpointed_iteration.txt, or an iter_N folder. Each process reads only its
    slices, and nothing in the folder is executed. config.json and tokenizer come from model_name_or_path, else from the
    folder, else from the model that its args.json names.
    When: Use it to continue from a Megatron run without conversion; `megatune export --to_hf true` converts it to a
    Hugging Face model. A run that resumes takes its weights from its own checkpoint."""
    model_revision: Annotated[str, Mark.NAME] = "main"
    """Which version of a model on a hub: a branch, a tag or a commit.
    How: It is resolved to a commit when the run starts; run.yaml and the checkpoints record that commit, so that the
    same files can be fetched again.
    When: Set it to a commit if later changes of the model must not affect this run. A folder has no revisions: anything
    but main is refused."""
    rope_scaling: Annotated[Literal["linear", "yarn", "llama3"] | dict[str, Any] | None, _WHOLE_MODEL] = None
    """How the model's rotary embeddings are scaled, for sequences longer than it was trained for. null leaves them
    unchanged.
    How: As in LLaMA-Factory the factor is cutoff_len divided by the positions that the model had before any scaling,
    rounded up; if all rows fit into these, nothing changes. A mapping sets the factor itself, as config.json does:
    {rope_type: yarn, factor: 4.0}. The saved model has the scaling in its config.json.
    When: For long contexts: yarn if the model's README describes it, as Qwen's does, and llama3 for models that use it.
    Other models need some hundred steps with long rows to adapt.
    - linear: divides positions by the factor
    - yarn: scales low frequencies, keeps high ones, and sharpens attention (arXiv:2309.00071)
    - llama3: scales low frequencies and keeps high ones, as Llama 3.1 does"""
    mtp_num_layers: Annotated[int, Field(ge=0), "layers", _ONE_MORE, _TOKENS, _WEIGHTS, _HF, _FILES, _NO_NOISE] = 0
    """Number of multi-token prediction (MTP) layers that are trained to predict one more token, which engines use for
    speculative decoding; 0 leaves those of the checkpoint unchanged.
    How: Such a layer takes the decoder's output for a token and the embedding of the next one, and predicts the token
    after that (DeepSeek-V3, arXiv:2412.19437, section 2.2). Its loss, logged as mtp_loss, is added with
    mtp_loss_scaling_factor. It is read from the checkpoint and saved with it; with pipeline parallelism it is in the
    last stage, with a copy of the word embedding.
    When: Set it to 1 if the trained model is served with speculative decoding: the predictions of an untrained layer
    are accepted less often, the more the model has changed."""
    mtp_loss_scaling_factor: Annotated[Positive, _PREDICTS] = 0.1
    """Weight of the multi-token prediction loss relative to the loss of next tokens.
    How: Both are sums over tokens, divided by the number of trained tokens, as in Megatron-Core. The logged loss is
    that of next tokens only.
    When: DeepSeek-V3 was trained with 0.3, and with 0.1 at the end."""
    add_tokens: list[str] = Field(default=[])
    """Tokens to add to the model's vocabulary, as texts: each becomes one token wherever it occurs in a text.
    How: They get the ids after the tokenizer's, and word embedding and output layer grow to the next multiple of 64
    rows if the checkpoint has no spare ones; tokens that the tokenizer already has stay as they are. Checkpoints and
    the final model have the larger vocabulary. With LoRA both embeddings are fully trained, unless additional_target is
    set.
    When: For markers that answers should contain, such as <think>, and for words of a domain. A model learns them from
    some thousand rows that contain them."""
    add_special_tokens: list[str] = Field(default=[])
    """Special tokens to add to the model's vocabulary; they are left out of decoded text if special tokens are skipped.
    How: As for add_tokens; their ids follow those of add_tokens.
    When: For markers that a template puts around turns and that answers should not show. Programs that read markers in
    answers, such as <tool_call>, need add_tokens instead."""
    new_special_tokens_config: Annotated[str, Mark.NAME] | None = None
    """A YAML file of special tokens to add, each with a description of its meaning: `<token>: text`.
    How: As add_special_tokens, for the tokens in the file.
    When: Use it with init_special_tokens: desc_init, for tokens whose meaning can be described in words."""
    init_special_tokens: Annotated[Literal["noise_init", "desc_init", "desc_init_w_noise"], _DESCRIBED] = "noise_init"
    """How the rows of new tokens are initialized, in the word embedding and, from its own rows, in the output layer.
    How: The mean is over all rows of the checkpoint's other tokens; the noise is normal with a standard deviation of 1
    / √hidden_size and depends on seed and the token's id only, so it is the same in all layouts. Tokens without a
    description are initialized as with noise_init.
    When: desc_init_w_noise helps if there are few training rows. noise_init is LLaMA-Factory's default.
    - noise_init: the mean row, plus noise
    - desc_init: the mean of the rows of the description's tokens
    - desc_init_w_noise: the mean of the rows of the description's tokens, plus noise"""
    resize_vocab: bool = False
    """Add rows to the embeddings for tokens of the tokenizer that the model has no rows for.
    How: They are initialized like those of add_tokens, which adds rows regardless of this setting.
    When: For a model whose tokenizer was extended but not its embeddings, which is refused otherwise."""
    cache_dir: Annotated[str, Mark.NAME, Mark.MACHINE] | None = None
    """Folder for model files that are downloaded from a hub. null is the hub's own cache.
    How: The hub's own cache is shared by all programs that use the hub; HF_HOME, HF_HUB_CACHE or MODELSCOPE_CACHE set
    its place.
    When: Set it if the home folder is too small for the model."""
