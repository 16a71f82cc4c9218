"""The numbers that describe a vision encoder and what stands for pictures in text, whatever family they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayers:
    """Options of the engine's own vision encoder: those of Pixtral (arXiv:2410.07073, section 2.2) unless another is
    said, and of SigLIP (arXiv:2303.15343), InternViT (arXiv:2312.14238) and Gemma 4's encoder.

    Attributes:
        norm_epsilon: of its norms.
        rotary_base: of rotary embedding by row and column; None where positions are in a table.
        num_positions: rows of that table, one for each patch of an image, and one of the class token; 0 without.
        axial: there are two tables, of columns and of rows, and rotary embedding turns the first half of a head's
            channels by the column, the second by the row.
        head_norms: each head's query and key are normalized with a weight, its value without, and scores not scaled.
        post_norms: what attention and feed-forward put out is normalized before it is added.
        unit_pixels: pixels come from 0 to 1, and go into the projection of patches from -1 to 1, the channels of a
            pixel side by side.
        standardized: a vector is taken from the projector's average of patches, and another multiplies the rest; both
            are loaded and not trained.
        layer_norm: norms are LayerNorm; otherwise RMSNorm.
        bias: biases on every linear layer and on the projection of patches.
        pre_norm, final_norm: a norm before the first layer, and behind the last.
        class_token: every image, or tile of one, has a learned token before its patches, which is no token of the
            decoder.
        layer_scale: each branch of a layer is multiplied by a learned vector.
        projector: how the patches of a token become one: a linear layer, their average, side by side, or their average
            times √(hidden size), normalized without a weight.
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
class PictureText:
    """The text that stands for a picture: each row of tokens with a token behind it, or all tokens between two tokens.

    Attributes:
        image, video: the tokens that features take the place of; no video where it is "".
        start, end: before and behind them; no start where it is "".
        row_end: behind each row of an image but the last; "" where nothing is.
        around: text before the start and behind the end.
    """

    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"
    row_end: str = ""
    around: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision encoder of a vision-language model and its patch mergers, in the words of Transformers' vision_config.

    Attributes:
        depth: layers.
        hidden_size: of the encoder; the mergers' outputs are out_hidden_size wide, as the decoder's hidden states.
        gated: its feed-forward is SwiGLU; otherwise one matrix up, an activation and one matrix down.
        hidden_act: the activation.
        patch_size, temporal_patch_size: a patch is patch_size² pixels of temporal_patch_size frames.
        spatial_merge_size: this many patches squared become one token of the decoder.
        num_position_embeddings: rows of its table of positions; 0 where it has rotary embeddings alone.
        deepstack_visual_indexes: layers whose outputs, through a merger each, are added to the decoder's first layers.
        window_size: pixels of the side of the windows that patches attend within; None where to the whole image.
        fullatt_block_indexes: with windows, the layers whose patches attend to the whole image.
        tokens_per_second: of positions in time, where they follow a video's seconds; None where they count frames.
        timestamps: each pair of a video's frames is a block of its own, behind its time in seconds as text.
        one_position: tokens of pictures have positions as those of text have; otherwise in time, height and width.
        square: pixels of the sides that every image has, or every tile of one; None where images keep their shape.
        tiles: an image may be cut into several tiles, with the whole image as one more (InternVL).
        tokens_of_image: every image is resized to at most so many tokens; None where its own size counts.
        whole: in the decoder, too, the tokens of a picture see each other.
        whole_in_windows: with it, in layers with a window alone.
        layers: the engine's own encoder; None where Transformers' module computes it.
        text: what stands for pictures.
        image_token_id, video_token_id: of the tokens of an image, and of a video; below 0 where there is no video.
        vision_start_token_id, vision_end_token_id: what is before and behind them; below 0 where config.json does not
            say it.
        config: vision_config as JSON, which Transformers builds the encoder from.
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
    text: PictureText = PictureText()
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    config: str = "{}"
    num_parameters: int = 0
    num_projector_parameters: int = 0

    @property
    def reading(self) -> tuple[object, ...]:
        """What patches and tokens of a picture depend on: models in which it is the same read the same rows."""
        patches = self.patch_size, self.spatial_merge_size, self.temporal_patch_size, self.in_channels
        sizes = self.square, self.tiles, self.tokens_of_image, self.whole
        positions = self.tokens_per_second, self.timestamps, self.one_position
        ids = self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id
        return *patches, *sizes, *positions, self.text, *ids

    @property
    def has_videos(self) -> bool:
        """The model takes videos, too."""
        return self.video_token_id >= 0

    @property
    def num_deepstack_mergers(self) -> int:
        """One for each layer of deepstack_visual_indexes."""
        return len(self.deepstack_visual_indexes)

    @property
    def num_mergers(self) -> int:
        """The merger of the last layer, and those of deepstack."""
        return 1 + self.num_deepstack_mergers

    @property
    def qkv_size(self) -> int:
        """Rows of the projection that makes a layer's queries, keys and values."""
        return 3 * self.hidden_size

    @property
    def head_channels(self) -> int:
        """Channels of a head of the encoder."""
        return self.hidden_size // self.num_heads

    @property
    def patch_channels(self) -> int:
        """Numbers of a patch of one frame."""
        return self.in_channels * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Channels of the patches that become one token, side by side."""
        return self.hidden_size * self.spatial_merge_size**2
