"""What is run, and the model it starts from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Limit, Mark, Needs, Positive

# They train on preference pairs.
PAIR_STAGES = ("dpo", "rm")


_NO_OVERWRITE = Needs(
    "run.overwrite_output_dir",
    (False,),
    "one starts over, the other resumes from the newest checkpoint of the same folder",
    of=(True,),
)
_WHOLE_MODEL = Needs(
    "finetuning.finetuning_type",
    ("full", "freeze"),
    "adapters alone would not say that they belong to a model with other rotary embeddings",
    "write `merge_lora: true`, or remove `rope_scaling`",
    otherwise=Needs("checkpoint.merge_lora", (True,)),
)
_ONE_MORE = Limit(1, "published checkpoints have one such layer, and further ones are not computed")
_TOKENS = Needs("run.stage", ("pt", "sft"), "they predict tokens of texts, and other stages train on whole answers")
_WEIGHTS = Needs(
    "finetuning.finetuning_type",
    ("full",),
    "their weights are trained whole: peft knows no such layers that could have adapters",
)
_HF = Needs("checkpoint.save_format", ("hf",), "Megatron-Core's format is written without such layers")
_FILES = Needs("model.mcore_model", (None,), "such layers are read from a Hugging Face checkpoint")
_NO_NOISE = Needs(
    "finetuning.neftune_noise_alpha",
    (None,),
    "noise is added to what the decoder reads, and nobody says what such a layer is to read of it",
)
_PREDICTS = Needs("model.mtp_num_layers", least=1)
_DESCRIBED = Needs("model.new_special_tokens_config", (), "it begins with what the file's texts mean")
_SAVES = Needs(
    "checkpoint.save_strategy",
    ("steps", "epoch"),
    "there would be no checkpoint to go back to",
    "write `save_strategy: steps`, or `on_bad_step: skip`",
    of=("go_back",),
)
_WHOLE = Needs(
    "checkpoint.save_only_model",
    (False,),
    "a run cannot resume from a checkpoint without its training state",
    "write `save_only_model: false`, or `on_bad_step: skip`",
    of=("go_back",),
)
_GOES_ON = Needs("run.on_bad_step", ("skip", "go_back"), "the first bad step ends the run", is_method=True)
_CLASSIFIES = Needs("run.stage", ("cls",), "it says what a classifier puts out for a row", is_method=True)
_MOST_LABELS = Limit(100_000, "a linear layer of so many rows is whole on every rank, and its output of every token")
_CLOCK = Limit(10**9, "a billion seconds are 31 years, and clocks that count nanoseconds end at 292")


class RunSettings(Group):
    stage: Annotated[Literal["pt", "sft", "dpo", "kto", "rm", "cls"], Mark.ROWS] = "sft"
    """What kind of training this is, and so which form of data it takes and which tokens are trained.
    How: The stage decides how a row becomes tokens and labels; model, optimizer and layout are the same in all stages.
    The loss is the sum over trained tokens divided by their global number; of dpo and rm the sum over pairs, divided
    by theirs, of kto the sum over answers, of cls the sum over rows.
    When: pt teaches a language or a domain from plain text; sft teaches behaviour from conversations; dpo comes after
    it, and teaches which of two answers is better; kto does so with answers that people liked or did not, one by one,
    where there are no pairs; rm teaches a model to tell, for reinforcement learning or to choose among answers; cls
    teaches it to sort texts into classes, or to give them numbers. Rows of pt are packed unless packing says otherwise.
    - pt: trains on every token of plain text
    - sft: trains on the assistant's turns of conversations
    - dpo: trains on pairs of answers, of which one is preferred, by the loss that pref_loss names
    - kto: trains on answers that are wanted or not, by the loss that kto_loss names
    - rm: trains a reward model on pairs of answers: a score of answers in place of the output layer
    - cls: trains a classifier on conversations with a label: num_labels scores in place of the output layer"""
    num_labels: Annotated[Count, "scores", _MOST_LABELS, Mark.ROWS, _CLASSIFIES] | None = None
    """With stage cls: how many scores the classifier puts out for a row: its classes, or the numbers of a regression.
    How: They are read at the row's last token, and replace the output layer. A model that is a classifier already must
    have as many; a language model gets new ones, drawn from the seed.
    When: Required with stage cls. Labels count from 0, so this is one more than the largest."""
    problem_type: (
        Annotated[
            Literal["regression", "single_label_classification", "multi_label_classification"], Mark.ROWS, _CLASSIFIES
        ]
        | None
    ) = None
    """With stage cls: what labels are, and so which loss is trained. null is regression with num_labels 1, and
    single_label_classification otherwise.
    How: The losses are those of Transformers' ...ForSequenceClassification, whose config.json keeps the choice.
    When: Set it where several classes may hold at once, or where a row has several numbers.
    - regression: a number, or a list of num_labels of them; the mean squared error
    - single_label_classification: the number of a class; cross-entropy of the classes
    - multi_label_classification: a list of numbers of classes, maybe none; binary cross-entropy of each class"""
    output_dir: Annotated[str, Mark.NAME] | None = None
    """Folder for checkpoints, logs and the final model.
    How: A run started again on the same folder resumes from its newest whole checkpoint. Every checkpoint kept takes
    the model's size on disk, and with its training state about 12 bytes per parameter more (8 in fp32).
    When: Name a new folder for every new run, on a disk that every machine of the run sees. Name the old one to
    continue a run."""
    overwrite_output_dir: Annotated[bool, Mark.START] = False
    """Start from the first step even where output_dir holds checkpoints to resume from; they are deleted.
    How: With resume_from_checkpoint naming a checkpoint, only those of later steps are deleted, when the run is about
    to begin.
    When: Turn it on to repeat a run in the same folder. Leave it off in files that a scheduler starts again: each
    restart would begin at step 0."""
    resume_from_checkpoint: Annotated[bool | str | None, Mark.NAME, Mark.START, _NO_OVERWRITE] = None
    """Where the run resumes from: null is the newest whole checkpoint of output_dir if there is one, true insists on
    one, false never resumes, a path names the checkpoint.
    How: Optimizer, schedule, random numbers and the place in the data are restored, and digests are checked while files
    are read. The layout may differ from the one that saved it; in the same layout the run continues bit for bit, on
    GPUs with deterministic_mode.
    When: null is right for nearly every run. Use true where a start from step 0 would be a mistake, and a path to go
    back to an earlier step."""
    no_load_optim: bool = False
    """Resume with a fresh optimizer: no averages, no loss scale; master weights are made from the weights.
    How: Step, schedule, place in the data and random numbers are the checkpoint's. A run that does not resume has
    nothing to leave out.
    When: Where the optimizer or its settings were changed, or its state is damaged."""
    no_load_rng: bool = False
    """Resume with random numbers drawn from seed instead of the checkpoint's.
    How: It changes what dropout draws, and nothing of the order of rows. Without dropout the run is the same bit for
    bit.
    When: Rarely: where the states of random number generators cannot be read."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Mark.ROWS] = 42
    """Seeds the order of rows, the held-out split, packing and the random numbers of training.
    How: The order of rows is a pure function of the seed and the epoch, in every layout. The same seed in the same
    layout gives the same run, bit for bit; on GPUs with deterministic_mode.
    When: Change it to see how much of a result is chance. Changing it also changes which rows val_size holds out."""
    num_processes: Annotated[Count, "processes"] | None = None
    """Processes of the whole run; one drives one GPU. null takes one for each GPU, and on a CPU as few as the layout
    allows.
    How: What the layout does not take (tensor, pipeline and context parallelism) becomes data parallelism. Started by
    torchrun, the run has torchrun's processes instead.
    When: Set it on a CPU, to try the layout of a larger machine there, or to use only some of a machine's GPUs. More
    data-parallel processes help a CPU only while there are cores for them."""
    use_cpu: bool = False
    """Train on the CPU of a machine that has GPUs.
    How: The run sees no GPU, as with an empty CUDA_VISIBLE_DEVICES. Without it, a run on a machine whose GPUs torch
    cannot use is refused, with the reason: a build of torch for CPUs, or a driver that is too old.
    When: Set it to try a layout with more processes than GPUs, or to look for a difference between the devices."""
    ddp_timeout: Annotated[int, Field(gt=0), "seconds", _CLOCK] = 1800
    """How long a collective operation may wait for the other processes before the run is ended.
    How: It bounds start-up, loading, saving and every exchange. A process that shows no progress for this long, or for
    half an hour if that is less, is named and ends the run.
    When: Raise it for slow storage or very large models, whose loading or saving takes longer. A larger value also
    means that a hang is noticed later."""
    exit_duration_in_mins: Annotated[float, Field(gt=0), "minutes"] | None = None
    """The time that the run may take, from the command to its end: before it is over, the run saves and ends by itself,
    to be resumed (exit code 75). null is no limit.
    How: A step is the last one if another like the slowest so far, and twice the longest save so far, would not fit
    any more; before the first save, loading stands for it. Restarts by max_restarts take of the same time; the same
    command, given again, has all of it anew.
    When: Set it a few minutes below the time limit of a job, such as Slurm's: queues that kill at the limit leave no
    time to save. In an array of jobs each goes on where the one before ended."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often a run that crashed or hung is started again by itself, from its newest whole checkpoint; 0 is never.
    How: A process that fails by an error, dies, hangs or is killed for memory counts; wrong settings, bad data, a full
    disk and numbers that are not finite do not. It waits 5 seconds, then twice as long each time, and gives up what
    ends in the same way from the same checkpoint again.
    When: Set it to 3 for long runs that nobody watches, with save_steps so small that little is lost. On one machine
    only; torchrun restarts what it starts."""
    check_agreement_interval: Annotated[Count, "steps"] | None = None
    """Steps between checks that processes which hold the same weights and gradients hold the same numbers; null is off.
    How: At those steps gradients are compared before the update and weights after it, across all copies. The first
    difference ends the run and names the ranks.
    When: Use it on new machines and when looking for faults: 100 finds a broken device for little time. Leave it off
    once the machines are trusted."""
    on_bad_step: Annotated[Literal["stop", "skip", "go_back"], _SAVES, _WHOLE] = "stop"
    """What becomes of a step whose loss or gradient norm is not finite, or beyond loss_spike_bound or
    grad_norm_spike_bound. Its gradients are never used.
    How: All processes decide alike, from numbers that they exchange anyway, before the optimizer changes anything. A
    skipped step counts as done: its rows are consumed, schedule and random numbers go on, weights and optimizer stay,
    and a resume does the same bit for bit. The step, its numbers and its rows are kept in bad_steps.jsonl, in
    output_dir.
    When: Leave it at stop until you have seen what spikes. skip is for single bad rows; go_back is also for weights or
    averages that a fault of the machine has damaged, as they come from the checkpoint again.
    - stop: ends the run with exit code 77 and names the rows
    - skip: leaves the weights as they are and goes on with the next step
    - go_back: starts again from the newest whole checkpoint, and leaves out the step and the one before it"""
    loss_spike_bound: Annotated[float, Field(gt=1)] | None = None
    """A step whose loss is above m + (bound − 1) · |m| is a bad one: of a positive loss, above bound times m. m is the
    median loss of the last 32 steps that were not bad. null is off.
    How: It judges from the ninth such step on, and costs nothing. Losses that come near 0, as those of preferences do,
    have ratios without meaning: take grad_norm_spike_bound there.
    When: 2 or 3 in long runs, with on_bad_step. The larger the batch, the steadier its loss, and the lower the bound
    may be."""
    grad_norm_spike_bound: Annotated[float, Field(gt=1)] | None = None
    """A step whose gradient norm, before clipping, is above bound times the median of the last 32 steps that were not
    bad is a bad one. null is off.
    How: It judges from the ninth such step on, and costs nothing. max_grad_norm scales gradients down instead, and
    keeps their direction.
    When: 10 or more, with on_bad_step: gradients of single batches differ by a factor of a few in good runs, too."""
    max_bad_steps: Annotated[Count, "steps", _GOES_ON] = 10
    """How many bad steps on_bad_step: skip or go_back lets pass in a run; the next one ends it.
    How: They are counted over the whole run, with its resumes. A run that goes on and on without training is worth
    nothing.
    When: Raise it for runs of very many steps."""
    memory_check: Literal["error", "warn", "off"] = "error"
    """Whether the memory of every pipeline stage is planned before anything starts, and what becomes of a run that does
    not fit.
    How: Weights, gradients and optimizer state are counted exactly, activations and buffers are estimated: of published
    runs two of three held between 1 / 1.25 and 1.25 times what is planned, with experts between 1 / 1.4 and 1.4 times.
    The fullest stage is held against the device's memory. What does not fit even at the lower end cannot fit; between
    the lower end and the plan a run starts with a warning, which has the numbers and what would help.
    When: Leave it at error. Use warn where the estimate refuses what you know to fit, off to start without planning.
    - error: refuses a run that cannot fit even at the lower end of the plan's uncertainty
    - warn: only says so
    - off: does not plan"""
    run_name: Annotated[str, Mark.NAME] | None = None
    """Name of the run in its log lines and in trackers. null takes output_dir's name.
    How: Trackers call the run so, and TensorBoard's event files lie in a folder of this name.
    When: Set it where several output folders end in the same name."""

    @property
    def label_kind(self) -> str | None:
        """The problem type of stage cls, chosen by num_labels where none is written; None in other stages."""
        if self.stage != "cls":
            return None
        return self.problem_type or ("regression" if self.num_labels == 1 else "single_label_classification")


