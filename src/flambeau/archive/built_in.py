"""The handlers that come with the server: what the archiver accepts by name and the worker loads by it."""

from __future__ import annotations

BUILT_IN = {
    "base_handler": "flambeau.handlers.base:BaseHandler",
    "image_classifier": "flambeau.handlers.vision.handlers:ImageClassifier",
    "image_segmenter": "flambeau.handlers.vision.handlers:ImageSegmenter",
    "object_detector": "flambeau.handlers.vision.handlers:ObjectDetector",
    "text_classifier": "flambeau.handlers.text.classifier:TextClassifier",
    "onnx": "flambeau.handlers.onnx.handler:OnnxHandler",
    "sentence_embedder": "flambeau.handlers.embedding.handler:SentenceEmbedder",
}
# Names TorchServe knows and this server has no handler for: they can be packed, and the worker says what to do instead.
FOREIGN = {
    "dali_image_classifier": "it needs NVIDIA DALI; image_classifier does the same on any machine",
    "trt_llm_handler": "it needs TensorRT-LLM; pack a handler of your own that imports it",
    "vllm_handler": "it needs vLLM; pack a handler of your own that imports it",
}
