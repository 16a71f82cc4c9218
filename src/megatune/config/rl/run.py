"""Keys of the run: its name, length, output, trackers, and communication between roles."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Positive


class TrackerSettings(Group):
    log_dir: str | None = None
    """Folder of TensorBoard's event files, or of wandb's local files. null is output_dir/runs.
    How: The files are in a subfolder named exp_name.
    When: To see several runs together."""
    project: str | None = None
    """Project of wandb or swanlab.
    How: Runs of a project are shown together.
    When: With those trackers."""
    name: str | None = None
    """Name of the run in the tracker. null is exp_name.
    How: TensorBoard shows exp_name.
    When: Rarely needed."""
    workspace: str | None = None
    """Workspace of swanlab.
    How: null is the account's own.
    When: With several workspaces."""
    mode: Literal["cloud", "local", "offline", "online", "disabled"] | None = None
    """Where wandb or swanlab keeps the run.
    How: swanlab takes cloud, local and offline; wandb online, offline and disabled.
    When: offline without a network.
    - cloud: on swanlab's server
    - local: in a folder, for swanlab's local dashboard
    - offline: in a folder, to be uploaded later
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
    """API key of the tracker's account; it is never written to a file.
    How: The environment variables WANDB_API_KEY and SWANLAB_API_KEY take precedence.
    When: If neither the environment nor the tracker's login has it."""


class CheckpointCopies(Group):
    type: Literal["file_system"] | None = None
    """Where else checkpoints go.
    How: Without it they stay in output_dir.
    When: With checkpoint_config.output_dir.
    - file_system: a folder"""
    output_dir: str | None = None
    """A second folder that every checkpoint is copied to.
    How: It is copied in the background and is complete or not there. ROLL adds a folder named by the time; here the
    name stays the same, so that a restarted run finds it.
    When: If output_dir is on a local disk of one machine."""


class RolloutMock(Group):
    enable: bool = False
    """Whether rollouts are recorded, or replayed.
    How: See mode.
    When: To compare the numbers of two layouts, or of two versions, on the same responses."""
    mode: Literal["dump", "mock"] = "dump"
    """Whether to record or to replay.
    How: dump_dir has one file per step.
    When: dump once, then mock in each run that is compared.
    - dump: records what was sampled
    - mock: replays it instead of sampling"""
    dump_dir: str = "./rollout_mock_dumps"
    """The folder of recorded rollouts.
    How: It has one file per step.
    When: Use one for each recording."""

    @property
    def replays(self) -> bool:
        return self.enable and self.mode == "mock"

    @property
    def records(self) -> bool:
        return self.enable and self.mode == "dump"


