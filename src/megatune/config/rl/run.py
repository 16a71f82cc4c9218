"""Keys of a run: what it is called, how long it is, where it writes, and how its roles reach each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Positive


class TrackerSettings(Group):
    log_dir: str | None = None
    """Folder of TensorBoard's event files, or of what wandb keeps on this machine. null is output_dir/runs.
    How: A folder of exp_name's name is made in it.
    When: To see several runs beside each other."""
    project: str | None = None
    """Project of wandb or swanlab.
    How: Runs of a project are shown together.
    When: With those trackers."""
    name: str | None = None
    """Name of the run there. null is exp_name.
    How: TensorBoard shows exp_name.
    When: Seldom."""
    workspace: str | None = None
    """Workspace of swanlab.
    How: null is the account's own.
    When: With several workspaces."""
    mode: Literal["cloud", "local", "offline", "online", "disabled"] | None = None
    """Where wandb or swanlab keeps the run.
    How: swanlab takes cloud, local and offline; wandb online, offline and disabled.
    When: offline without a network.
    - cloud: on swanlab's server
    - local: in a folder, to be shown by swanlab itself
    - offline: in a folder, to be sent later
    - online: on wandb's server
    - disabled: nowhere"""
    notes: str | None = None
    """A note on the run, for wandb.
    How: It is shown with the run.
    When: To say what was tried."""
    tags: list[str] = Field(default=[])
    """Tags of the run, for wandb.
    How: Runs can be found by them.
    When: With many runs."""
    api_key: str | None = None
    """Key of the tracker's account; it is written nowhere.
    How: WANDB_API_KEY and SWANLAB_API_KEY of the environment serve as well, and are not overwritten.
    When: Where neither the environment nor the tracker's own login has it."""


class CheckpointCopies(Group):
    type: Literal["file_system"] | None = None
    """Where else checkpoints go.
    How: Without it they stay in output_dir.
    When: With checkpoint_config.output_dir.
    - file_system: a folder"""
    output_dir: str | None = None
    """A second folder that every checkpoint is copied to.
    How: The copy is made beside training and is whole, or not there. ROLL adds a folder named by the time; here the
    name stays, so that a run that is started again finds it.
    When: Where output_dir is a disk of one machine."""


class RolloutMock(Group):
    enable: bool = False
    """Whether rollouts are recorded, or replayed.
    How: See mode.
    When: To compare the numbers of two layouts, or of two versions, on the same responses."""
    mode: Literal["dump", "mock"] = "dump"
    """Which of the two.
    How: A file a step in dump_dir.
    When: dump once, then mock in each run that is compared.
    - dump: writes what was sampled
    - mock: reads it in place of sampling"""
    dump_dir: str = "./rollout_mock_dumps"
    """The folder of these files.
    How: It holds one file a step.
    When: Name one for each recording."""

    @property
    def replays(self) -> bool:
        return self.enable and self.mode == "mock"

    @property
    def records(self) -> bool:
        return self.enable and self.mode == "dump"