class ModelSettings(Group):
    @property
    def adds_tokens(self) -> bool:
        """Whether tokens are added to the model, as far as it has not got them already."""
        return any((self.add_tokens, self.add_special_tokens, self.new_special_tokens_config, self.resize_vocab))

    model_name_or_path: Annotated[str, Mark.NAME] | None = None
    """The Hugging Face checkpoint to train: a folder with config.json, safetensors and tokenizer, or the id of a model
    on a hub, such as Qwen/Qwen3-0.6B.
    How: A folder wins over an id. Of a hub (ModelScope's with USE_MODELSCOPE_HUB=1) only safetensors and the files of
    configuration and tokenizer are fetched, once a machine, into the hub's own cache. Each process reads only the
    slices of the safetensors that it holds; the final model has the same form and the same keys.
    When: Required. Start from an instruction-tuned model for behaviour, from a base model for continued pretraining."""
    mcore_model: Annotated[str, Mark.NAME] | None = None
    """A folder in Megatron-Core's torch_dist format to take the weights from, such as what Megatron-SWIFT or
    Megatron-LM wrote.
    How: The folder with latest_checkpointed_iteration.txt, or an iter_N folder itself. Each process reads the slices
    that it holds, and nothing in the folder is executed. config.json and tokenizer come from model_name_or_path, else
    from the folder, else from the model that its args.json names.
    When: To go on from a run of Megatron without a conversion; `megatune export --to_hf true` makes a Hugging Face
    model of it. A run that resumes takes its weights from its own checkpoint."""
    model_revision: Annotated[str, Mark.NAME] = "main"
    """Which version of a model on a hub: a branch, a tag or a commit.
    How: It is resolved to a commit when the run starts; run.yaml and the checkpoints name that commit, so that the same
    files can be had again.
    When: Set it to a commit where a later change of the model must not reach this run. A folder has no revisions:
    anything but main is refused there."""
    rope_scaling: Annotated[Literal["linear", "yarn", "llama3"] | dict[str, Any] | None, _WHOLE_MODEL] = None
    """How the model's rotary embeddings are stretched, for rows that are longer than it was made for. null leaves them.
    How: As in LLaMA-Factory the factor is cutoff_len over the positions that the model had before any scaling, rounded
    up; where all rows fit into these, nothing changes. A mapping says the factor itself, in config.json's words:
    {rope_type: yarn, factor: 4.0}. The run trains, and saves, a model whose config.json has the scaling.
    When: For long contexts: yarn where the model's README describes it, as of Qwen, and llama3 for models of that kind.
    Other models learn a scaling in some hundred steps of long rows.
    - linear: divides positions by the factor
    - yarn: stretches slow channels, keeps fast ones, and sharpens attention (arXiv:2309.00071)
    - llama3: stretches slow channels, and keeps fast ones, as Llama 3.1 does"""
    mtp_num_layers: Annotated[int, Field(ge=0), "layers", _ONE_MORE, _TOKENS, _WEIGHTS, _HF, _FILES, _NO_NOISE] = 0
    """Layers behind the decoder that are trained to predict a further token, which engines use for speculative
    decoding; 0 leaves those of the checkpoint as they are.
    How: Such a layer sees what the decoder puts out for a token and the embedding of the next one, and predicts the
    token after that (DeepSeek-V3, arXiv:2412.19437, section 2.2). Its loss, logged as mtp_loss, is added with
    mtp_loss_scaling_factor. It is read from the checkpoint and saved with it; with pipeline stages it is in the last
    one, with a copy of the word embedding.
    When: Write 1 where the trained model is served with speculative decoding: a layer that is left as it was guesses
    worse, the more the model has changed."""
    mtp_loss_scaling_factor: Annotated[Positive, _PREDICTS] = 0.1
    """How much the loss of further tokens counts beside that of next tokens.
    How: Both are sums over tokens, divided by the number of trained tokens, as in Megatron-Core. The loss that is
    logged is that of next tokens alone.
    When: DeepSeek-V3 was trained with 0.3, and with 0.1 at the end."""
    add_tokens: list[str] = Field(default=[])
    """Tokens to add to the model's vocabulary, as texts: each becomes one token wherever it stands in a text.
    How: They get the ids behind the tokenizer's, and both embeddings grow to the next multiple of 64 rows where the
    checkpoint has no spare ones; tokens that the tokenizer has stay as they are. Checkpoints and the final model have
    the larger vocabulary. With LoRA both embeddings are fully trained, unless additional_target says what is.
    When: For markers that answers are to have, such as <think>, and words of a domain. A model learns them from some
    thousand rows that have them."""
    add_special_tokens: list[str] = Field(default=[])
    """Special tokens to add to the model's vocabulary, which decoding leaves out where it skips special tokens.
    How: As add_tokens, behind which they get their ids.
    When: For markers that a template puts around turns, and that no answer is to show. Programs that read markers in
    answers, such as <tool_call>, need add_tokens instead."""
    new_special_tokens_config: Annotated[str, Mark.NAME] | None = None
    """A YAML file of special tokens to add, each with a text that says what it means: `<token>: text`.
    How: As add_special_tokens, for the tokens in the file.
    When: With init_special_tokens: desc_init, for tokens whose meaning has words."""
    init_special_tokens: Annotated[Literal["noise_init", "desc_init", "desc_init_w_noise"], _DESCRIBED] = "noise_init"
    """What rows of new tokens begin as, in the word embedding and, by its own rows, in the output layer.
    How: The mean is over all rows that the checkpoint has for other tokens; the noise is normal with a standard
    deviation of 1 / √hidden_size, drawn from seed and the token's id, so that all layouts begin alike. Tokens without
    a description begin as with noise_init.
    When: desc_init_w_noise helps where rows are few. noise_init is what LLaMA-Factory does by default.
    - noise_init: the mean row, plus noise
    - desc_init: the mean of the rows of the description's tokens
    - desc_init_w_noise: the mean of the rows of the description's tokens, plus noise"""
    resize_vocab: bool = False
    """Add rows for tokens of the tokenizer that the model has none for.
    How: They begin as those of add_tokens do, which adds rows whatever this says.
    When: For a model whose tokenizer somebody has extended without its embeddings, which is refused otherwise."""
    cache_dir: Annotated[str, Mark.NAME, Mark.MACHINE] | None = None
    """Folder for files of models that are fetched from a hub. null is the hub's own cache.
    How: The hub's own cache is shared with every program that uses the hub; HF_HOME, HF_HUB_CACHE or MODELSCOPE_CACHE
    move it.
    When: Set it where the home folder is too small for the model."""