class RLRunSettings(Group):
    pretrain: str | None = None
    """The model of actor_train, actor_infer and reference: a Hugging Face folder or an id on a hub.
    How: A role's model_args.model_name_or_path takes precedence. ROLL uses pretrain for all three unless all three have
    their own; here each role is resolved separately.
    When: Required, unless actor_train names its model."""
    reward_pretrain: str | None = None
    """The model that the critic starts from.
    How: Its output layer is replaced by a score for every token. Files also use it, as ${reward_pretrain}, for the
    tokenizer of rewards; here rewards score text and need none.
    When: With adv_estimator: gae; the model that is trained is the usual choice."""
    exp_name: str = "rlvr"
    """Name of the run in its log, in trackers and in TensorBoard.
    How: TensorBoard's event files are in a folder of this name.
    When: Set it for each run, so that curves can be distinguished."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seeds the order of prompts, the sampling of every response, and the random numbers of training.
    How: Each response has its own seed, derived from this one, the step, the prompt and its index in the group: it does
    not depend on what else is sampled at the same time.
    When: Change it to measure how much of a result is due to chance; use at least three seeds."""
    output_dir: str = "./output"
    """Folder for checkpoints, metrics and the final model.
    How: Its folders checkpoint-N are Hugging Face models with the training state, as in every run of this program.
    When: Use a new folder for every new run, on a disk that all machines of the run share."""
    max_steps: Annotated[Count, "steps"] = 500
    """Number of steps of the run: each samples responses, scores them and trains on them.
    How: The learning-rate schedule has the length of all optimizer updates of these steps.
    When: Until accuracy on held-out problems stops rising: some hundred for one domain."""
    save_steps: Annotated[Count, "steps"] = 50
    """Steps between checkpoints; the last step is always saved.
    How: A checkpoint has the model, the optimizer, the position in the data, and unfinished rollouts.
    When: Often enough that a machine failure costs little: a step of reinforcement learning takes minutes."""
    max_ckpt_to_keep: Annotated[int, Field(ge=0), "checkpoints"] = 0
    """How many checkpoints are kept; 0 keeps all.
    How: The oldest are deleted after a newer one is complete. A critic, saved before the policy, keeps one more.
    When: 2 or 3 if the disk is small: each takes the model's size, plus about 12 bytes per parameter of training
    state."""
    logging_steps: Annotated[Count, "steps"] = 1
    """Steps between log lines, with some prompts and responses as text.
    How: metrics.jsonl always has every step.
    When: Leave it at 1: steps are long, and reward hacking is found by reading responses."""
    eval_steps: Annotated[int, Field(ge=0), "steps"] = 10
    """Steps between validations, the first before training; 0 never validates.
    How: Responses to the problems of validation.data_args are sampled with validation.generating_args, and scored.
    When: As often as time allows: it takes the time to sample these responses."""
    resume_from_checkpoint: bool | str = False
    """The checkpoint to resume from: false starts from the beginning, true takes the newest, a path names one.
    How: Optimizer, schedule, random states, the position in the data and unfinished rollouts are restored.
    When: true in jobs that a scheduler restarts."""
    rpc_timeout: Annotated[Positive, "seconds"] = 3600.0
    """Time limit of a phase on any role, such as sampling all responses of a step.
    How: A role that has not answered by then is reported with its phase and step, and the run stops.
    When: Raise it for very long responses; with a smaller value hangs are found sooner."""
    max_engine_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a rollout engine, or a judge, may be restarted after it died, hung or raised an unexpected error.
    How: Meanwhile the other engines take over its unfinished responses; it is used again from the next weight transfer
    on. A warning says each time which engine it was and why. Beyond this number for one engine the run stops with
    the exit code of the failure, and can be resumed from its last checkpoint.
    When: 0 to see every crash at once; more for runs of weeks on machines that fail."""
    max_log_prob_gap: Positive | None = None
    """The largest allowed mean difference between log-probabilities of rollout engine and trainer. null depends on the
    precision.
    How: The mean is over the tokens that were sampled with this step's weights; above the limit the run stops with exit
    code 77. null is 1e-5 in fp32, 0.01 in fp16 and 0.05 in bf16. Single tokens never stop a run: those that differ too
    much are masked.
    When: Raise it if an engine's kernels are known to round differently, such as in 8 bits."""
    rollout_dump_dir: str | None = None
    """Folder to write every rollout to: prompts, responses, scores and log-probabilities. null writes none.
    How: There is one JSON Lines file per step.
    When: To read what was sampled, or to train on the same rollouts again with rollout_mock."""
    track_with: list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "stdout"]] = Field(default=["tensorboard"])
    """Trackers that get the metrics, in addition to metrics.jsonl, the console and the plots.
    How: wandb, swanlab and mlflow are installed separately.
    When: tensorboard needs no account.
    - tensorboard: event files in output_dir/runs, or below log_dir of tracker_kwargs
    - wandb: Weights & Biases
    - swanlab: SwanLab
    - mlflow: MLflow
    - stdout: the console only"""
    profiler_timeline: bool = False
    """Whether to write a timeline of all processes, and a trace of the trainer's second step.
    How: output_dir/profile/timeline.json shows what each process did and when, rank-0.json.gz has the operators of that
    step on actor_train's first rank; ui.perfetto.dev opens both. timeline.json is written at the end of a run, even if
    it fails.
    When: For a few steps, if a step is slower than expected: it shows which process waits for which."""
    num_gpus_per_node: Annotated[Count, "GPUs"] = 8
    """GPUs of one machine: device N of a device_mapping is number N % num_gpus_per_node of its machine.
    How: ROLL overwrites it with the GPU count of the driver's machine. Here it determines which roles share a machine,
    and what `megatune plan` plans for; on machines without GPUs devices are CPU processes.
    When: Set it for the machines that the file is written for."""
    system_envs: dict[str, Any] = Field(default={})
    """Environment variables of all processes.
    How: A role's own take precedence. USE_MODELSCOPE=1 downloads models from ModelScope.
    When: For NCCL's settings, a proxy, or the hub."""
    model_download_type: Literal["MODELSCOPE", "HUGGINGFACE_HUB"] | None = None
    """The hub that models are downloaded from. null is Hugging Face, or ModelScope with USE_MODELSCOPE in system_envs.
    How: A folder takes precedence over an id on a hub.
    When: MODELSCOPE if Hugging Face cannot be reached.
    - MODELSCOPE: ModelScope
    - HUGGINGFACE_HUB: Hugging Face"""
    model_update_buffer_size_mb: Annotated[Count, "MiB"] = 1024
    """Bucket size of the weight transfer from the trainer to the sampling engines.
    How: Tensors are gathered and sent in buckets of at most this size, so both sides need memory for one bucket in
    addition to their weights; a larger tensor is sent alone.
    When: Smaller if a device runs out of memory during the update; larger buckets save little time."""
    tracker_kwargs: TrackerSettings = TrackerSettings()
    checkpoint_config: CheckpointCopies = CheckpointCopies()
    rollout_mock: RolloutMock = RolloutMock()
