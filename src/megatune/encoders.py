"""The hyperparameters of vision encoders and the placeholders of images and videos in text, for all families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayers:
    """Options of the engine's own vision encoder. The defaults are Pixtral's (arXiv:2410.07073, section 2.2); others
    are for SigLIP (arXiv:2303.15343), InternViT (arXiv:2312.14238) and Gemma 4's encoder.

    Attributes:
        norm_epsilon: of its norms.
        rotary_base: of rotary embedding by row and column; None for a table of position embeddings.
        num_positions: rows of that table, one for each patch of an image, and one for the class token; 0 without it.
        axial: there are two tables, for columns and for rows, and rotary embedding uses the column for the first half
            of a head's channels, the row for the second.
        head_norms: each head's query and key are normalized with a weight, its value without, and scores not scaled.
        post_norms: outputs of attention and feed-forward are normalized before they are added.
        unit_pixels: pixels from 0 to 1 are mapped to -1 to 1 before the patch projection, with the channels of a pixel
            adjacent.
        standardized: the projector's average of patches is standardized by a loaded, untrained mean and scale.
        layer_norm: norms are LayerNorm; otherwise RMSNorm.
        bias: biases on every linear layer and on the projection of patches.
        pre_norm, final_norm: a norm before the first layer, and after the last.
        class_token: every image, or tile of one, has a learned token before its patches, which the decoder does not
            get.
        layer_scale: each branch of a layer is multiplied by a learned vector.
        projector: how the patches of a token are merged: by a linear layer, their average, concatenated, or their
            average times √(hidden size), normalized without a weight.
        projector_norm_epsilon: of its norm.
        projector_bias: biases on the projector's two linear layers.
    """

    norm_epsilon: float
    rotary_base: float | None = None
    num_positions: int = 0
    axial: bool = False
    head_norms: bool = False
    post_norms: bool = False
    unit_pixels: bool = False
    standardized: bool = False
    layer_norm: bool = False
    bias: bool = False
    pre_norm: bool = False
    final_norm: bool = False
    class_token: bool = False
    layer_scale: bool = False
    projector: Literal["merging_layer", "average", "side_by_side", "scaled_average"] = "merging_layer"
    projector_norm_epsilon: float = 1e-5
    projector_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPlaceholder:
    """The placeholder text of an image or video.

    Attributes:
        image, video: the tokens whose embeddings are replaced by features; "" if videos are not supported.
        start, end: the tokens before and after them; "" for no start.
        row_end: the token after each row of an image but the last; "" for none.
        around: text before the start and after the end.
    """

    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"
    row_end: str = ""
    around: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision encoder of a vision-language model and its patch mergers, with the names of Transformers'
    vision_config.

    Attributes:
        depth: layers.
        hidden_size: of the encoder; the mergers' outputs have out_hidden_size, the decoder's hidden size.
        gated: its feed-forward is SwiGLU; otherwise up-projection, activation and down-projection.
        hidden_act: the activation.
        patch_size, temporal_patch_size: a patch is patch_size² pixels of temporal_patch_size frames.
        spatial_merge_size: this many patches squared become one token of the decoder.
        num_position_embeddings: rows of its position table; 0 if it has rotary embeddings only.
        deepstack_visual_indexes: layers whose outputs, through one merger each, are added to the decoder's first
            layers.
        window_size: side of attention windows in pixels; None for attention over the whole image.
        fullatt_block_indexes: with windows, the layers that attend to the whole image.
        tokens_per_second: of temporal positions, if they follow a video's time; None if they count frames.
        timestamps: each pair of a video's frames is a separate block, after its time in seconds as text.
        one_position: image tokens have one position, like text; otherwise time, height and width.
        square: side of every image, or tile of one, in pixels; None if images keep their aspect ratio.
        tiles: an image may be split into tiles, plus the whole image as a thumbnail (InternVL).
        tokens_of_image: every image is resized to at most this many tokens; None if its own size decides.
        whole: in the decoder, image tokens attend to all tokens of the same image.
        whole_in_windows: with `whole`, only in layers with a window.
        layers: of the engine's own encoder; None if Transformers' module computes it.
        text: the placeholders of images and videos.
        image_token_id, video_token_id: of image and video tokens; negative if videos are not supported.
        vision_start_token_id, vision_end_token_id: of the tokens before and after them; negative if config.json does
            not have them.
        config: vision_config as JSON, from which Transformers builds the encoder.
        num_parameters: of the encoder, without mergers.
        num_projector_parameters: of all mergers.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int = 2
    in_channels: int = 3
    gated: bool = False
    hidden_act: str = "gelu_pytorch_tanh"
    num_position_embeddings: int = 0
    deepstack_visual_indexes: tuple[int, ...] = ()
    window_size: int | None = None
    fullatt_block_indexes: tuple[int, ...] = ()
    tokens_per_second: float | None = None
    timestamps: bool = False
    one_position: bool = False
    square: int | None = None
    tiles: bool = False
    tokens_of_image: int | None = None
    whole: bool = False
    whole_in_windows: bool = False
    layers: VisionLayers | None = None
    text: MediaPlaceholder = MediaPlaceholder()
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    config: str = "{}"
    num_parameters: int = 0
    num_projector_parameters: int = 0

    @property
    def reading(self) -> tuple[object, ...]:
        """The values that patches and tokens of images depend on: models with equal values read the same rows."""
        patches = self.patch_size, self.spatial_merge_size, self.temporal_patch_size, self.in_channels
        sizes = self.square, self.tiles, self.tokens_of_image, self.whole
        positions = self.tokens_per_second, self.timestamps, self.one_position
        ids = self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id
        return *patches, *sizes, *positions, self.text, *ids

    @property
    def has_videos(self) -> bool:
        """Whether the model supports videos."""
        return self.video_token_id >= 0

    @property
    def num_deepstack_mergers(self) -> int:
        """The number of deepstack mergers, one for each layer of deepstack_visual_indexes."""
        return len(self.deepstack_visual_indexes)

    @property
    def num_mergers(self) -> int:
        """The number of mergers: that of the last layer, and those of deepstack."""
        return 1 + self.num_deepstack_mergers

    @property
    def qkv_size(self) -> int:
        """Rows of a layer's fused projection to queries, keys and values."""
        return 3 * self.hidden_size

    @property
    def head_channels(self) -> int:
        """Channels of a head of the encoder."""
        return self.hidden_size // self.num_heads

    @property
    def patch_channels(self) -> int:
        """Values of a patch of one frame."""
        return self.in_channels * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Channels of the concatenated patches of one token."""
        return self.hidden_size * self.spatial_merge_size**2
