"""VisionArchitecture: the shape of an encoder of images, and the tokens that stand for an image in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flambeau.llm.models.families.image_readers import ImageReader

VisionActivation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]
# How a decoder knows when a frame was: by positions that grow by one or with seconds, or by a text before the frame.
VideoTimes = Literal["steps", "seconds", "texts"]

TOKEN_IDS = "token_ids"  # given to an encoder of transformers that embeds several tokens
IS_VIDEO = "is_video"  # given to one that encodes videos otherwise than images
ONE_IMAGE = (
    "this model encodes several images of a chat otherwise than a single one, which is not supported; send one image"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionArchitecture:
    """What the engine has to know of every encoder."""

    # Whether other tokens may be between those of one image, such as the ends of its rows.
    is_divided: ClassVar[bool] = False

    attends_both_ways: bool = False  # the decoder's tokens of an image attend to each other in both directions …
    both_ways_in_windows: bool = False  # … in layers with a window only (Gemma 4)
    text_size: int  # the decoder's hidden size
    # The layers before which the second and later features are added; empty: one layer after another, from the second.
    layers_of_features: tuple[int, ...] = ()
    image_id: int  # the token in the places of an image
    video_id: int | None = None  # that of a video, if it has one of its own
    more_ids: tuple[int, ...] = ()  # tokens of its text that are embedded by the encoder, too

    @property
    def token_of_videos(self) -> int:
        """The token in the places of a video."""
        return self.image_id if self.video_id is None else self.video_id

    @property
    def ids(self) -> frozenset[int]:
        """The tokens whose embeddings the encoder gives."""
        videos = () if self.video_id is None else (self.video_id,)
        return frozenset((self.image_id, *videos, *self.more_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedVision(VisionArchitecture):
    """An encoder of transformers, which that package builds from config.json."""

    is_divided: ClassVar[bool] = True

    reader: ImageReader
    scale: float = 1.0  # of its embeddings, in the decoder
    steps_per_second: int | None = None  # positions of videos, where they grow with seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchArchitecture(VisionArchitecture):
    """An encoder of our own: a transformer over patches of an image."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int  # pixels of a side
    norm_epsilon: float
    activation: VisionActivation
    begin_id: int  # the tokens around those of an image
    end_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipArchitecture(PatchArchitecture):
    """An encoder (SigLIP) of images of one size, whose patches are pooled to the tokens of an image (Gemma 3)."""

    attends_both_ways: bool = True
    image_size: int  # pixels of a side
    num_tokens: int  # that an image takes in a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GridArchitecture(PatchArchitecture):
    """An encoder of images of any size; a square of patches becomes a token (Qwen2-VL to Qwen 3.5)."""

    merge_size: int = 2  # patches of a side of the square
    frames: int = 2  # that a patch has; an image is repeated
    video_times: VideoTimes = "steps"
    steps_per_second: int = 4  # positions, where they grow with seconds
    rope_theta: float = 10000.0  # of the rows and columns of patches
    has_gate: bool = False  # of the feed-forward layer (Qwen2.5-VL)
    norm: Literal["rms", "layer"] = "layer"
    window: int = 0  # patches of a side of a window, within which patches attend to each other; 0: all attend to all
    full_layers: frozenset[int] = frozenset()  # with windows: the layers without
    num_positions: int = 0  # learned ones, of a square that is stretched to the patches of an image (Qwen3-VL) …
    deep_layers: tuple[int, ...] = ()  # … and layers whose outputs are added to those of the first of the decoder

    @property
    def is_newer(self) -> bool:
        """Whether tensors have Qwen3-VL's names."""
        return self.num_positions > 0