class RLRunSettings(Group):
    pretrain: str | None = None
    """The model that is trained, that samples, and that stands as reference: a Hugging Face folder or a hub's id.
    How: A role's own model_args.model_name_or_path wins for that role. ROLL gives pretrain to all three of them unless
    all three have their own; here each has what is written for it.
    When: Required, unless actor_train names its model."""
    reward_pretrain: str | None = None
    """The model that the critic starts from.
    How: Its output layer is replaced by a score of every token. Files also use it, as ${reward_pretrain}, for the
    tokenizer of rewards, which score text here and need none.
    When: With adv_estimator: gae; the model that is trained is the usual choice."""
    exp_name: str = "rlvr"
    """Name of the run in its log, in trackers and in TensorBoard.
    How: TensorBoard's event files lie in a folder of this name.
    When: Set it for each run, so that curves can be told apart."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seeds the order of prompts, the sampling of every response, and the random numbers of training.
    How: A response has a seed of its own, made from this one, the step, the prompt and its place in the group: it does
    not depend on what else is sampled at the same time.
    When: Change it to see how much of a result is chance; three seeds are the least that show it."""
    output_dir: str = "./output"
    """Folder for checkpoints, metrics and the final model.
    How: checkpoint-N in it is a Hugging Face model with the training state beside it, as in every run of this program.
    When: Name a new folder for every new run, on a disk that every machine of the run sees."""
    max_steps: Annotated[Count, "steps"] = 500
    """Steps of the run: each samples responses, scores them and trains on them.
    How: The learning rate's schedule is as long as the optimizer updates of these steps.
    When: Until accuracy on held-out problems stops rising: some hundred for one domain."""
    save_steps: Annotated[Count, "steps"] = 50
    """Steps between checkpoints; the last step is always saved.
    How: A checkpoint has the model, the optimizer, the place in the data, and what is still being sampled.
    When: Often enough that a lost machine costs little: a step of reinforcement learning takes minutes."""
    max_ckpt_to_keep: Annotated[int, Field(ge=0), "checkpoints"] = 0
    """How many checkpoints are kept; 0 keeps all.
    How: The oldest are deleted once a newer one is whole.
    When: 2 or 3 where the disk is small: each takes the model's size, and about 12 bytes a parameter of state."""
    logging_steps: Annotated[Count, "steps"] = 1
    """Steps between lines of the log, with some prompts and responses as text.
    How: metrics.jsonl has every step, whatever this says.
    When: Leave it at 1: steps are long, and reading responses is how a reward that is gamed is found."""
    eval_steps: Annotated[int, Field(ge=0), "steps"] = 10
    """Steps between validations, the first before training; 0 never validates.
    How: The problems of validation.data_args are sampled as validation.generating_args says, and scored.
    When: As often as its time allows: it takes the time of sampling as many responses."""
    resume_from_checkpoint: bool | str = False
    """Whether the run goes on from a checkpoint: false starts anew, true takes the newest, a path names one.
    How: Optimizer, schedule, random numbers, the place in the data and unfinished rollouts are restored.
    When: true in files that a scheduler starts again."""
    rpc_timeout: Annotated[Positive, "seconds"] = 3600.0
    """How long a phase may take on any role, such as sampling all responses of a step.
    How: A role that has not answered by then is named with its phase and step, and ends the run.
    When: Raise it for very long responses; a smaller one finds a hang sooner."""
    max_engine_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a rollout engine, or a judge, may be started again where it dies or hangs.
    How: The others sample meanwhile what it had begun, and it takes part again from the next transfer of weights on. A
    warning says each time which engine it was and why. Beyond this number for one engine the run ends with exit code
    76, and resumes from its last checkpoint.
    When: 0 to see every crash at once; more for runs of weeks on machines that fail."""
    max_log_prob_gap: Positive | None = None
    """How far log-probabilities of the rollout engine and of the trainer may differ on average. null is by precision.
    How: The mean over the tokens that this step's weights sampled; above it the run ends with exit code 77. null is
    1e-5 in fp32, 0.01 in fp16 and 0.05 in bf16. Single tokens never end a run: those that are far off are masked.
    When: Raise it where an engine's kernels are known to round differently, such as in 8 bits."""
    rollout_dump_dir: str | None = None
    """Folder to write every rollout to: prompts, responses, scores and log-probabilities. null writes none.
    How: A file a step, of JSON lines.
    When: To read what was sampled, or to train on the same rollouts again with rollout_mock."""
    track_with: list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "stdout"]] = Field(default=["tensorboard"])
    """What metrics are reported to, beside metrics.jsonl, the console and the plots.
    How: wandb, swanlab and mlflow are installed apart.
    When: tensorboard needs no account.
    - tensorboard: event files in output_dir/runs, or below log_dir of tracker_kwargs
    - wandb: Weights & Biases
    - swanlab: SwanLab
    - mlflow: MLflow
    - stdout: the console alone"""
    profiler_timeline: bool = False
    """Whether the times of all processes are written, and what the trainer computes in its second step.
    How: output_dir/profile/timeline.json has what each process did and when, rank-0.json.gz the operators of that step
    on actor_train's first rank; ui.perfetto.dev opens both. timeline.json is written at the end of a run, also of one
    that fails.
    When: For a few steps, where a step is slower than planned: it shows who waits for whom."""
    num_gpus_per_node: Annotated[Count, "GPUs"] = 8
    """GPUs of one machine: device N of a device_mapping is number N % num_gpus_per_node of its machine.
    How: ROLL overwrites it by what the driver's machine has. Here it says which roles share a machine, and what
    `megatune plan` plans for; machines without GPUs take processes of the CPU for devices.
    When: Set it to the machines that the file is for."""
    system_envs: dict[str, Any] = Field(default={})
    """Environment variables of all processes.
    How: A role's own win. USE_MODELSCOPE=1 fetches models from ModelScope.
    When: For NCCL's settings, a proxy, or the hub."""
    model_download_type: Literal["MODELSCOPE", "HUGGINGFACE_HUB"] | None = None
    """The hub that models are fetched from. null is Hugging Face, or ModelScope with USE_MODELSCOPE of system_envs.
    How: A folder wins over an id of a hub.
    When: MODELSCOPE where Hugging Face cannot be reached.
    - MODELSCOPE: ModelScope
    - HUGGINGFACE_HUB: Hugging Face"""
    model_update_buffer_size_mb: Annotated[Count, "MiB"] = 1024
    """How much of the weights travels at once from the trainer to the engines that sample.
    How: Tensors are gathered whole and sent in buckets of at most this size, so both sides hold one bucket beside
    their weights; a tensor that is larger travels alone.
    When: Smaller where a device is full during the update; larger ones save little time."""
    tracker_kwargs: TrackerSettings = TrackerSettings()
    checkpoint_config: CheckpointCopies = CheckpointCopies()
    rollout_mock: RolloutMock = RolloutMock()
