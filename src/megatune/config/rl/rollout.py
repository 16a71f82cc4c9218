"""Keys of rollouts: prompts, rewards, filters, lengths, sampling, and asynchronous generation."""

from __future__ import annotations

from fractions import Fraction
from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field

from megatune.config.setting import Count, Group, NonNegative

ENVIRONMENTS = ("python", "search")  # the built-in ones


class GroupFilter(Group):
    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """Which groups of responses are dropped before training, by their scores.
    How: filter_args has the bounds. The group of another prompt takes the place of a dropped one.
    When: mean_filter or std_filter with rewards of 0 and 1.
    - no_filter: none
    - mean_filter: groups whose mean is not between threshold_down and threshold_up
    - std_filter: groups whose standard deviation is not above std_threshold"""
    filter_args: dict[str, Any] = Field(default={})
    """The bounds: threshold_up and threshold_down, or std_threshold.
    How: See type.
    When: For instance {threshold_up: 0.9, threshold_down: 0.1}, or {std_threshold: 0}."""

    def keeps(self, mean: float, std: float) -> bool:
        """Return whether a group with this mean and standard deviation of scores is kept."""
        bounds = self.filter_args
        if self.type == "mean_filter":
            return bool(bounds.get("threshold_down", -inf) < mean < bounds.get("threshold_up", inf))
        return self.type == "no_filter" or bool(std > bounds.get("std_threshold", -inf))


