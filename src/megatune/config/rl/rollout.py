"""Keys of rollouts: how many prompts and responses a step has, how long they are, how far sampling runs ahead."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatune.config.setting import Count, Group, NonNegative


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
