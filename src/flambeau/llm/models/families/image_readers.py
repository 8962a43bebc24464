"""IMAGE_READERS: models whose images transformers encodes, and whose texts the engine's own network continues.

Each row was compared with the whole model of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    has_grid: bool = False  # the rows and columns of an image are positions of its tokens
    reads_one: bool = False  # it encodes several images of a chat otherwise than one
    projects: bool = False  # features are projected to embeddings outside of `get_image_features`
    needs_torchvision: bool = False  # there is no processor of images that uses Pillow alone
    counts_in_tensors: bool = False  # its processor asks for tensors where it writes the text of an image
    needs_timm: bool = False  # its encoder is a network of that package


PIXTRAL = "PixtralProcessor"
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
    ),
    "Glm4vMoeForConditionalGeneration": ImageReader(
        model_type="glm4v_moe",
        class_name="Glm4vMoeModel",
        processors=("Glm4vProcessor",),
        image_id=151363,
        text_type="glm4v_moe_text",
        inputs=("image_grid_thw",),
        has_grid=True,
    ),
    "Glm46VForConditionalGeneration": ImageReader(
        model_type="glm46v",
        class_name="Glm46VModel",
        processors=("Glm46VProcessor",),
        image_id=151343,
        text_type="glm4v_text",
        inputs=("image_grid_thw",),
        has_grid=True,
    ),
    "Gemma4ForConditionalGeneration": ImageReader(
        model_type="gemma4",
        class_name="Gemma4Model",
        processors=("Gemma4Processor",),
        image_id=258880,
        text_type="gemma4_text",
        inputs=("image_position_ids",),
    ),
    "Gemma4UnifiedForConditionalGeneration": ImageReader(
        model_type="gemma4_unified",
        class_name="Gemma4UnifiedForConditionalGeneration",
        processors=("Gemma4UnifiedProcessor",),
        image_id=258880,
        text_type="gemma4_unified_text",
        inputs=("image_position_ids",),
        needs_torchvision=True,
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
}
REFUSED = {  # why models that read images are not read
    "MllamaForConditionalGeneration": "layers of its own attend to images",
    "PaliGemmaForConditionalGeneration": "its prompts attend to themselves in both directions",
    "Molmo2ForConditionalGeneration": "its decoder is not known",
    "Idefics2ForConditionalGeneration": "what stands for an image depends on the text beside it",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "its encoder cannot be read apart from its decoder",
}
