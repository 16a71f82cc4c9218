"""Keys of rollouts: rows of prompts, what scores responses, how many and how long they are, how far they run ahead."""

from __future__ import annotations

from fractions import Fraction
from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, NonNegative

ENVIRONMENTS = ("python", "search")  # those that are built in


class GroupFilter(Group):
    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """Which groups of responses are dropped by their scores, before training.
    How: filter_args has the bounds. With is_use_additional_prompts others are sampled in their place.
    When: mean_filter or std_filter with rewards of 0 and 1.
    - no_filter: none
    - mean_filter: those whose mean is not between threshold_down and threshold_up
    - std_filter: those whose standard deviation is not above std_threshold"""
    filter_args: dict[str, Any] = Field(default={})
    """The bounds: threshold_up and threshold_down, or std_threshold.
    How: See type.
    When: For instance {threshold_up: 0.9, threshold_down: 0.1}, or {std_threshold: 0}."""

    def keeps(self, mean: float, std: float) -> bool:
        """Tell whether a group is kept, by the mean and the standard deviation of its scores."""
        bounds = self.filter_args
        if self.type == "mean_filter":
            return bool(bounds.get("threshold_down", -inf) < mean < bounds.get("threshold_up", inf))
        return self.type == "no_filter" or bool(std > bounds.get("std_threshold", -inf))


class PromptData(Group):
    file_name: list[str] = Field(default=[])
    """Files of problems: json, jsonl, csv, parquet.
    How: Paths are taken from the folder that the command runs in; dataset_dir is not put before them, as in ROLL.
    FILE#N means the first N rows of a file.
    When: Required in actor_train and validation."""
    domain_interleave_probs: dict[str, float] = Field(default={})
    """Domain -> share of each step's prompts; the names are those of rewards.
    How: A domain has the whole part of its share of rollout_batch_size, the last one the rest, so the order matters.
    When: Required with several rewards."""
    template: str | None = None
    """The chat template of prompts: native, qwen2_5, qwen3, chatml, base, empty and others.
    How: native is the tokenizer's own. Only actor_train's counts; a response is scored as text.
    When: That of the model: a template that it was not trained with costs accuracy."""
    tag: str = "tag"
    """Column of the tag that decides a row's domain.
    How: See tag_included.
    When: Where the data has another name for it."""
    id: str = "id"
    """Column of the row's id.
    How: A row without one has its place for an id.
    When: Where the data has another name for it."""
    messages: str | None = None
    """Column of the conversation: a list of messages, or JSON text of one.
    How: Used where it is there; otherwise prompt.
    When: messages is usual."""
    prompt: str | None = None
    """Column of prompts that are text, used as they are.
    How: No template is applied.
    When: With data that is not a conversation."""
    conversation_rules: Literal["ms_swift_3", "ms_swift_4"] | None = None
    """Read and write rows by ms-swift's rules. null takes messages or prompts as they stand.
    How: Rows have any of ms-swift's forms, an answer at their end is left out, and template is one of its names, or
    null for that of the model's name. `megatron rlhf --rlhf_type grpo` sets it.
    When: With data made for ms-swift.
    - ms_swift_3: as version 3
    - ms_swift_4: as version 4"""
    default_system: str | None = None
    """The system message of rows that have none, with conversation_rules. null is that of the template.
    How: A row's own wins.
    When: With a prompt that says how to answer: which tags, which box."""
    enable_thinking: bool | None = None
    """Whether prompts ask for reasoning, with conversation_rules. null is ms-swift's own choice for the model.
    How: A prompt of a model that thinks ends with the beginning of a thought, or with an empty one.
    When: false for short answers of a model that thinks."""
    images: str = "images"
    """Column of a row's images: paths, or their bytes; of a model that reads images.
    How: Each `<image>` in the messages stands for one of them, in order; without tags they go before the question.
    Parts of a content, {type: image, ...}, may name them, too.
    When: Where the data has another name for it."""
    image_max_pixels: Annotated[Count, "pixels"] = 4096 * 4096
    """Images of more pixels are made smaller, to this area.
    How: An image is resized once, to whole tokens within the two bounds; those of the model's files do not count.
    When: So that prompts fit prompt_length, whose tokens count those of images."""
    image_min_pixels: Annotated[Count, "pixels"] = 56 * 56
    """Images of fewer pixels are made larger, to this area.
    How: As for image_max_pixels.
    When: Seldom."""
    media_dir: str | None = None
    """Folder that images are named from. null is the folder that the command runs in.
    How: Absolute paths are taken as they are. Every machine reads images at the same path.
    When: Where rows name images by paths relative to their own folder."""
    response: str = "solution"
    """Column of a reference answer.
    How: Rewards that compare with one read ground_truth first.
    When: Where the data has another name for it."""

    def prompts_of_domains(self, rollout_batch_size: int) -> dict[str, int]:
        """Return the prompts of a step by domain: each share rounded down, the last domain takes the rest, as in ROLL.

        Shares are taken as they are written: 0.29 of 100 is 29, not what its binary fraction rounds down to.
        """
        *first, last = self.domain_interleave_probs
        shares = {domain: Fraction(str(self.domain_interleave_probs[domain])) for domain in first}
        sizes = {domain: int(share * rollout_batch_size) for domain, share in shares.items()}
        return {**sizes, last: rollout_batch_size - sum(sizes.values())}


