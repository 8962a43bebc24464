"""The built-in handlers by name, for the archiver and the worker."""

from __future__ import annotations

BUILT_IN = {
    "base_handler": "flambeau.handlers.base:BaseHandler",
    "image_classifier": "flambeau.handlers.vision.handlers:ImageClassifier",
    "image_segmenter": "flambeau.handlers.vision.handlers:ImageSegmenter",
    "object_detector": "flambeau.handlers.vision.handlers:ObjectDetector",
    "dali_image_classifier": "flambeau.torchserve.handlers.dali:DALIImageClassifier",
    "text_classifier": "flambeau.handlers.text.classifier:TextClassifier",
    "onnx": "flambeau.handlers.onnx.handler:OnnxHandler",
    "gpt_handler": "flambeau.handlers.gpt:GptHandler",
    "sentence_embedder": "flambeau.handlers.embedding.handler:SentenceEmbedder",
}
# Known names without a handler here: they can be packed, and the worker's error shows this advice.
UNSUPPORTED = {
    "trt_llm_handler": "it needs TensorRT-LLM; use gpt_handler, or pack a handler of your own that imports it",
    "vllm_handler": "it needs vLLM; use gpt_handler, or pack a handler of your own that imports it",
}
