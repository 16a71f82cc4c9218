"""Settings of the data sets and of their preparation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Limit, Mark, Needs, NonNegative, Positive
from megatune.references import ref, remove, write

_RULES, _STAGE, _MIX, _STREAMING = "data.conversation_rules", "run.stage", "data.mix_strategy", "data.streaming"
# InternVL's minimum and maximum number of tiles per image without the thumbnail, as in LLaMA-Factory and the published
# models' processors.
TILES = (1, 12)
_SWIFT = ("ms_swift_4", "ms_swift_3")
_SWIFT_RULES = Needs(_RULES, _SWIFT, "the built-in rules do not use it")
_NO_EPOCH = "the number of rows is not known while they are read"
_NO_STREAM = Needs(_STREAMING, (False,), _NO_EPOCH)
_NOT_KEPT = Needs(_STREAMING, (False,), "rows are trained as they are read, and not stored")
_BLOCKS = Needs(_STREAMING, (True,), "prepared rows are shuffled all together")
_OTHER_MIX = f"{write('mix_strategy', 'interleave_over')} and {ref('interleave_probs')}, or {remove('streaming')}"
_NO_WEIGHTS = Needs(_STREAMING, (False,), _NO_EPOCH, _OTHER_MIX)
_NOT_REFUSED = Needs("data.on_bad_row", ("skip", "quarantine"), "error refuses every bad row")
_STEPS = Needs("optimizer.max_steps", why=_NO_EPOCH, fix=write("max_steps", "N"), least=1)
_ALL_ROWS = "the reference, and the pairs of prompts with other answers, need all rows prepared first"
_NO_KTO = Needs(_STAGE, ("pt", "sft", "dpo", "rm", "cls"), _ALL_ROWS, remove("streaming"))
_SHUFFLED = Needs("data.disable_shuffling", (False,), "one sorts rows, the other leaves them as they are")
_INTERLEAVED = Needs(
    _MIX, ("interleave_over", "interleave_under", "interleave_once"), "concat takes every data set completely"
)
_OFTEN = "both set how often each data set is used"
_BY_PROBS = f"write {ref('interleave_probs')} instead of {ref('{name}')}"
_WHOLE = Needs(_MIX, ("concat",), _OFTEN, _BY_PROBS)
_CUT = write("truncation_strategy", "drop", "left", "right")
_NO_BUDGET = Needs(
    _RULES, ("megatune",), "ms-swift drops long rows, or truncates them at one end", _CUT, of=("budget",)
)
_SPLIT = Needs(_STAGE, ("pt",), "it splits texts of stage pt", _CUT, of=("split",), is_method=True)
_SPLIT_BY_SWIFT = Needs(_RULES, _SWIFT, "it is ms-swift's truncation", remove("truncation_strategy"), of=("split",))
_ONE_SOURCE = Needs(
    "data.val_size", (0.0,), "both set the evaluation data", f"{remove('val_size')}, to train on all rows"
)
_BY_SWIFT = Needs(_RULES, _SWIFT)
_ANSWERS = Needs(_STAGE, ("sft", "pt"), "only the answers are trained", remove("{name}"), otherwise=_BY_SWIFT)
_ONE_TURN = Needs("data.train_on_prompt", (False,), "one trains on every turn, the other on the last answer only")
_PREFERENCE = Needs(_STAGE, ("dpo", "kto", "rm"), otherwise=_BY_SWIFT)
_EARLIER = Needs("data.mask_history", (True,), off=(None,), otherwise=_PREFERENCE)
_PROCESSES = Limit(1024, "each is a process; no more are started than the machine has cores and memory for")
_BLOCK = Limit(10**8, "a block of samples is on disk, and its order in memory, as a whole")


class DataSettings(Group):
    dataset: Annotated[list[str], Mark.NAME, Mark.CONTENT] = Field(default=[])
    """Data sets to train on: a list of names in dataset_info.json, paths, or hub ids such as hf::OWNER/NAME:SUBSET.
    How: Each is read and tokenized once and then cached, so that later runs start at once. NAME#500 takes 500 random
    rows.
    When: Required. mix_strategy and dataset_weights decide how several data sets are mixed."""
    dataset_dir: Annotated[str, Mark.NAME, Mark.CONTENT, Mark.MACHINE] = "data"
    """Folder with dataset_info.json and the files that it names.
    How: With ONLINE every name is a hub id; REMOTE:OWNER/NAME reads dataset_info.json from a data set on the hub.
    When: Set it if the data is not in ./data. Paths in `dataset` work without it."""
    dataset_shuffle: Annotated[bool, Mark.ROWS] = True
    """Sample the rows of NAME#500 at random, with `seed`.
    How: Each row is taken once; if the number is larger than the data set, all rows are repeated, and the rest is
    sampled. false takes the first rows, as streaming always does.
    When: Set it to false if the order of a data set matters. disable_shuffling is for the order of training."""
    columns: Annotated[dict[str, str], Mark.CONTENT] = Field(default={})
    """Column names of data sets that dataset_info.json does not describe, mapped to the standard names.
    How: With {question_text: query, reply: response} these two columns are a query and its response; LLaMA-Factory's
    order, {prompt: question_text, response: reply}, means the same. A column that no data set has is an error.
    When: Set it if the format of a file is not detected, or detected wrongly, and an entry in dataset_info.json is not
    worth the effort."""
    eval_dataset: Annotated[list[str], Mark.NAME, Mark.CONTENT, _ONE_SOURCE] = Field(default=[])
    """Data sets to evaluate on, separate from the training data; named as in `dataset`.
    How: They are prepared like the training data and evaluated completely and in order, at the times that eval_strategy
    sets.
    When: Use it if there is a fixed test set, or val_size to split one off. Not both."""
    template: Annotated[str, Mark.NAME, Mark.CONTENT] | None = None
    """The chat template: null uses the one of the model's tokenizer, a name chooses a built-in one, a path ending in
    .yaml your own.
    How: It decides the text around each turn, the stop token, and which tokens belong to the assistant. A base model
    learns it from the data.
    When: Train with the template that is used for inference. `megatune data preview` shows your rows with it."""
    tool_format: (
        Annotated[
            Literal[
                "default", "gemma4", "glm4", "glm4_moe", "lfm2", "ling", "llama3", "minimax1", "minimax2", "mistral",
                "qwen", "qwen3_5", "seed_oss",
            ],
            Mark.CONTENT,
        ]
        | None
    ) = None  # fmt: skip
    """The format of tools and tool calls, instead of the template's own; null keeps that.
    How: The formats are LLaMA-Factory's. Tool results are written in the template's format, and calls end like answers.
    The tokenizer's chat template (template: null) and `mistral` support their own format only.
    When: Set it if inference uses another tool format than that of the template.
    - default: Action and Action Input, on separate lines
    - gemma4: Gemma 4's declarations and calls
    - glm4: GLM-4's, one call at a time
    - glm4_moe: GLM-4.5's, with tags for keys and values
    - lfm2: LFM2's calls, in Python syntax
    - ling: Qwen's calls, with Ling 2's list of tools
    - llama3: Llama 3.1's JSON
    - minimax1: MiniMax-M1's JSON
    - minimax2: MiniMax-M2's XML
    - mistral: Mistral v0.3's JSON
    - qwen: Qwen 2.5's and Qwen3's JSON in tags
    - qwen3_5: Qwen3.5's XML
    - seed_oss: Seed-OSS's XML"""
    conversation_rules: Annotated[Literal["megatune", "ms_swift_3", "ms_swift_4"], Mark.ROWS] = "megatune"
    """The program whose rules are used to read rows, format conversations and choose the trained tokens.
    How: ms-swift has a different template for each model, knows more column names, and handles reasoning, system
    messages, tools, truncation and image sizes differently. `template` is then one of its names; null chooses the
    model's.
    When: Command lines of Megatron-SWIFT set it, so that they train the same tokens as there. In files leave it out,
    unless the run should match one of ms-swift.
    - megatune: the data formats of LLaMA-Factory and others, and the built-in templates
    - ms_swift_3: the rules of ms-swift 3.12
    - ms_swift_4: the rules of ms-swift 4.6"""
    template_date: Annotated[str, _SWIFT_RULES] | None = None
    """The current date that ms-swift's templates state (gpt_oss, mistral_2501), such as 2026-11-27. null is the day of
    the run.
    How: Rows are prepared again on another day; a run that resumes keeps the day on which it started.
    When: Set it to train the same tokens on another day."""
    agent_template: Annotated[str, Mark.ROWS, _SWIFT_RULES] | None = None
    """With ms-swift's rules: the format of tools, tool calls and tool results. null is the template's own.
    How: It is one of ms-swift's names, such as hermes, react_en or glm4_5.
    When: Set it if inference uses another tool format than that of the template."""
    cutoff_len: Annotated[int, Field(ge=2), "tokens", Mark.ROWS] = 2048
    """The maximum length of a sample, and the length of packed rows; truncation_strategy decides what happens to longer
    samples. With stages dpo and rm each answer with its prompt is a sample, and packed rows are twice as long.
    How: Without packing a micro-batch is as long as its longest row, so this is only an upper bound; with packing, and
    in stage pt, rows are filled to it. Activation memory grows linearly with it, the time of attention with the square
    of a sequence's length.
    When: Set it to the length of the longest sample worth keeping: `megatune data stats` shows the lengths. If rows do
    not fit into memory, raise context_parallel_size, or use recomputation."""
    truncation_strategy: Annotated[
        Literal["budget", "drop", "left", "right", "split", "error"], Mark.ROWS, _NO_BUDGET, _SPLIT, _SPLIT_BY_SWIFT
    ] = "budget"
    """What happens to a sample longer than cutoff_len.
    How: The report before the first step counts the truncated and dropped samples. Texts of stage pt are always split
    into pieces without loss.
    When: Use drop if half an answer would teach the wrong thing, error if nothing should be lost unnoticed.
    - budget: truncates turn by turn, prompts and answers in proportion
    - drop: leaves the sample out
    - left: keeps the end of the sample
    - right: keeps the start of the sample
    - split: splits texts of stage pt into pieces, with ms-swift's rules; not for other stages and rules
    - error: stops the run and names the rows"""
    packing: Annotated[bool, Mark.CONTENT] | None = None
    """Put several samples into one row of up to cutoff_len tokens, so that there is little padding. null packs the
    texts of stage pt only.
    How: Samples are assigned to rows by best fit over the whole data set. Each attends only to itself and its positions
    start at 0, so losses and gradients are those of unpacked rows.
    When: Turn it on if samples are much shorter than cutoff_len. A row then holds many samples, so lower the batch size
    to keep the number of steps."""
    group_by_length: Annotated[bool, _SHUFFLED, _NO_STREAM] = False
    """Put rows of similar length into a batch, so that there is less padding.
    How: Rows are shuffled, and sorted by length within groups of up to 50 batches; the longest row comes first, so that
    the run fails early if memory is too small.
    When: For runs that cannot pack. Packing leaves less padding, and makes this useless."""
    disable_shuffling: bool = False
    """Keep the rows in the order of the data, the same in every epoch.
    How: Batches take the rows in their order, data set after data set.
    When: For a curriculum with a fixed order. Otherwise shuffled rows train better."""
    mix_strategy: Annotated[Literal["concat", "interleave_under", "interleave_over", "interleave_once"], Mark.ROWS] = (
        "concat"
    )
    """How several data sets are combined.
    How: They are combined once, before rows are packed and shuffled. Interleaving takes rows from the data sets in
    turn, or with the probabilities of interleave_probs.
    When: concat with dataset_weights is the simplest way to weight data sets. Interleave if their proportions matter
    more than seeing every row once.
    - concat: takes each data set whole
    - interleave_under: stops when the first data set is exhausted
    - interleave_over: stops when all data sets are exhausted, and repeats the smaller ones
    - interleave_once: stops when all are exhausted, and repeats nothing"""
    interleave_probs: Annotated[list[float], Mark.ROWS, _INTERLEAVED] | None = None
    """The sampling probability of each data set, in the order of `dataset`; they sum to 1.
    How: For each row mix_strategy draws a data set with these probabilities, seeded by `seed`. null takes them in turn.
    When: Set it with one of the interleave strategies, to give a small data set more weight than its size."""
    dataset_weights: Annotated[list[float], Mark.ROWS, _WHOLE, _NO_WEIGHTS] | None = None
    """How often each data set is used in an epoch, in the order of `dataset`: 2 is twice, 0.5 a random half.
    How: Whole numbers repeat a data set; a fraction takes a random subset, the same in every epoch.
    When: Set it with mix_strategy: concat, to repeat small good data or to use less of large data."""
    streaming: Annotated[bool, _STEPS, _NO_KTO] = False
    """Read and tokenize while training, instead of preparing all rows first.
    How: A separate process fills blocks of buffer_size samples, shuffles and packs each, and sends them to all ranks. A
    resumed run continues at the same position in the files.
    When: For data that is too large to prepare first. It needs max_steps, since the length of an epoch is not known,
    and shuffles only within a block."""
    buffer_size: Annotated[Count, "samples", _BLOCKS, _BLOCK] = 16384
    """With streaming: number of samples that are shuffled and packed together.
    How: Training starts when the first block is read and tokenized; the next block is prepared while this one is
    trained.
    When: Raise it for better shuffling and fuller rows, lower it for an earlier first step."""
    on_bad_row: Annotated[Literal["skip", "quarantine", "error"], Mark.CONTENT] = "skip"
    """What happens to rows that cannot be trained on.
    How: A row is bad if it cannot be read, does not have the format of its data set, or has nothing to train. Each
    reason has a code, and the report counts rows by code.
    When: error is right if the data should be clean; quarantine helps to fix it.
    - skip: counts and reports them
    - quarantine: also writes them with the reasons to bad_rows.jsonl in output_dir
    - error: stops the run and names them"""
    max_bad_rows: Annotated[NonNegative, "rows, or a share below 1", _NOT_REFUSED] | None = 0.01
    """Refuse a data set with more bad rows than this: a fraction of its rows if below 1, else a number of rows.
    How: Each data set is counted separately, without rows that truncation_strategy: drop leaves out; with streaming at
    every block of the first pass. A fraction always allows 10 rows, so that a small file is not refused for one bad
    row. The error gives the three most common reasons with the first lines of each.
    When: Raise it only for data that is known to be noisy. 0 allows none; null allows any number."""
    tokenized_path: Annotated[str, Mark.NAME, Mark.MACHINE, _NOT_KEPT] | None = None
    """Folder for the prepared rows, which is created if it does not exist and reused if it does. null keeps them in the
    cache, $MEGATUNE_CACHE or ~/.cache/megatune.
    How: The folder has the tokens and a key of everything that determined them; a run whose data or settings differ is
    refused instead of training on the wrong rows.
    When: Set it to prepare rows on one machine and train on another, or to keep them. Otherwise the cache is enough."""
    max_samples: Annotated[Count, "rows", Mark.ROWS] | None = None
    """Use only the first rows of each data set, at most this many.
    How: The other rows are not read.
    When: Set it to a small number for a test run. To use less of the data, dataset_weights samples at random."""
    val_size: Annotated[NonNegative, "rows, or a share below 1", Mark.ROWS] = 0.0
    """Hold out rows of the training data for evaluation: a fraction if below 1, else a number of rows.
    How: A row's text and the seed decide whether it is held out, so the split stays the same if rows are added or other
    settings change. Copies of a held-out row are not trained.
    When: 0.01 to 0.1 of the rows shows whether a run overfits. It needs eval_strategy."""
    train_on_prompt: Annotated[bool, Mark.ROWS, _ANSWERS] = False
    """Train on the user's turns as well as the assistant's.
    How: The loss then includes every token of the conversation; otherwise prompts are context only.
    When: Rarely useful except for very small data sets: the model also learns to write questions."""
    mask_history: Annotated[bool, Mark.ROWS, _ANSWERS, _ONE_TURN] = False
    """Train on the last assistant turn of each conversation only; earlier turns are context.
    How: With truncation_strategy: budget a long conversation then keeps its last turns instead of its first ones.
    When: For data whose earlier answers are not worth learning. Fewer tokens are trained in the same time."""
    enable_thinking: Annotated[bool, Mark.ROWS] | None = True
    """For reasoning models: how answers without reasoning are written.
    How: true adds an empty reasoning block to these answers and trains it. false removes all reasoning and puts the
    empty block into the prompt. null keeps existing reasoning, and puts an empty block into the prompt if there is
    none.
    When: Set it to false for data without reasoning if thinking is turned off for inference, and to null for mixed
    data."""
    preserve_thinking: Annotated[bool, Mark.ROWS, _EARLIER] | None = False
    """With mask_history: keep the reasoning of earlier answers, which is left out otherwise.
    How: Templates of reasoning models drop the reasoning of earlier turns at inference; this keeps it as context. null
    is ms-swift's own rule: it is dropped if only the last answer is trained.
    When: Only if the prompts at inference contain the earlier reasoning."""
    add_empty_thought: Annotated[bool, Mark.ROWS, _SWIFT_RULES] = True
    """With ms-swift's rules: answers without reasoning begin with an empty reasoning block, in templates that have one.
    How: It is put before every answer; if only the last answer is trained, before the answers to the last question.
    When: Set it to false if the prompts at inference have no empty reasoning block."""
    answer_masks: Annotated[list[Literal["empty_thought", "think_tag"]] | None, Mark.ROWS, _SWIFT_RULES] = None
    """With ms-swift's rules: beginnings of answers that are masked, so that they are context only.
    How: null masks nothing in version 3, and in version 4 the empty reasoning blocks of models that reason only on
    request.
    When: An empty list trains empty reasoning blocks, too.
    - empty_thought: a reasoning block without text, with its tags
    - think_tag: the tag that opens a reasoning block"""
    default_system: Annotated[str, Mark.ROWS] | None = None
    """System message for conversations that have none. null keeps the template's own.
    How: It is formatted by the template. Conversations that have a system message keep theirs.
    When: Set it to the system message that is used for inference."""
    model_name: Annotated[str | list[str] | None, Mark.ROWS] = None
    """Replaces {{name}} and {{NAME}} in the data, to teach a model who it is.
    How: It is replaced before rows are tokenized. With a list of two, rows whose field `tag` is zh get the first, all
    others the second. Data with the placeholder is refused if no value is set here.
    When: Set it with identity data sets; give two if they are Chinese and English."""
    model_author: Annotated[str | list[str] | None, Mark.ROWS] = None
    """Replaces {{author}} and {{AUTHOR}} in the data, to teach a model who made it.
    How: It is replaced before rows are tokenized. With a list of two, rows whose field `tag` is zh get the first, all
    others the second. Data with the placeholder is refused if no value is set here.
    When: Set it with identity data sets; give two if they are Chinese and English."""
    preprocessing_num_workers: Annotated[Count, "processes", Mark.MACHINE, _PROCESSES] | None = None
    """Number of processes that tokenize. null takes one.
    How: Rows are distributed in chunks of 256 and come back in order, so the result does not depend on their number.
    Each takes seconds to start. Not more are started than the machine has cores and memory for.
    When: Raise it towards the machine's cores for data that takes minutes to prepare."""
    dataloader_num_workers: Annotated[int, Field(ge=0), "processes", Mark.MACHINE, _PROCESSES] | None = None
    """Number of processes per rank that prepare batches ahead of time. 0 prepares them in the rank's own process; null
    is 0 for text, and up to 4 if rows have images or videos.
    How: Text is only copied from prepared rows; images and videos are decoded and resized, which takes CPU time. Not
    more processes are started than the machine has cores and memory for. The result does not depend on their number.
    When: Raise it if the log shows that steps wait for data. For text 0 is nearly always right."""
    dataloader_pin_memory: bool = True
    """Keep batches in pinned (page-locked) memory, so that copies to a GPU overlap with computation.
    How: It takes the host memory of a few batches; without a GPU it has no effect.
    When: Turn it off only if the host does not allow pinned memory."""
    image_max_pixels: Annotated[Count, "pixels", Mark.MEDIA] = 768 * 768
    """Images with more pixels are scaled down to this area.
    How: The encoder splits an image into patches, and a square of patches becomes a token: the tokens of a row and the
    time of the encoder are proportional to the area. The model's own processor then resizes to the limits of its
    configuration.
    When: Lower it if images need no detail, raise it for small print; `megatune data preview` shows sizes and
    tokens."""
    image_min_pixels: Annotated[Count, "pixels", Mark.MEDIA] = 32 * 32
    """Images with fewer pixels are scaled up to this area.
    How: It is done before the image is split into patches; the model's own processor has a minimum area, too.
    When: Rarely needed."""
    image_scale_pixels: Annotated[Count, "pixels", Mark.MEDIA, _SWIFT_RULES] | None = None
    """With ms-swift's rules: images with more pixels are first scaled down to this area.
    How: Then every image is resized to whole tokens, between image_min_pixels and image_max_pixels; the limits of the
    model's processor are not used.
    When: Set it to ms-swift's --max_pixels of the run that should be matched."""
    crop_to_patches: Annotated[bool, Mark.MEDIA] = False
    """For InternVL: split an image into at most 12 tiles that keep its aspect ratio, plus the whole image as a
    thumbnail.
    How: Each tile has as many tokens as an image that is not split, 256 in the published models. Transformers'
    processor does this at inference.
    When: Turn it on for documents and small print; without it an image is one tile, as in LLaMA-Factory.
    - true: up to 13 times the tokens per image"""
    video_max_pixels: Annotated[Count, "pixels", Mark.MEDIA] = 256 * 256
    """Frames of a video with more pixels are scaled down to this area.
    How: The tokens of a video are those of its frames.
    When: Lower it for long videos."""
    video_min_pixels: Annotated[Count, "pixels", Mark.MEDIA] = 16 * 16
    """Frames of a video with fewer pixels are scaled up to this area.
    How: It is done before the frames are split into patches.
    When: Rarely needed."""
    video_fps: Annotated[Positive, "frames per second", Mark.MEDIA] = 2.0
    """Number of frames that are sampled per second of a video.
    How: They are evenly spaced, at most video_maxlen of them. If a video is a list of frames, they are taken to have
    this rate.
    When: Raise it if motion matters."""
    video_maxlen: Annotated[Count, "frames", Mark.MEDIA, Limit(10**5, "every frame is decoded")] = 128
    """Maximum number of frames per video.
    How: The frames of a longer video are evenly spaced over its whole length.
    When: Lower it to limit the tokens of a row."""
    media_dir: Annotated[str, Mark.MEDIA, Mark.NAME, Mark.MACHINE] | None = None
    """Folder that paths of images and videos in the data are relative to. null takes dataset_dir.
    How: Absolute paths in the data are used as they are, and so is a path that is not a file in this folder.
    When: Set it if the images are not next to the data."""

    @property
    def swift_version(self) -> int:
        """The version of ms-swift whose rules are used; 0 for the program's own rules."""
        return int(self.conversation_rules[-1]) if self.conversation_rules.startswith("ms_swift") else 0