class RewardSettings(Group):
    code_url: str | None = None
    """Address of an HTTP sandbox that runs code.
    How: With use_local: false.
    When: For code that must not run on the training machines, which is the safe way."""
    use_local: bool = True
    """Run code in limited processes of this machine.
    How: docs/rl-rewards.md says what that does not protect from.
    When: false with code_url."""
    judge_prompt: str | None = None
    """Name of the prompt of the model that judges.
    How: One of the built-in ones.
    When: With llm_judge."""
    judge_model_type: Literal["api", "inference", "cluster"] | None = None
    """Where the model is that judges.
    How: It reads the problem, the reference answer and the response, and its answer is the score.
    When: api to try, inference for throughput.
    - api: an HTTP server that speaks OpenAI's protocol, at judge_api_url
    - inference: on device_mapping of the reward itself
    - cluster: the role reward_model, which several rewards share"""
    judge_model_name: str | None = None
    """The model's name at judge_api_url.
    How: It is sent with each request.
    When: With judge_model_type: api."""
    judge_api_url: str | None = None
    """Address of the server that judges.
    How: https://HOST/v1/chat/completions, or what stands before it.
    When: With judge_model_type: api."""
    judge_api_key: str | None = None
    """Key of that server; it is written nowhere.
    How: Written as ${oc.env:NAME} it comes from a variable, and need not be in the file.
    When: Where the server asks for one."""
    format_pattern: str | None = None
    """Regular expression of a well-formed response.
    How: How many responses match is a metric, and changes no score.
    When: To watch whether a format is learnt."""
    reward_type: Literal["loose", "soft", "strict"] | None = None
    """What crossthinkqa gives for a right letter without a box, or a wrong one in it. null is soft.
    How: A right letter in a box is 1, a wrong one without is -1.
    When: soft early in training.
    - loose: the letter alone counts
    - soft: ± 0.5
    - strict: the box is needed"""
    score_weight: float = 1.0
    """What the score of a reward model is multiplied by.
    How: With worker_cls: swift and a model the product is added to the sum of its functions.
    When: Where its scores are much larger, or smaller, than what they are added to."""
    truncated_score: float | None = None
    """The score of a response that was cut at response_length, in place of the reward model's. null is its own.
    How: A reward model reads every response as a finished turn, and cannot know that one was cut.
    When: Below what it gives to most responses, such as -1, if responses grow to the limit; max_len_mask leaves them
    out."""
    response_length_penalty_coef: float = 0.0
    """How much short responses of crossthinkqa lose.
    How: It multiplies a penalty from -0.5 at 100 tokens to 0 at 400.
    When: 0 first."""
    arguments: dict[str, Any] = Field(default={})
    """What a class of your own is made with, or max_tokens and window of worker_cls: length.
    How: They are keyword arguments; timeout is how many seconds one response may take.
    When: With worker_cls of your own."""
    environment: str | None = None
    """What answers each turn of the model, so that a response has several: python, search, or package.module.Class.
    How: Its observations are in the context of the next turn, and are not trained. Without worker_cls its rewards are
    the score; with it the last turn is scored. docs/rl-rewards.md describes the class.
    When: For games, and for models that call tools."""
    environment_arguments: dict[str, Any] = Field(default={})
    """What the environment is made with: keyword arguments.
    How: python takes seconds and max_characters, search takes file, results and max_characters.
    When: With environment."""
    max_turns: Annotated[Count, "turns"] = 8
    """How many turns of the model a response has at most, with environment.
    How: response_length bounds all turns together, with the observations between them.
    When: As many as a good player needs, and a few more."""
    query_filter_config: GroupFilter = GroupFilter()


