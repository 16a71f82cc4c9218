"""The data sets, and how they become tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, Limit, Mark, Needs, NonNegative, Positive

_RULES, _STAGE, _MIX, _STREAMING = "data.conversation_rules", "run.stage", "data.mix_strategy", "data.streaming"
# The fewest and the most tiles of an image of InternVL, without the whole image: those of LLaMA-Factory, and of the
# published models' processors.
TILES = (1, 12)
_SWIFT = ("ms_swift_4", "ms_swift_3")
_SWIFT_RULES = Needs(_RULES, _SWIFT, "the rules of this program do without it")
_NO_EPOCH = "how many rows there are is not known while they are read"
_NO_STREAM = Needs(_STREAMING, (False,), _NO_EPOCH)
_NOT_KEPT = Needs(_STREAMING, (False,), "rows are trained as they are read, and not kept")
_BLOCKS = Needs(_STREAMING, (True,), "prepared rows are shuffled all together")
_OTHER_MIX = "write `mix_strategy: interleave_over` and `interleave_probs`, or remove `streaming`"
_NO_WEIGHTS = Needs(_STREAMING, (False,), _NO_EPOCH, _OTHER_MIX)
_NOT_REFUSED = Needs("data.on_bad_row", ("skip", "quarantine"), "error refuses every bad row")
_STEPS = Needs("optimizer.max_steps", why=_NO_EPOCH, fix="write `max_steps: N`", least=1)
_ALL_ROWS = "the reference, and the other row whose answer a prompt gets, are known where all rows are prepared"
_NO_KTO = Needs(_STAGE, ("pt", "sft", "dpo", "rm", "cls"), _ALL_ROWS, "remove `streaming`")
_SHUFFLED = Needs("data.disable_shuffling", (False,), "one sorts rows, the other leaves them as they are")
_INTERLEAVED = Needs(
    _MIX, ("interleave_over", "interleave_under", "interleave_once"), "concat takes every data set whole"
)
_OFTEN, _BY_PROBS = "both say how often each data set is trained", "write `interleave_probs` instead of `{name}`"
_WHOLE = Needs(_MIX, ("concat",), _OFTEN, _BY_PROBS)
_CUT = "write `truncation_strategy: drop`, left or right"
_NO_BUDGET = Needs(
    _RULES, ("megatune",), "ms-swift leaves long rows out, or cuts one end of them", _CUT, of=("budget",)
)
_SPLIT = Needs(_STAGE, ("pt",), "it cuts texts of stage pt", _CUT, of=("split",), is_method=True)
_SPLIT_BY_SWIFT = Needs(
    _RULES, _SWIFT, "it is ms-swift's way of cutting", "remove `truncation_strategy`", of=("split",)
)
_ONE_SOURCE = Needs("data.val_size", (0.0,), "both say what to evaluate on", "remove `val_size`, to train on all rows")
_BY_SWIFT = Needs(_RULES, _SWIFT)
_ANSWERS = Needs(_STAGE, ("sft", "pt"), "only the answers are trained", "remove `{name}`", otherwise=_BY_SWIFT)
_ONE_TURN = Needs("data.train_on_prompt", (False,), "one trains on every turn, the other on the last answer only")
_PREFERENCE = Needs(_STAGE, ("dpo", "kto", "rm"), otherwise=_BY_SWIFT)
_EARLIER = Needs("data.mask_history", (True,), off=(None,), otherwise=_PREFERENCE)
_PROCESSES = Limit(1024, "each is a process; no more are started than the machine has cores and memory for")
_BLOCK = Limit(10**8, "a block of samples is on disk, and its order in memory, as a whole")


class DataSettings(Group):
    dataset: Annotated[list[str], Mark.NAME, Mark.CONTENT] = Field(default=[])
    """Data sets to train on: names in dataset_info.json, paths, or hub ids such as hf::OWNER/NAME:SUBSET, one after the
    other or separated by commas.
    How: Each is read, turned into tokens once and kept in a cache, so that later runs start at once. NAME#500 takes 500
    rows, drawn at random.
    When: Required. Several data sets are mixed as mix_strategy and dataset_weights say."""
    dataset_dir: Annotated[str, Mark.NAME, Mark.CONTENT, Mark.MACHINE] = "data"
    """Folder that holds dataset_info.json and the files it names.
    How: ONLINE takes every name for a hub id; REMOTE:OWNER/NAME takes dataset_info.json from a data set on the hub.
    When: Set it when the data lies elsewhere than in ./data. Paths in `dataset` work without it."""
    dataset_shuffle: Annotated[bool, Mark.ROWS] = True
    """Draw the rows of NAME#500 at random, with `seed`.
    How: Each row is drawn once; where the number is beyond the rows, all are repeated, and the rest is drawn. false
    takes the first rows, as streaming always does.
    When: Set false where the order of a data set means something. The order of training is disable_shuffling's."""
    columns: Annotated[dict[str, str], Mark.CONTENT] = Field(default={})
    """The columns of data sets that dataset_info.json does not describe: their own name, then the usual one.
    How: With {question_text: query, reply: response} these two columns are a query and its response; LLaMA-Factory's
    order, {prompt: question_text, response: reply}, means the same. A column that no data set has is refused.
    When: Set it where the form of a file is not detected, or detected wrongly, and an entry of dataset_info.json is not
    worth writing."""
    eval_dataset: Annotated[list[str], Mark.NAME, Mark.CONTENT, _ONE_SOURCE] = Field(default=[])
    """Data sets to evaluate on, beside those trained on; named as in `dataset`.
    How: They are prepared like the training data and evaluated whole, in their order, when eval_strategy says.
    When: Use it where there is a fixed test set; use val_size to split one off. Not both."""
    template: Annotated[str, Mark.NAME, Mark.CONTENT] | None = None
    """How a conversation is written as tokens: null uses the chat template of the model's tokenizer; a name chooses one
    of ours, a path ending in .yaml your own.
    How: It decides the text around each turn, the stop token, and which tokens are the assistant's. A base model learns
    it from the data.
    When: Train with the template that the model will be asked with. `megatune data preview` shows what it makes of your
    rows."""
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
    """How tools, and calls of them, are written, in the place of the template's own way; null keeps that.
    How: The formats are LLaMA-Factory's. What tools return is written as the template does, and calls end as answers
    do. The tokenizer's chat template (template: null) and `mistral` write tools in their own way only.
    When: Set it where the model will be asked with other tools than those of its template.
    - default: Action and Action Input, on lines of their own
    - gemma4: Gemma 4's declarations and calls
    - glm4: GLM-4's, one call at a time
    - glm4_moe: GLM-4.5's, with tags for keys and values
    - lfm2: LFM2's calls, as Python writes them
    - ling: Qwen's calls after Ling 2's list of tools
    - llama3: Llama 3.1's JSON
    - minimax1: MiniMax-M1's JSON
    - minimax2: MiniMax-M2's XML
    - mistral: Mistral v0.3's JSON
    - qwen: Qwen 2.5's and Qwen3's JSON in tags
    - qwen3_5: Qwen3.5's XML
    - seed_oss: Seed-OSS's XML"""
    conversation_rules: Annotated[Literal["megatune", "ms_swift_3", "ms_swift_4"], Mark.ROWS] = "megatune"
    """Whose rules read rows, write conversations as tokens and choose what of them is trained.
    How: ms-swift has templates of its own for each model, reads rows under more names of columns, and treats reasoning,
    system messages, tools, truncation and the sizes of images in its own ways. `template` is then one of its names;
    null chooses the one of the model.
    When: Command lines of Megatron-SWIFT set it, so that they train the tokens that they train there. In files leave it
    out, unless a run is to match one of ms-swift.
    - megatune: forms of LLaMA-Factory's and others' data, and the templates of this program
    - ms_swift_3: as ms-swift 3.12
    - ms_swift_4: as ms-swift 4.6"""
    template_date: Annotated[str, _SWIFT_RULES] | None = None
    """The day that templates of ms-swift state as today's (gpt_oss, mistral_2501), as 2026-11-27. null is the day of
    the run.
    How: Rows are prepared anew on another day; a run that resumes keeps the day on which it began.
    When: Set it to train the same tokens on another day."""
    agent_template: Annotated[str, Mark.ROWS, _SWIFT_RULES] | None = None
    """With ms-swift's rules: how tools, calls of tools and what they return are written. null is the template's own.
    How: It is one of ms-swift's names, such as hermes, react_en or glm4_5.
    When: Set it to what the model will be asked with, where that is not the way of its own template."""
    cutoff_len: Annotated[int, Field(ge=2), "tokens", Mark.ROWS] = 2048
    """The longest sample, and the length of packed rows; truncation_strategy says what becomes of longer samples. With
    stages dpo and rm each answer with its prompt is a sample, and packed rows are twice as long.
    How: Without packing a micro-batch is as long as its longest row, so this is only its bound; with packing, and in
    stage pt, rows are filled to it. Memory of activations grows in proportion, time of attention with the square of a
    document's length.
    When: Set it to the longest sample worth keeping: `megatune data stats` shows the lengths. For rows that do not fit
    raise context_parallel_size, or recompute."""
    truncation_strategy: Annotated[
        Literal["budget", "drop", "left", "right", "split", "error"], Mark.ROWS, _NO_BUDGET, _SPLIT, _SPLIT_BY_SWIFT
    ] = "budget"
    """What becomes of a sample longer than cutoff_len.
    How: The report before the first step counts what was cut and dropped. Texts of stage pt are cut into pieces without
    loss, whatever this says.
    When: Use drop where half an answer would teach the wrong thing, error where nothing should be lost unseen.
    - budget: cuts turn by turn, prompts and answers in proportion
    - drop: leaves the sample out
    - left: keeps the end of the sample
    - right: keeps the start of the sample
    - split: cuts texts of stage pt into pieces, with ms-swift's rules; other stages and rules do without
    - error: ends the run and names the rows"""
    packing: Annotated[bool, Mark.CONTENT] | None = None
    """Put several samples into one row of up to cutoff_len tokens, so that little is padding. null packs the texts of
    stage pt, and nothing else.
    How: Samples are assigned to rows by best fit over the whole data set. Each attends to itself only and counts
    positions from 0, so losses and gradients are those of unpacked rows.
    When: Turn it on whenever samples are much shorter than cutoff_len. A row then holds many samples, so lower the
    batch size to keep the steps as they were."""
    group_by_length: Annotated[bool, _SHUFFLED, _NO_STREAM] = False
    """Put rows of similar length into a batch, so that less is padding.
    How: Rows are shuffled, and sorted by length within groups of up to 50 batches; the longest row of all comes first,
    so that memory that does not suffice shows at once.
    When: For runs that cannot pack. Packing leaves less padding, and with it this has no use."""
    disable_shuffling: bool = False
    """Train rows in the order of the data, the same in every epoch.
    How: Batches are cut from the rows in their order, data set after data set.
    When: For curricula made by hand. Anything else trains better on shuffled rows."""
    mix_strategy: Annotated[Literal["concat", "interleave_under", "interleave_over", "interleave_once"], Mark.ROWS] = (
        "concat"
    )
    """How several data sets become one.
    How: The mixture is made once, before rows are packed and shuffled. Interleaving draws from the data sets in turn,
    or as often as interleave_probs says.
    When: concat with dataset_weights is the simplest way to weigh data sets. Interleave where the shares matter more
    than seeing every row once.
    - concat: takes each data set whole
    - interleave_under: draws until the first data set is used up
    - interleave_over: draws until the last data set is used up, and repeats the small ones
    - interleave_once: draws until all are used up, and repeats nothing"""
    interleave_probs: Annotated[list[float], Mark.ROWS, _INTERLEAVED] | None = None
    """How often mix_strategy draws from each data set, in the order of `dataset`; the numbers sum to 1.
    How: Each draw picks a data set with these probabilities, seeded by `seed`. null draws from one after the other.
    When: Set it with one of the interleave strategies, to give a small data set a larger share than its size."""
    dataset_weights: Annotated[list[float], Mark.ROWS, _WHOLE, _NO_WEIGHTS] | None = None
    """How often each data set is trained in an epoch, in the order of `dataset`: 2 is twice, 0.5 a random half.
    How: Whole numbers repeat a data set; a fraction takes a random part, the same in every epoch.
    When: Set it with mix_strategy: concat, to repeat small, good data or to thin out large data."""
    streaming: Annotated[bool, _STEPS, _NO_KTO] = False
    """Read and tokenise while training, instead of preparing all rows first.
    How: A process beside the run fills blocks of buffer_size samples, shuffles and packs each, and hands them to all
    ranks. A resume continues at the place in the files.
    When: For data too large to prepare first. Needs max_steps, since nobody knows how long an epoch is, and mixes only
    within a block."""
    buffer_size: Annotated[Count, "samples", _BLOCKS, _BLOCK] = 16384
    """With streaming: samples that are shuffled, and packed, together.
    How: The run begins when the first block is read and tokenised; the next one is made while this one is trained.
    When: Raise it for better mixing and fuller rows, lower it for an earlier first step."""
    on_bad_row: Annotated[Literal["skip", "quarantine", "error"], Mark.CONTENT] = "skip"
    """What becomes of rows that cannot be trained on.
    How: A row is bad when it cannot be read, has not the form that its data set should have, or has nothing to train.
    Each has a code, and the report counts them by code.
    When: error is right where the data should be clean; quarantine helps to fix it.
    - skip: counts and reports them
    - quarantine: also writes them with their reasons to bad_rows.jsonl in output_dir
    - error: ends the run and names them"""
    max_bad_rows: Annotated[NonNegative, "rows, or a share below 1", _NOT_REFUSED] | None = 0.01
    """Refuse a data set with more bad rows than this: a share of its rows below 1, or a number of rows.
    How: Each data set is counted by itself, without rows that truncation_strategy: drop leaves out; with streaming at
    every block of the first pass. A share always allows 10 rows, so that one bad row does not refuse a small file. The
    refusal names the three commonest reasons with the first lines of each.
    When: Raise it only for data that is known to be dirty. 0 allows none; null allows any number."""
    tokenized_path: Annotated[str, Mark.NAME, Mark.MACHINE, _NOT_KEPT] | None = None
    """Folder for the prepared rows, made if it is not there and opened if it is. null keeps them in the cache,
    $MEGATUNE_CACHE or ~/.cache/megatune.
    How: The folder holds tokens and a key of all that determined them; a run whose data or settings differ is refused
    instead of training on the wrong rows.
    When: Set it to prepare rows on one machine and train on another, or to keep them. The cache does the rest by
    itself."""
    max_samples: Annotated[Count, "rows", Mark.ROWS] | None = None
    """Use at most this many rows of each data set, the first ones.
    How: The rest is not read.
    When: Set it small to try a run out. To thin data out, dataset_weights draws at random."""
    val_size: Annotated[NonNegative, "rows, or a share below 1", Mark.ROWS] = 0.0
    """Hold out rows of the training data for evaluation: a share below 1, or a number of rows.
    How: A row's own text and the seed decide whether it is held out, so the split stays as rows are added or other
    settings change. Copies of a held-out row are not trained.
    When: 0.01 to 0.1 of the rows shows whether a run overfits. Needs eval_strategy."""
    train_on_prompt: Annotated[bool, Mark.ROWS, _ANSWERS] = False
    """Train on the user's turns as well as the assistant's.
    How: The loss then counts every token of the conversation; otherwise prompts are context only.
    When: Rarely useful outside of very small data sets: the model learns to write questions, too."""
    mask_history: Annotated[bool, Mark.ROWS, _ANSWERS, _ONE_TURN] = False
    """Train on the last assistant turn of each conversation only; earlier turns are context.
    How: With truncation_strategy: budget a long conversation then keeps its last turns instead of its first.
    When: For data whose earlier answers are not worth learning. Fewer tokens are trained for the same time."""
    enable_thinking: Annotated[bool, Mark.ROWS] | None = True
    """For models that think before they answer: how answers without reasoning are written.
    How: true trains them to begin with an empty thought. false takes all reasoning out and puts the empty thought into
    the prompt. null keeps reasoning where there is some, and puts an empty thought into the prompt where there is none.
    When: Set false for data without reasoning if the model will be asked with thinking off. Set null for mixed data."""
    preserve_thinking: Annotated[bool, Mark.ROWS, _EARLIER] | None = False
    """With mask_history, keep the reasoning of earlier answers, which is left out otherwise.
    How: Templates of thinking models drop the reasoning of earlier turns when they are asked; this keeps it as context.
    null is ms-swift's own rule: it is dropped where only the last answer is trained.
    When: Only if the model will be asked with its earlier reasoning in the prompt."""
    add_empty_thought: Annotated[bool, Mark.ROWS, _SWIFT_RULES] = True
    """With ms-swift's rules: answers without reasoning begin with an empty thought, in templates that have one.
    How: It stands before every answer; where only the last one is trained, before the answers to the last question.
    When: Set false for a model that will be asked with a prompt that has no empty thought."""
    answer_masks: Annotated[list[Literal["empty_thought", "think_tag"]] | None, Mark.ROWS, _SWIFT_RULES] = None
    """With ms-swift's rules: beginnings of answers that are context, and not trained.
    How: null masks nothing in version 3, and in version 4 empty thoughts of models that think only where they are asked
    to.
    When: Write an empty list to train empty thoughts, too.
    - empty_thought: a thought without text, with its tags
    - think_tag: the tag that opens a thought"""
    default_system: Annotated[str, Mark.ROWS] | None = None
    """System message for conversations that have none. null keeps the template's own.
    How: It is written as the template writes system messages. Conversations with a system message keep theirs.
    When: Set it to what the model will be asked with."""
    model_name: Annotated[str | list[str] | None, Mark.ROWS] = None
    """Replaces {{name}} and {{NAME}} in the data, for teaching a model who it is.
    How: The text is replaced before rows are tokenised. Of a list of two, rows whose field `tag` is zh get the first,
    all others the second. Data with the placeholder and no value here is refused.
    When: Set it with identity data sets; give two where they are Chinese and English."""
    model_author: Annotated[str | list[str] | None, Mark.ROWS] = None
    """Replaces {{author}} and {{AUTHOR}} in the data, for teaching a model who made it.
    How: The text is replaced before rows are tokenised. Of a list of two, rows whose field `tag` is zh get the first,
    all others the second. Data with the placeholder and no value here is refused.
    When: Set it with identity data sets; give two where they are Chinese and English."""
    preprocessing_num_workers: Annotated[Count, "processes", Mark.MACHINE, _PROCESSES] | None = None
    """Processes that turn text into tokens. null takes one.
    How: Rows are distributed to them in chunks of 256 and come back in order: their number changes no result. Each
    takes seconds to start. No more are started than the machine has cores and memory for.
    When: Raise it towards the machine's cores for data that takes minutes to prepare."""
    dataloader_num_workers: Annotated[int, Field(ge=0), "processes", Mark.MACHINE, _PROCESSES] | None = None
    """Processes, for each rank, that prepare batches ahead of the step. 0 prepares them in the rank's own process; null
    is 0 for text, and up to 4 where rows have images or videos.
    How: Text is only copied from prepared rows; images and videos are decoded and resized, which takes a core. No
    more are started than the machine has cores and memory for. The number of processes changes no result.
    When: Raise it where the log shows that steps wait for data. For text 0 is nearly always right."""
    dataloader_pin_memory: bool = True
    """Keep batches in page-locked memory, from where copies to a GPU overlap with computing.
    How: It takes as much host memory as a few batches; without a GPU it does nothing.
    When: Turn it off only where the host allows no page-locked memory."""
    image_max_pixels: Annotated[Count, "pixels", Mark.PICTURES] = 768 * 768
    """Images of more pixels are made smaller, to this area.
    How: The encoder cuts an image into patches, and a square of them becomes a token: the tokens of a row, and the time
    of the encoder, are in proportion. The model's own processor then resizes to the bounds of its files.
    When: Lower it where images need no detail, raise it for small print; `megatune data preview` shows sizes and
    tokens."""
    image_min_pixels: Annotated[Count, "pixels", Mark.PICTURES] = 32 * 32
    """Images of fewer pixels are made larger, to this area.
    How: It is done before the image is cut into patches; the model's own processor has a least area, too.
    When: Seldom."""
    image_scale_pixels: Annotated[Count, "pixels", Mark.PICTURES, _SWIFT_RULES] | None = None
    """With ms-swift's rules: images of more pixels are first scaled down to this area.
    How: Then every image is brought to whole tokens, between image_min_pixels and image_max_pixels; the bounds of the
    model's processor do not count.
    When: Set it to what ms-swift's --max_pixels is in a run to match."""
    crop_to_patches: Annotated[bool, Mark.PICTURES] = False
    """InternVL cuts an image into tiles: at most 12, whose sides have its ratio, and the whole image as one more.
    How: Each tile has as many tokens as an image that is not cut, 256 in the published models. It is what
    Transformers' processor does when it is asked for answers.
    When: Set it for documents and small print; without it an image is one tile, as in LLaMA-Factory.
    - true: up to 13 times the tokens of an image"""
    video_max_pixels: Annotated[Count, "pixels", Mark.PICTURES] = 256 * 256
    """Frames of a video with more pixels are made smaller, to this area.
    How: The tokens of a video are those of its frames.
    When: Lower it for long videos."""
    video_min_pixels: Annotated[Count, "pixels", Mark.PICTURES] = 16 * 16
    """Frames of a video with fewer pixels are made larger, to this area.
    How: It is done before the frames are cut into patches.
    When: Seldom."""
    video_fps: Annotated[Positive, "frames per second", Mark.PICTURES] = 2.0
    """Frames that are taken of each second of a video.
    How: They are spread evenly, at most video_maxlen of them. Of a video that is a list of frames, these count as so
    many a second.
    When: Raise it where motion matters."""
    video_maxlen: Annotated[Count, "frames", Mark.PICTURES, Limit(10**5, "every frame is decoded")] = 128
    """Frames that are taken of a video at most.
    How: Of a longer video they are spread evenly over all of it.
    When: Lower it to bound the tokens of a row."""
    media_dir: Annotated[str, Mark.PICTURES, Mark.NAME, Mark.MACHINE] | None = None
    """Folder that the images and videos of the data are named from. null takes dataset_dir.
    How: Absolute paths in the data are taken as they are, and so is a path that is no file there.
    When: Set it where pictures lie apart from the data."""

    @property
    def swift_version(self) -> int:
        """The version of ms-swift whose rules count; 0 where none does."""
        return int(self.conversation_rules[-1]) if self.conversation_rules.startswith("ms_swift") else 0
