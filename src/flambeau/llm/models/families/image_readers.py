"""IMAGE_READERS: models whose images transformers encodes, and whose texts the engine's own network continues.

Each row was compared with the whole model of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReader:
    """How it is used for videos."""

    processor: str  # the class of its processor of videos
    token_key: str = ""  # of config.json: the token in the places of a video; empty: that of an image
    token_id: int = 0  # … if config.json names none
    pixels: str = "pixel_values_videos"  # what its processor calls the pixels
    inputs: tuple[str, ...] = ()  # what it takes beside them
    num_frames: int = 32  # that are read at most, where the files name neither a number nor a rate …
    rate: float | None = None  # … and how many a second; None: as many from every video
    counts_in_arrays: bool = False  # its processor needs the content of frames where it writes the text of a video
    steps_key: str = ""  # of config.json: positions of a second; empty: times are no positions, or are in texts …
    steps_default: int = 25  # … and what they are if it does not say it


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """How an encoder of transformers is used."""

    model_type: str
    class_name: str  # the class in transformers that has `get_image_features`
    processors: tuple[str, ...]  # classes of its processor; the first one if the files name none
    image_id: int  # the token in the places of an image, if config.json names none
    text_type: str  # the model_type of its decoder, if config.json names none
    inputs: tuple[str, ...] = ()  # what it takes beside the pixels
    more_ids: str = ""  # the key of further tokens in the text of an image that the encoder embeds, and what they are …
    more_default: tuple[int, ...] = ()  # … if config.json does not say it
    names_layers: bool = False  # config.json names the layers before which some of its features are added
    adds_features: bool = False  # the first layers of its decoder add some of its features, too
    has_grid: bool = False  # the rows and columns of an image are positions of its tokens
    reads_one: bool = False  # it encodes several images of a chat otherwise than one
    projects: bool = False  # features are projected to embeddings outside of `get_image_features`
    needs_torchvision: bool = False  # there is no processor of images that uses Pillow alone
    counts_in_tensors: bool = False  # its processor asks for tensors where it writes the text of an image
    needs_timm: bool = False  # its encoder is a network of that package
    since: tuple[int, int] = (5, 22)  # the version of transformers whose processor was compared first
    videos: VideoReader | None = None  # None: it reads none


PIXTRAL = "PixtralProcessor"
OMNI_VIDEOS = VideoReader(
    processor="Qwen2VLVideoProcessor",
    token_key="video_token_id",
    token_id=151656,
    inputs=("video_grid_thw",),
    rate=2.0,
    steps_key="position_id_per_seconds",
)
# What files may leave out of `text_config`, because it is transformers' default.
_SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
TEXT_SIZES = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008, **_SEVEN_BILLION},
    "mistral": {"vocab_size": 32000, "intermediate_size": 14336, **_SEVEN_BILLION},
    "ministral3": {"vocab_size": 131072, "intermediate_size": 14336, **_SEVEN_BILLION, "num_hidden_layers": 34},
    "granite": {"vocab_size": 32000, "intermediate_size": 11008, **_SEVEN_BILLION},
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, **_SEVEN_BILLION},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, **_SEVEN_BILLION},
    "cohere2": {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
    },
    "lfm3": {
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
    },
}

IMAGE_READERS = {
    "Mistral3ForConditionalGeneration": ImageReader(
        model_type="mistral3",
        class_name="Mistral3Model",
        processors=(PIXTRAL,),
        image_id=10,
        text_type="mistral",
        inputs=("image_sizes",),
    ),
    "LlavaForConditionalGeneration": ImageReader(
        model_type="llava",
        class_name="LlavaModel",
        processors=("LlavaProcessor", PIXTRAL),
        image_id=32000,
        text_type="llama",
        inputs=("image_sizes",),
    ),
    "InternVLForConditionalGeneration": ImageReader(
        model_type="internvl",
        class_name="InternVLModel",
        processors=("InternVLProcessor",),
        image_id=151667,
        text_type="qwen2",
        videos=VideoReader(processor="InternVLVideoProcessor", pixels="pixel_values"),
    ),
    "Idefics3ForConditionalGeneration": ImageReader(
        model_type="idefics3",
        class_name="Idefics3Model",
        processors=("Idefics3Processor",),
        image_id=128257,
        text_type="llama",
        inputs=("pixel_attention_mask",),
    ),
    "SmolVLMForConditionalGeneration": ImageReader(
        model_type="smolvlm",
        class_name="SmolVLMModel",
        processors=("SmolVLMProcessor",),
        image_id=128257,
        text_type="llama",
        inputs=("pixel_attention_mask",),
        videos=VideoReader(
            processor="SmolVLMVideoProcessor",
            pixels="pixel_values",
            inputs=("pixel_attention_mask",),
            num_frames=64,
            rate=1.0,
        ),
    ),
    "Llama4ForConditionalGeneration": ImageReader(
        model_type="llama4",
        class_name="Llama4ForConditionalGeneration",
        processors=("Llama4Processor",),
        image_id=200092,
        text_type="llama4_text",
        projects=True,
        needs_torchvision=True,
    ),
    "LlavaNextForConditionalGeneration": ImageReader(
        model_type="llava_next",
        class_name="LlavaNextModel",
        processors=("LlavaNextProcessor",),
        image_id=32000,
        text_type="llama",
        inputs=("image_sizes",),
    ),
    "LlavaOnevisionForConditionalGeneration": ImageReader(
        model_type="llava_onevision",
        class_name="LlavaOnevisionModel",
        processors=("LlavaOnevisionProcessor",),
        image_id=151646,
        text_type="qwen2",
        inputs=("image_sizes",),
        reads_one=True,
        videos=VideoReader(processor="LlavaOnevisionVideoProcessor", token_key="video_token_index", token_id=151647),
    ),
    "Lfm2VlForConditionalGeneration": ImageReader(
        model_type="lfm2_vl",
        class_name="Lfm2VlModel",
        processors=("Lfm2VlProcessor",),
        image_id=396,
        text_type="lfm2",
        inputs=("spatial_shapes", "pixel_attention_mask"),
        needs_torchvision=True,
    ),
    "Cohere2VisionForConditionalGeneration": ImageReader(
        model_type="cohere2_vision",
        class_name="Cohere2VisionModel",
        processors=("Cohere2VisionProcessor",),
        image_id=255036,
        text_type="cohere2",
        needs_torchvision=True,
    ),
    "AyaVisionForConditionalGeneration": ImageReader(
        model_type="aya_vision",
        class_name="AyaVisionModel",
        processors=("AyaVisionProcessor",),
        image_id=255036,
        text_type="cohere2",
    ),
    "Glm4vForConditionalGeneration": ImageReader(
        model_type="glm4v",
        class_name="Glm4vModel",
        processors=("Glm4vProcessor",),
        image_id=151343,
        text_type="glm4v_text",
        inputs=("image_grid_thw",),
        has_grid=True,
        videos=VideoReader(processor="Glm4vVideoProcessor", inputs=("video_grid_thw",)),
    ),
    "Glm4vMoeForConditionalGeneration": ImageReader(
        model_type="glm4v_moe",
        class_name="Glm4vMoeModel",
        processors=("Glm4vProcessor",),
        image_id=151363,
        text_type="glm4v_moe_text",
        inputs=("image_grid_thw",),
        has_grid=True,
        videos=VideoReader(processor="Glm4vVideoProcessor", inputs=("video_grid_thw",)),
    ),
    "Glm46VForConditionalGeneration": ImageReader(
        model_type="glm46v",
        class_name="Glm46VModel",
        processors=("Glm46VProcessor",),
        image_id=151343,
        text_type="glm4v_text",
        inputs=("image_grid_thw",),
        has_grid=True,
        videos=VideoReader(processor="Glm46VVideoProcessor", inputs=("video_grid_thw",)),
    ),
    "Gemma4ForConditionalGeneration": ImageReader(
        model_type="gemma4",
        class_name="Gemma4Model",
        processors=("Gemma4Processor",),
        image_id=258880,
        text_type="gemma4_text",
        inputs=("image_position_ids",),
        videos=VideoReader(
            processor="Gemma4VideoProcessor",
            token_key="video_token_id",
            token_id=258884,
            inputs=("video_position_ids", "num_frames_per_video"),
        ),
    ),
    "Gemma4UnifiedForConditionalGeneration": ImageReader(
        model_type="gemma4_unified",
        class_name="Gemma4UnifiedForConditionalGeneration",
        processors=("Gemma4UnifiedProcessor",),
        image_id=258880,
        text_type="gemma4_unified_text",
        inputs=("image_position_ids",),
        needs_torchvision=True,
        videos=VideoReader(
            processor="Gemma4UnifiedVideoProcessor",
            token_key="video_token_id",
            token_id=258884,
            inputs=("video_position_ids", "num_frames_per_video"),
        ),
    ),
    "LightOnOcrForConditionalGeneration": ImageReader(
        model_type="lighton_ocr",
        class_name="LightOnOcrForConditionalGeneration",
        processors=("LightOnOcrProcessor",),
        image_id=151655,
        text_type="qwen3",
        inputs=("image_sizes",),
    ),
    "VipLlavaForConditionalGeneration": ImageReader(
        model_type="vipllava",
        class_name="VipLlavaModel",
        processors=("LlavaProcessor",),
        image_id=32000,
        text_type="llama",
    ),
    "GotOcr2ForConditionalGeneration": ImageReader(
        model_type="got_ocr2",
        class_name="GotOcr2Model",
        processors=("GotOcr2Processor",),
        image_id=151859,
        text_type="qwen2",
    ),
    "QianfanOCRForConditionalGeneration": ImageReader(
        model_type="qianfan_ocr",
        class_name="QianfanOCRForConditionalGeneration",
        processors=("QianfanOCRProcessor",),
        image_id=151667,
        text_type="qwen3",
    ),
    "GlmOcrForConditionalGeneration": ImageReader(
        model_type="glm_ocr",
        class_name="GlmOcrModel",
        processors=("Glm46VProcessor", "GlmOcrProcessor"),
        image_id=59280,
        text_type="glm_ocr_text",
        inputs=("image_grid_thw",),
        has_grid=True,
    ),
    "Exaone4_5_ForConditionalGeneration": ImageReader(
        model_type="exaone4_5",
        class_name="Exaone4_5_Model",
        processors=("Exaone4_5_Processor",),
        image_id=67,
        text_type="exaone4",
        inputs=("image_grid_thw",),
    ),
    "PaddleOCRVLForConditionalGeneration": ImageReader(
        model_type="paddleocr_vl",
        class_name="PaddleOCRVLForConditionalGeneration",
        processors=("PaddleOCRVLProcessor",),
        image_id=100295,
        text_type="paddleocr_vl_text",
        inputs=("image_grid_thw",),
        has_grid=True,
    ),
    "DeepseekOcr2ForConditionalGeneration": ImageReader(
        model_type="deepseek_ocr2",
        class_name="DeepseekOcr2ForConditionalGeneration",
        processors=("DeepseekOcr2Processor",),
        image_id=128815,
        text_type="deepseek_ocr2_text",
        inputs=("pixel_values_local", "num_local_patches"),
    ),
    "Kimi_K25ForConditionalGeneration": ImageReader(
        model_type="kimi_k25",
        class_name="Kimi_K25ForConditionalGeneration",
        processors=("Kimi_K25Processor",),
        image_id=163605,
        text_type="deepseek_v3",
        inputs=("image_grid_thw",),
        needs_torchvision=True,
    ),
    "MiniCPMV4_6ForConditionalGeneration": ImageReader(
        model_type="minicpmv4_6",
        class_name="MiniCPMV4_6Model",
        processors=("MiniCPMV4_6Processor",),
        image_id=248056,
        text_type="qwen3_5_text",
        inputs=("target_sizes",),
    ),
    "MiniCPMOcrForConditionalGeneration": ImageReader(
        model_type="minicpm_ocr",
        class_name="MiniCPMOcrModel",
        processors=("MiniCPMOcrProcessor",),
        image_id=248056,
        text_type="qwen3_5_text",
        inputs=("target_sizes",),
        needs_torchvision=True,
    ),
    "Granite4VisionForConditionalGeneration": ImageReader(
        model_type="granite4_vision",
        class_name="Granite4VisionForConditionalGeneration",
        processors=("Granite4VisionProcessor",),
        image_id=32000,
        text_type="granite4_vision_text",
        inputs=("image_sizes",),
        names_layers=True,
    ),
    "Ovis2ForConditionalGeneration": ImageReader(
        model_type="ovis2",
        class_name="Ovis2Model",
        processors=("Ovis2Processor",),
        image_id=151665,
        text_type="qwen2",
        more_ids="visual_indicator_token_ids",
        more_default=(151666, 151667, 151668, 151669, 151670),
        counts_in_tensors=True,
    ),
    "Gemma3nForConditionalGeneration": ImageReader(
        model_type="gemma3n",
        class_name="Gemma3nModel",
        processors=("Gemma3nProcessor",),
        image_id=262145,
        text_type="gemma3n_text",
        more_ids="eoi_token_id",
        more_default=(262144,),
        needs_timm=True,
    ),
    "FastVlmForConditionalGeneration": ImageReader(
        model_type="fast_vlm",
        class_name="FastVlmModel",
        processors=("LlavaProcessor",),
        image_id=151646,
        text_type="qwen2",
        needs_timm=True,
    ),
    "PerceptionLMForConditionalGeneration": ImageReader(
        model_type="perception_lm",
        class_name="PerceptionLMModel",
        processors=("PerceptionLMProcessor",),
        image_id=128002,
        text_type="llama",
        needs_torchvision=True,
        needs_timm=True,
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": ImageReader(
        model_type="qwen2_5_omni_thinker",
        class_name="Qwen2_5OmniThinkerForConditionalGeneration",
        processors=("Qwen2_5OmniProcessor",),
        image_id=151655,
        text_type="qwen2_5_omni_text",
        inputs=("image_grid_thw",),
        has_grid=True,
        videos=OMNI_VIDEOS,
        since=(5, 23),
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": ImageReader(
        model_type="qwen3_omni_moe_thinker",
        class_name="Qwen3OmniMoeThinkerForConditionalGeneration",
        processors=("Qwen3OmniMoeProcessor",),
        image_id=151655,
        text_type="qwen3_omni_moe_text",
        inputs=("image_grid_thw",),
        adds_features=True,
        has_grid=True,
        videos=OMNI_VIDEOS,
        since=(5, 23),
    ),
    "DeepseekVLForConditionalGeneration": ImageReader(
        model_type="deepseek_vl",
        class_name="DeepseekVLModel",
        processors=("DeepseekVLProcessor",),
        image_id=100015,
        text_type="llama",
    ),
    "DeepseekVLHybridForConditionalGeneration": ImageReader(
        model_type="deepseek_vl_hybrid",
        class_name="DeepseekVLHybridModel",
        processors=("DeepseekVLHybridProcessor",),
        image_id=100015,
        text_type="llama",
        inputs=("high_res_pixel_values",),
    ),
    "JanusForConditionalGeneration": ImageReader(
        model_type="janus",
        class_name="JanusModel",
        processors=("JanusProcessor",),
        image_id=100581,
        text_type="llama",
    ),
    "LlavaNextVideoForConditionalGeneration": ImageReader(
        model_type="llava_next_video",
        class_name="LlavaNextVideoModel",
        processors=("LlavaNextVideoProcessor",),
        image_id=32001,
        text_type="llama",
        inputs=("image_sizes",),
        videos=VideoReader(
            processor="LlavaNextVideoVideoProcessor",
            token_key="video_token_index",
            token_id=32000,
            num_frames=8,
            counts_in_arrays=True,
        ),
    ),
    "VideoLlama3ForConditionalGeneration": ImageReader(
        model_type="video_llama_3",
        class_name="VideoLlama3Model",
        processors=("VideoLlama3Processor",),
        image_id=151655,
        text_type="qwen2",
        inputs=("image_grid_thw", "image_merge_sizes"),
    ),
    "GraniteDoclingForConditionalGeneration": ImageReader(
        model_type="granite_docling",
        class_name="GraniteDoclingModel",
        processors=("GraniteDoclingProcessor",),
        image_id=100337,
        text_type="granite_docling_text",
        inputs=("pixel_attention_mask", "tile_fine_mask"),
        adds_features=True,
        since=(5, 23),
    ),
    "Lfm3VlForConditionalGeneration": ImageReader(
        model_type="lfm3_vl",
        class_name="Lfm3VlModel",
        processors=("Lfm3VlProcessor",),
        image_id=125030,
        text_type="lfm3",
        inputs=("image_grid_thw",),
        videos=VideoReader(
            processor="Qwen3VLVideoProcessor",
            token_key="video_token_id",
            token_id=125029,
            inputs=("video_grid_thw",),
            rate=2.0,
        ),
        since=(5, 23),
    ),
    "NemotronH_Omni_Reasoning_V3": ImageReader(
        model_type="nemotron_h_omni",
        class_name="NemotronH_Omni_Reasoning_V3",
        processors=("NemotronH_Omni_Reasoning_V3Processor",),
        image_id=18,
        text_type="nemotron_h",
        inputs=("image_grid_hw",),
        needs_torchvision=True,
    ),
}
WHOLE_MODELS = {  # of which one part is read: their names, and those of that part
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",  # an older name
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
REFUSED = {  # why models that read images are not read
    "MllamaForConditionalGeneration": "layers of its own attend to images",
    "PaliGemmaForConditionalGeneration": "its prompts attend to themselves in both directions",
    "Molmo2ForConditionalGeneration": "its decoder is not known",
    "Idefics2ForConditionalGeneration": "what stands for an image depends on the text beside it",
    "MiniCPMV4_7ForConditionalGeneration": "tokens around its tiles have positions on one canvas with them",
    "UnlimitedOcrForConditionalGeneration": "its windows contain the whole prompt besides",
    "T5Gemma2ForConditionalGeneration": "an encoder reads its prompts",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "its encoder cannot be read apart from its decoder",
}
