"""What is run, and the model it starts from."""

from __future__ import annotations

from typing import Literal

from megatune.config.setting import Group, setting


class RunSettings(Group):
    stage: Literal["pt", "sft", "dpo"] = setting(
        "sft",
        advice="pt trains on every token of plain text; sft trains on the assistant's turns of conversations; dpo on "
        "pairs of answers, of which one is preferred: its data can be looked at, training on it is not built yet. "
        "Use pt to teach a language or a domain, sft to teach behaviour.",
    )
    do_train: bool = setting(True, advice="Always true: training is what this command does.")
    output_dir: str | None = setting(
        None,
        advice="Folder for checkpoints, logs and the final model. A run started again on the same folder goes on "
        "from its newest checkpoint. Every checkpoint kept costs the model's size, and with its training state about "
        "12 bytes per parameter more.",
    )
    overwrite_output_dir: bool = setting(
        False,
        advice="Start from the first step even where output_dir holds checkpoints to resume from; they are deleted. "
        "With resume_from_checkpoint naming one of them, delete those of later steps.",
    )
    resume_from_checkpoint: bool | str | None = setting(
        None,
        advice="null resumes from the newest whole checkpoint of output_dir if there is one, true insists on one, "
        "false never resumes, and a path names the checkpoint. The layout may differ from the one that saved it.",
    )
    seed: int = setting(
        42,
        ge=0,
        lt=2**32,
        advice="Seeds the order of rows, the held-out split and the random numbers of training. The same seed in the "
        "same layout gives the same run, bit for bit.",
    )
    num_processes: int | None = setting(
        None,
        unit="processes",
        ge=1,
        advice="Processes to start on this machine. null takes one for each GPU, and on a CPU as few as the layout "
        "allows. On a CPU more data-parallel processes help only while there are cores for them.",
    )
    ddp_timeout: int = setting(
        1800,
        unit="seconds",
        gt=0,
        advice="How long a collective operation may wait for the other processes before the run is ended. Raise it "
        "for slow storage; a larger value also means that a hang is noticed later.",
    )
    check_agreement_interval: int | None = setting(
        None,
        unit="steps",
        ge=1,
        advice="Every so many steps check that processes which hold the same weights and gradients hold the same "
        "numbers, and end the run naming those that do not. For new machines and for hunting faults; null is off.",
    )
    run_name: str | None = setting(
        None, advice="Name of the run in logs and in TensorBoard. null uses output_dir's name."
    )


class ModelSettings(Group):
    model_name_or_path: str | None = setting(
        None, advice="Folder of the Hugging Face checkpoint to train: config.json, safetensors and tokenizer."
    )
    trust_remote_code: Literal[False] = setting(
        False,
        advice="Always false: the supported families need no code from a checkpoint's repository, so none is run.",
    )
    finetuning_type: Literal["full"] = setting(
        "full",
        advice="full trains every parameter: 16 bytes of weights, gradients and optimizer state per parameter or more.",
    )