class DatasetFilter(Group):
    source: list[str] = Field(default=[])
    """Keep only rows whose column source is one of these. An empty list keeps all.
    How: Rows are filtered before prompts are made.
    When: To train on a part of a file."""
    num_samples: Annotated[int, Field(ge=0), "rows"] = 0
    """Keep only the first so many rows; 0 keeps all.
    How: After source has chosen.
    When: To try something out."""


class RolloutSettings(Group):
    rollout_batch_size: Annotated[Count, "prompts"] = 128
    """Prompts of one step.
    How: A step trains on this many times num_return_sequences_in_group responses.
    When: Larger ones make a steadier gradient and longer steps; 64 to 512 are usual."""
    num_return_sequences_in_group: Annotated[Count, "responses"] = 1
    """Responses that are sampled for each prompt: its group.
    How: With adv_estimator: grpo, and norms of kind group, a response is judged against the others of its group. It
    overwrites num_return_sequences of actor_infer.generating_args, as in ROLL.
    When: 8 or 16; 1 only with a critic."""
    prompt_length: Annotated[Count, "tokens"] = 1024
    """The longest prompt; rows with more tokens are left out, and so are prompts of five tokens or fewer.
    How: How many rows were left out is said when the data is read.
    When: So that few rows are lost: the log has their number."""
    response_length: Annotated[Count, "tokens"] | None = None
    """The longest response.
    How: It sets sequence_length to prompt_length plus this. The tokens left for a response are always sequence_length
    less prompt_length, whatever max_new_tokens says, as in ROLL.
    When: Required, unless sequence_length is written. Responses that reach it are cut: watch their share in the log."""
    sequence_length: Annotated[Count, "tokens"] | None = None
    """The longest prompt and response together. null is prompt_length plus response_length.
    How: Where both this and response_length are written, this one counts.
    When: One of the two is required."""
    val_prompt_length: Annotated[Count, "tokens"] | None = None
    """The longest prompt of validation. null is prompt_length.
    How: It is written together with val_sequence_length.
    When: Where validation has longer problems."""
    val_sequence_length: Annotated[Count, "tokens"] | None = None
    """The longest prompt and response of validation. null is sequence_length.
    How: It is written together with val_prompt_length.
    When: To validate with longer responses than those that are trained on."""
    max_running_requests: Annotated[Count, "responses"] = 128
    """Responses that an engine samples at the same time.
    How: Each takes memory for its keys and values; what does not fit waits.
    When: Raise it while engines have memory to spare: decoding many costs hardly more than decoding one."""
    async_generation_ratio: NonNegative = 0.0
    """How many updates sampling may be ahead of training; 0 takes turns.
    How: Above 0 engines sample the next steps while the trainer works, and a response may come from weights up to this
    many updates old, rounded up; older ones are dropped. Every sample has the versions of its weights, and
    train_infer_correction weighs what the difference does.
    When: With actor_infer on devices of its own: 1 hides most of the waiting."""
    is_use_additional_prompts: bool = False
    """Sample further prompts until enough groups pass query_filter_config of their rewards.
    How: A step then has rollout_batch_size groups that have something to teach; without it, groups that are filtered
    out are missing from the step.
    When: With a filter; it is what DAPO calls dynamic sampling."""
    max_additional_running_prompts: Annotated[int, Field(ge=0), "prompts"] = 16
    """How many further prompts may be sampled at the same time, with is_use_additional_prompts.
    How: They are begun before it is known whether they are needed.
    When: Raise it where many groups are filtered out."""
    partial_rollout_steps: Annotated[int, Field(ge=0), "steps"] = 0
    """For how many further steps a synchronous run continues responses that a step has not waited for; 0 drops them.
    How: With is_use_additional_prompts a step then trains on the first groups that are finished, and the others
    continue with the next weights. Every token has the version of the weights that sampled it, as with
    async_generation_ratio: train_infer_correction weighs what the difference does. Groups that become older begin anew.
    When: Where a few long responses keep engines idle at the end of a rollout: 1, with max_additional_running_prompts
    of a quarter of rollout_batch_size. Which groups are first depends on timing, so no two runs are the same."""
    global_template: str | None = None
    """The chat template of all prompts. null is actor_train.data_args.template.
    How: The names are those of template.
    When: Leave it out where actor_train has a template."""
    tag_to_template: dict[str, str] = Field(default={})
    """Chat templates of single tags, by tag.
    How: Rows with another tag have global_template.
    When: Where data of one domain needs another system prompt."""
    dataset_filter: DatasetFilter = DatasetFilter()

    @property
    def max_sequence_length(self) -> int:
        """The tokens of the longest prompt and response together."""
        return self.sequence_length or self.prompt_length + (self.response_length or self.prompt_length)

    @property
    def max_response_length(self) -> int:
        return self.max_sequence_length - self.prompt_length

    @property
    def val_max_response_length(self) -> int:
        longest = self.val_sequence_length or self.max_sequence_length
        return longest - (self.val_prompt_length or self.prompt_length)

    @property
    def longest_sequence(self) -> int:
        """The tokens of the longest prompt and response of training and of validation."""
        return max(self.max_sequence_length, self.val_sequence_length or 0)


