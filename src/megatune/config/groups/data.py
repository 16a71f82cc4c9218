"""The data sets, how they become tokens, and how tokens become batches."""

from __future__ import annotations

from megatune.config.setting import Group, setting


class DataSettings(Group):
    dataset: list[str] = setting(
        [], advice="Data sets to train on: names in dataset_info.json, one after the other or separated by commas."
    )
    dataset_dir: str = setting("data", advice="Folder that holds dataset_info.json and the files it names.")
    eval_dataset: list[str] = setting(
        [], advice="Data sets to evaluate on, beside those trained on. Use this or val_size, not both."
    )
    template: str = setting(
        "default",
        advice="How a conversation is written as tokens. default uses the chat template of the model's tokenizer; a "
        "name chooses one of ours. Train with the template that the model will be asked with.",
    )
    cutoff_len: int = setting(
        2048,
        unit="tokens",
        ge=2,
        advice="Longer conversations are cut to this length. Memory of activations grows in proportion to it; set it "
        "to the longest example worth keeping.",
    )
    packing: bool = setting(
        False,
        advice="Put several samples into one row of up to cutoff_len tokens, so that little is padding. Each attends "
        "to itself only and counts positions from 0: the gradients are those of unpacked rows. Rows in a batch then "
        "hold many samples each: lower the batch size.",
    )
    max_samples: int | None = setting(
        None, unit="rows", ge=1, advice="Use at most this many rows of each data set. Set it small to try a run out."
    )
    val_size: float = setting(
        0.0,
        unit="rows, or a share below 1",
        ge=0,
        advice="Hold out rows of the training data for evaluation: a share below 1, or a number of rows. The same "
        "seed holds out the same rows.",
    )
    train_on_prompt: bool = setting(
        False,
        advice="Train on the user's turns as well as the assistant's. Rarely useful outside of very small data sets.",
    )
    mask_history: bool = setting(
        False, advice="Train on the last assistant turn of each conversation only; earlier turns are context."
    )
    enable_thinking: bool | None = setting(
        True,
        advice="For models that think before they answer: true and false say which way answers without reasoning are "
        "written, null leaves each answer as it is in the data.",
    )
    default_system: str | None = setting(
        None, advice="System message for conversations that have none. null keeps the template's own."
    )
    model_name: str | None = setting(None, advice="Replaces {{name}} in the data, for teaching a model who it is.")
    model_author: str | None = setting(
        None, advice="Replaces {{author}} in the data, for teaching a model who made it."
    )
    preprocessing_num_workers: int | None = setting(
        None,
        unit="processes",
        ge=1,
        advice="Processes that turn text into tokens. null takes one. More take seconds to start, so they pay for "
        "large data only.",
    )
    dataloader_num_workers: int = setting(
        0,
        unit="processes",
        ge=0,
        advice="Processes that prepare batches ahead of the step. 0 prepares them in the step's process.",
    )
    dataloader_pin_memory: bool = setting(
        True, advice="Keep batches in page-locked memory, from where copies to a GPU overlap with computing."
    )
    remove_unused_columns: bool = setting(
        True, advice="Either value does the same: only the columns that dataset_info.json names are ever read."
    )


class BatchSettings(Group):
    per_device_train_batch_size: int = setting(
        8,
        unit="rows",
        ge=1,
        advice="Rows of one micro-batch. Raise it while memory lasts: larger ones use a GPU better. The global batch "
        "is this times gradient_accumulation_steps times the data-parallel size.",
    )
    gradient_accumulation_steps: int = setting(
        1,
        unit="micro-batches",
        ge=1,
        advice="Micro-batches of one step. Raise it for a larger global batch at the same memory; with a pipeline, "
        "several times pipeline_model_parallel_size keeps the stages busy.",
    )
    per_device_eval_batch_size: int = setting(8, unit="rows", ge=1, advice="Rows of one micro-batch in evaluation.")