class PromptData(Group):
    file_name: list[str] = Field(default=[])
    """Files with problems: json, jsonl, csv, parquet.
    How: Paths are relative to the working directory, not to dataset_dir, as in ROLL. FILE#N means the first N rows of a
    file.
    When: Required in actor_train and validation."""
    domain_interleave_probs: dict[str, float] = Field(default={})
    """Domain -> fraction of each step's prompts; the names are those of rewards.
    How: A domain gets its fraction of rollout_batch_size, rounded down, and the last one gets the rest, so the order
    matters.
    When: Required with several rewards."""
    template: str | None = None
    """The chat template of prompts: native, qwen2_5, qwen3, chatml, base, empty and others.
    How: native is the tokenizer's own. Only that of actor_train is used; rewards score responses as text.
    When: The model's own: a template that it was not trained with costs accuracy."""
    tag: str = "tag"
    """Column of the tag that decides a row's domain.
    How: See tag_included.
    When: If the data has another name for it."""
    id: str = "id"
    """Column of the row's id.
    How: The id of a row without one is its index.
    When: If the data has another name for it."""
    messages: str | None = None
    """Column of the conversation: a list of messages, or JSON text of one.
    How: If a row does not have it, prompt is used.
    When: messages is usual."""
    prompt: str | None = None
    """Column of prompts that are plain text, used as they are.
    How: No template is applied.
    When: With data that is not a conversation."""
    conversation_rules: Literal["ms_swift_3", "ms_swift_4"] | None = None
    """Read and format rows by ms-swift's rules. null uses messages or prompts as they are.
    How: Rows can have any of ms-swift's formats, an answer at their end is left out, and template is one of its names,
    or null for the model's. `megatron rlhf --rlhf_type grpo` sets it.
    When: With data made for ms-swift.
    - ms_swift_3: the rules of version 3
    - ms_swift_4: the rules of version 4"""
    default_system: str | None = None
    """The system message of rows that have none, with conversation_rules. null is that of the template.
    How: A row's own system message takes precedence.
    When: For a prompt that describes the answer format: which tags, which box."""
    enable_thinking: bool | None = None
    """Whether prompts ask for reasoning, with conversation_rules. null is ms-swift's own choice for the model.
    How: A prompt of a reasoning model ends with the start of a reasoning block, or with an empty block.
    When: false for short answers of a reasoning model."""
    images: str = "images"
    """Column of a row's images, as paths or bytes, for vision-language models.
    How: Each `<image>` in the messages is replaced by one of them, in order; without tags they are put before the
    question. Content parts, {type: image, ...}, may also name them.
    When: If the data has another name for it."""
    image_max_pixels: Annotated[Count, "pixels"] = 4096 * 4096
    """Images with more pixels are scaled down to this area.
    How: An image is resized once, to whole tokens within the two limits; those of the model's processor are not used.
    When: So that prompts fit prompt_length, whose tokens count those of images."""
    image_min_pixels: Annotated[Count, "pixels"] = 56 * 56
    """Images with fewer pixels are scaled up to this area.
    How: As for image_max_pixels.
    When: Rarely needed."""
    media_dir: str | None = None
    """Folder that image paths are relative to. null is the working directory.
    How: Absolute paths are used as they are. Every machine reads images at the same path.
    When: If rows have image paths relative to another folder."""
    response: str = "solution"
    """Column of a reference answer.
    How: Rewards that need a reference answer read ground_truth first.
    When: If the data has another name for it."""

    def prompts_of_domains(self, rollout_batch_size: int) -> dict[str, int]:
        """Return the number of prompts per step by domain: fractions rounded down, the last gets the rest, as in ROLL.

        Fractions are computed exactly as decimals: 0.29 of 100 is 29, not 28 as in floating point.
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
    How: docs/rl-rewards.md describes what this does not protect against.
    When: false with code_url."""
    judge_prompt: str | None = None
    """Name of the judge model's prompt.
    How: It is one of the built-in ones.
    When: With llm_judge."""
    judge_model_type: Literal["api", "inference", "cluster"] | None = None
    """Where the judge model runs.
    How: It reads the problem, the reference answer and the response, and its answer is the score.
    When: api to try, inference for throughput.
    - api: an HTTP server with OpenAI's protocol, at judge_api_url
    - inference: on the device_mapping of the reward
    - cluster: the role reward_model, shared by several rewards"""
    judge_model_name: str | None = None
    """The model's name at judge_api_url.
    How: It is sent with each request.
    When: With judge_model_type: api."""
    judge_api_url: str | None = None
    """Address of the judge's server.
    How: https://HOST/v1/chat/completions, or a prefix of it such as https://HOST/v1.
    When: With judge_model_type: api."""
    judge_api_key: str | None = None
    """API key of that server; it is never written to a file.
    How: With ${oc.env:NAME} it comes from an environment variable, so it need not be in the file.
    When: If the server requires one."""
    format_pattern: str | None = None
    """Regular expression of a well-formed response.
    How: The fraction of matching responses is a metric, and does not affect scores.
    When: To monitor whether a format is learned."""
    reward_type: Literal["loose", "soft", "strict"] | None = None
    """The score of crossthinkqa for a right letter without a box, or a wrong one in a box. null is soft.
    How: A right letter in a box scores 1, a wrong one without a box -1.
    When: soft early in training.
    - loose: only the letter counts
    - soft: ± 0.5
    - strict: the box is required"""
    score_weight: float = 1.0
    """The factor of a reward model's score.
    How: With worker_cls: swift and a model the product is added to the sum of the reward functions.
    When: If its scores are much larger or smaller than those that they are added to."""
    truncated_score: float | None = None
    """The score of a response that was truncated at response_length, instead of the reward model's. null keeps that.
    How: A reward model reads every response as a finished turn, and cannot know that one was truncated.
    When: Below the usual scores, such as -1, if responses grow to the limit; max_len_mask leaves them out."""
    response_length_penalty_coef: float = 0.0
    """The factor of crossthinkqa's penalty of short responses.
    How: The penalty rises from -0.5 at 100 tokens to 0 at 400.
    When: Start with 0."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of a custom reward class, or max_tokens and window of worker_cls: length.
    How: timeout is the time limit of one response in seconds.
    When: With a custom worker_cls."""
    environment: str | None = None
    """The environment of multi-turn responses, which answers each turn of the model: python, search, or
    package.module.Class.
    How: Its observations are in the context of the next turn, and are not trained. Without worker_cls its rewards are
    the score; with worker_cls the last turn is scored. docs/rl-rewards.md describes the class.
    When: For games and tool calls."""
    environment_arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment.
    How: python takes seconds and max_characters, search takes file, results and max_characters.
    When: With environment."""
    max_turns: Annotated[Count, "turns"] = 8
    """With environment: the maximum number of model turns in a response.
    How: response_length limits all turns together, including the observations between them.
    When: As many as a good player needs, and a few more."""
    query_filter_config: GroupFilter = GroupFilter()


class DatasetFilter(Group):
    source: list[str] = Field(default=[])
    """Keep only rows whose column source is one of these. An empty list keeps all.
    How: Rows are filtered before they are tokenized.
    When: To train on a part of a file."""
    num_samples: Annotated[int, Field(ge=0), "rows"] = 0
    """Keep only this many of the first rows; 0 keeps all.
    How: It is applied after source.
    When: For test runs."""


class RolloutSettings(Group):
    rollout_batch_size: Annotated[Count, "prompts"] = 128
    """Number of prompts per step.
    How: A step trains on this many times num_return_sequences_in_group responses.
    When: 64 to 512 is usual; more prompts make gradients less noisy and steps longer."""
    num_return_sequences_in_group: Annotated[Count, "responses"] = 1
    """Number of responses that are sampled per prompt, its group.
    How: With adv_estimator: grpo, and with norms over the group, a response is compared with the others of its group.
    It overwrites num_return_sequences of actor_infer.generating_args, as in ROLL.
    When: 8 or 16; 1 only with a critic."""
    prompt_length: Annotated[Count, "tokens"] = 1024
    """The maximum length of prompts; rows with more tokens are left out, and so are prompts of five tokens or fewer.
    How: The number of rows that were left out is logged when the data is read.
    When: Large enough that few rows are lost."""
    response_length: Annotated[Count, "tokens"] | None = None
    """The maximum length of responses.
    How: It sets sequence_length to prompt_length plus this. A response may always have sequence_length minus
    prompt_length tokens, regardless of max_new_tokens, as in ROLL.
    When: Required, unless sequence_length is set. Longer responses are truncated: watch their fraction in the log."""
    sequence_length: Annotated[Count, "tokens"] | None = None
    """The maximum length of prompt and response together. null is prompt_length plus response_length.
    How: If both this and response_length are set, this one is used.
    When: One of the two is required."""
    val_prompt_length: Annotated[Count, "tokens"] | None = None
    """The maximum length of prompts in validation. null is prompt_length.
    How: It is set together with val_sequence_length.
    When: If validation has longer problems."""
    val_sequence_length: Annotated[Count, "tokens"] | None = None
    """The maximum length of prompt and response in validation. null is sequence_length.
    How: It is set together with val_prompt_length.
    When: To validate with longer responses than in training."""
    max_running_requests: Annotated[Count, "responses"] = 128
    """Number of responses that an engine samples at the same time.
    How: Each takes KV cache memory; responses that do not fit wait.
    When: Raise it as long as engines have free memory: decoding many costs hardly more than decoding one."""
    async_generation_ratio: NonNegative = 0.0
    """How many updates sampling may be ahead of training; 0 alternates the two.
    How: Above 0 engines sample the next steps during training, and a response may come from weights up to this many
    updates old, rounded up; older ones are dropped. Every sample records the versions of its weights, and
    train_infer_correction corrects for the difference.
    When: With actor_infer on separate devices: 1 hides most of the waiting."""
    is_use_additional_prompts: bool = False
    """Sample more prompts than a step needs, in case query_filter_config of their rewards drops groups.
    How: A step always has rollout_batch_size groups that pass the filter; without this, the prompt that replaces a
    dropped group begins only then, and the step waits for it.
    When: With a filter; DAPO calls it dynamic sampling."""
    max_additional_running_prompts: Annotated[int, Field(ge=0), "prompts"] = 16
    """With is_use_additional_prompts: how many additional prompts may be sampled at the same time.
    How: They are started before it is known whether they are needed.
    When: Raise it if many groups are filtered out."""
    partial_rollout_steps: Annotated[int, Field(ge=0), "steps"] = 0
    """For how many more steps a synchronous run continues responses that a step did not wait for; 0 drops them.
    How: With is_use_additional_prompts a step then trains on the first finished groups, and the others continue with
    the next weights. Every token records the version of the weights that sampled it, as with async_generation_ratio:
    train_infer_correction corrects for the difference. Groups that become older are restarted.
    When: If a few long responses keep engines idle at the end of a rollout: 1, with max_additional_running_prompts of a
    quarter of rollout_batch_size. Which groups finish first depends on timing, so runs are not reproducible."""
    global_template: str | None = None
    """The chat template of all prompts. null is actor_train.data_args.template.
    How: The names are those of template.
    When: Leave it out if actor_train has a template."""
    tag_to_template: dict[str, str] = Field(default={})
    """Tag -> chat template of the rows with that tag.
    How: Rows with another tag use global_template.
    When: If a domain needs another system prompt."""
    dataset_filter: DatasetFilter = DatasetFilter()

    @property
    def max_sequence_length(self) -> int:
        """The maximum length of prompt and response together, in tokens."""
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
        """The maximum length of prompt and response in training and validation, in tokens."""
        return max(self.max_sequence_length, self.val_sequence_length or 0)


class Generating(Group):
    temperature: NonNegative = 0.95
    """Divides logits before sampling: responses are more diverse above 1, less below it; 0 is greedy decoding.
    How: The trainer computes log-probabilities at the same temperature. ROLL's trainer always computes them at
    temperature 1.
    When: 1, or close to it, in training: groups need diverse responses. Lower in validation."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Sample among the most likely tokens that together have this probability.
    How: Log-probabilities are those of the full distribution, in engine and trainer.
    When: 1 in training, so that the trained policy is the one that samples."""
    top_k: Annotated[int, Field(ge=-1), "tokens"] = 50
    """Sample among this many most likely tokens; -1 or 0 takes all.
    How: As for top_p.
    When: Set it to -1 in training, for the same reason."""
    max_new_tokens: Annotated[Count, "tokens"] | None = None
    """The maximum length of a judge model's answer. null is 8192, as in ROLL.
    How: For actor_infer and validation it is always sequence_length minus prompt_length, as in ROLL.
    When: Set it for judges: a score is short."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Makes tokens that have already occurred less likely.
    How: In training it must be 1: the trainer's log-probabilities do not include a penalty.
    When: Only in validation."""
    num_return_sequences: Annotated[Count, "responses"] = 1
    """Number of responses per problem of validation: k of pass@k.
    How: In training num_return_sequences_in_group is used.
    When: Several if there are few problems: accuracy is then a mean over more responses."""
    stop_strings: list[str] = Field(default=[])
    """Texts that end a response.
    How: The text stays in the response.
    When: With base models that do not end by themselves: [\"</answer>\"]."""
    do_sample: bool = True
    """Whether tokens are sampled; false is greedy decoding.
    How: With greedy decoding all responses of a group are the same.
    When: false in validation, for reproducible results."""

    @property
    def max_tokens(self) -> int:
        """The maximum length of a response, or of a judge model's answer, in tokens."""
        return self.max_new_tokens or 8192