class Generating(Group):
    temperature: NonNegative = 0.95
    """Divides logits before sampling: above 1 for more varied responses, below for surer ones; 0 takes the likeliest.
    How: The trainer computes log-probabilities at the same temperature. ROLL's trainer computes them at temperature 1,
    whatever the engines sample at.
    When: 1, or close to it, in training: groups need varied responses. Lower in validation."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Sample among the likeliest tokens that together have this probability.
    How: Log-probabilities are those before the cut, in engine and trainer alike.
    When: 1 in training, so that the policy that is trained is the one that samples."""
    top_k: Annotated[int, Field(ge=-1), "tokens"] = 50
    """Sample among this many likeliest tokens; -1 or 0 takes all.
    How: As for top_p.
    When: Write -1 in training, for the same reason."""
    max_new_tokens: Annotated[Count, "tokens"] | None = None
    """The longest answer of a model that judges. null is 8192, as in ROLL.
    How: Of actor_infer and validation it is what sequence_length leaves beside prompt_length, whatever stands here, as
    in ROLL.
    When: Set it for judges: a score is short."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Makes tokens that occurred already less likely.
    How: In training it must be 1: the trainer's log-probabilities know of no penalty.
    When: In validation at most."""
    num_return_sequences: Annotated[Count, "responses"] = 1
    """Responses for each problem of validation: k of pass@k.
    How: In training num_return_sequences_in_group counts.
    When: Several where problems are few: accuracy is then a mean over more responses."""
    stop_strings: list[str] = Field(default=[])
    """Texts that end a response.
    How: The text stays in the response.
    When: With base models that do not end by themselves: [\"</answer>\"]."""
    do_sample: bool = True
    """Whether tokens are sampled; false takes the likeliest.
    How: The likeliest tokens give every response of a group the same text.
    When: false in validation, for a number that does not change."""

    @property
    def max_tokens(self) -> int:
        """The tokens of a response, or of an answer of a model that judges."""
        return self.max_new_tokens or 8192
