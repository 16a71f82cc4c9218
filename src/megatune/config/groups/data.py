"""The data sets, how they become tokens, and how tokens become batches."""

from __future__ import annotations

from typing import Literal

from megatune.config.setting import Group, setting


class DataSettings(Group):
    dataset: list[str] = setting(
        [],
        advice="Data sets to train on: names in dataset_info.json, paths, or hub ids such as hf::OWNER/NAME:SUBSET, "
        "one after the other or separated by commas. NAME#500 takes 500 rows.",
    )
    dataset_dir: str = setting(
        "data",
        advice="Folder that holds dataset_info.json and the files it names. ONLINE takes names for hub ids; "
        "REMOTE:OWNER/NAME takes dataset_info.json from a data set on the hub.",
    )
    eval_dataset: list[str] = setting(
        [], advice="Data sets to evaluate on, beside those trained on. Use this or val_size, not both."
    )
    template: str | None = setting(
        "default",
        advice="How a conversation is written as tokens. default and null use the chat template of the model's "
        "tokenizer; a name chooses one of ours, a path ending in .yaml your own. Train with the template that the "
        "model will be asked with.",
    )
    cutoff_len: int = setting(
        2048,
        unit="tokens",
        ge=2,
        advice="The longest sample; truncation_strategy says what becomes of longer ones. Memory of activations grows "
        "in proportion to it; set it to the longest example worth keeping.",
    )
    truncation_strategy: Literal["budget", "drop", "left", "right", "error"] = setting(
        "budget",
        advice="What becomes of a sample longer than cutoff_len: budget cuts turn by turn, prompts and answers in "
        "proportion; right and left cut off its end or its start; drop leaves it out; error ends the run. The report "
        "before the first step counts them. Texts of stage pt are cut into pieces whatever this says.",
    )
    packing: bool | None = setting(
        None,
        advice="Put several samples into one row of up to cutoff_len tokens, so that little is padding. Each attends "
        "to itself only and counts positions from 0: the gradients are those of unpacked rows. As rows then hold "
        "many samples, lower the batch size; null packs the texts of stage pt, and nothing else.",
    )
    group_by_length: bool = setting(
        False,
        advice="Put rows of similar length into a batch, so that less is padding; the longest come first. Packing does "
        "better; with packing it has no use.",
    )
    disable_shuffling: bool = setting(
        False, advice="Train rows in the order of the data, the same in every epoch. For curricula made by hand."
    )
    mix_strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] = setting(
        "concat",
        advice="How several data sets become one. concat takes each whole. The others draw from them in turn, or with "
        "interleave_probs: under stops when the first is used up, over repeats the small ones until the last is, once "
        "goes on with the rest and repeats nothing.",
    )
    interleave_probs: list[float] | None = setting(
        None, advice="How often mix_strategy draws from each data set, in the order of `dataset`; they sum to 1."
    )
    dataset_weights: list[float] | None = setting(
        None,
        advice="How often each data set is trained in an epoch, in the order of `dataset`: 2 is twice, 0.5 a random "
        "half, the same in every epoch.",
    )
    streaming: bool = setting(
        False,
        advice="Read and tokenise while training, for data too large to prepare first. Needs max_steps; rows are "
        "shuffled among buffer_size at a time.",
    )
    buffer_size: int = setting(
        16384,
        unit="samples",
        ge=1,
        advice="With streaming: samples that are shuffled, and packed, together. Larger mixes better and takes longer "
        "to begin.",
    )
    on_bad_row: Literal["skip", "quarantine", "error"] = setting(
        "skip",
        advice="What becomes of rows that cannot be trained on. skip counts and reports them; quarantine also writes "
        "them with their reasons to bad_rows.jsonl in output_dir; error ends the run and names them.",
    )
    tokenized_path: str | None = setting(
        None,
        advice="Folder for the prepared rows, to be taken elsewhere or kept: made if it is not there, opened if it is. "
        "null keeps them in the cache, $MEGATUNE_CACHE or ~/.cache/megatune.",
    )
    overwrite_cache: bool = setting(False, advice="Prepare the rows anew even where they are in the cache.")
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
    preserve_thinking: bool = setting(
        False, advice="With mask_history, keep the reasoning of earlier answers, which is left out otherwise."
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
