"""Tiny random networks in Hugging Face's format, one per task, with small tokenizers."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import torch

TEXTS = [
    "The cat sat on the mat and looked at the sea.",
    "Ada Lovelace lives in London, near the river.",
    "What is the capital of France? Paris is the capital of France.",
    "A rocket flies to the moon while the engineers watch it.",
    "This example is space. This example is cooking. This example is politics.",
    "translate English to French: summarize: the house is wonderful",
]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece_vocabulary() -> dict[str, int]:
    """Letters, short words of the texts, and longer ones in two pieces; a trainer finds others each time it runs."""
    words = sorted({word for text in TEXTS for word in re.findall(r"\w+", text.lower())})
    pieces = [piece for word in words for piece in (word[:5], f"##{word[5:]}")[: 1 + (len(word) > 5)]]
    letters = [*string.ascii_lowercase, *string.digits]
    names = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *".,:?", *pieces]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def wordpiece(folder: Path) -> Any:
    """A WordPiece tokenizer, as BERT has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(wordpiece_vocabulary(), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
    return fast


def bytelevel(folder: Path) -> Any:
    """A byte-pair tokenizer that ends texts with </s>, as T5 and BART do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "</s>", "<s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
    )
    fast.save_pretrained(folder)
    return fast


def bert_config(tokenizer: Any, **options: Any) -> Any:
    from transformers import BertConfig

    # A large range: the logits of a random network would be nearly equal otherwise.
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.3}
    return BertConfig(**SMALL, **size, pad_token_id=0, **options)


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def save_bert(folder: Path, kind: str, **options: Any) -> Path:
    """A BERT with the head `BertFor{kind}`."""
    import transformers

    torch.manual_seed(0)
    config = bert_config(wordpiece(folder), **options)
    getattr(transformers, f"BertFor{kind}")(config).eval().save_pretrained(folder)
    return folder


def save_classifier(folder: Path) -> Path:
    return save_bert(folder, "SequenceClassification", **labels("BAD", "GOOD", "SO SO"))


def save_zero_shot(folder: Path) -> Path:
    return save_bert(folder, "SequenceClassification", **labels("contradiction", "neutral", "entailment"))


def save_ranker(folder: Path) -> Path:
    save_bert(folder, "SequenceClassification", num_labels=1)
    return change_config(folder, sentence_transformers={"version": "4.1"})


def save_tagger(folder: Path) -> Path:
    return save_bert(folder, "TokenClassification", **labels("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))


def save_reader(folder: Path) -> Path:
    return save_bert(folder, "QuestionAnswering")


def save_filler(folder: Path) -> Path:
    return save_bert(folder, "MaskedLM")


def save_roberta(folder: Path) -> Path:
    """An encoder without a head that is not BERT."""
    from transformers import RobertaConfig, RobertaModel

    torch.manual_seed(0)
    tokenizer = wordpiece(folder)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.3}
    RobertaModel(RobertaConfig(**SMALL, **size, pad_token_id=1)).eval().save_pretrained(folder)
    return folder


def save_t5(folder: Path) -> Path:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = bytelevel(folder)
    size = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 2.0}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **size)
    T5ForConditionalGeneration(config).eval().save_pretrained(folder)
    summary = {"prefix": "summarize: ", "max_length": 12, "num_beams": 2}
    french = {"prefix": "translate English to French: ", "max_length": 12}
    return change_config(folder, task_specific_params={"summarization": summary, "translation_en_to_fr": french})


def save_language_model(folder: Path, kind: str) -> Path:
    """A small decoder (qwen2, qwen3, gemma) with tokens of a chat."""
    import transformers

    torch.manual_seed(0)
    tokenizer = bytelevel(folder)
    tokenizer.backend_tokenizer.post_processor = None  # no token behind a text
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["yes", "no", "Yes"])
    tokenizer.model_max_length = 1024
    tokenizer.save_pretrained(folder)
    name = kind.capitalize()
    size = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "max_position_embeddings": 1024}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), pad_token_id=None, **size)
    getattr(transformers, f"{name}ForCausalLM")(config).eval().save_pretrained(folder)
    return folder


def save_vit(folder: Path) -> Path:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, initializer_range=0.3, **SMALL, **labels("cat", "dog", "sea", "mat")
    )
    ViTForImageClassification(config).eval().save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_yolos(folder: Path) -> Path:
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    torch.manual_seed(0)
    size = {"image_size": [32, 48], "patch_size": 8, "num_detection_tokens": 6, "initializer_range": 0.5}
    config = YolosConfig(**size, **SMALL, **labels("cat", "dog", "sea"))
    YolosForObjectDetection(config).eval().save_pretrained(folder)
    YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder)
    return folder


def wav2vec2_config(**options: Any) -> Any:
    from transformers import Wav2Vec2Config

    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "initializer_range": 0.3}
    return Wav2Vec2Config(**SMALL, **convolutions, **positions, **options)


def save_ctc(folder: Path) -> Path:
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    torch.manual_seed(0)
    words = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_uppercase])}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(words))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    Wav2Vec2ForCTC(wav2vec2_config(vocab_size=len(words))).eval().save_pretrained(folder)
    return folder


def save_audio_classifier(folder: Path) -> Path:
    from transformers import Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

    torch.manual_seed(0)
    config = wav2vec2_config(classifier_proj_size=16, **labels("yes", "no", "noise"))
    Wav2Vec2ForSequenceClassification(config).eval().save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def save_whisper(folder: Path) -> Path:
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.manual_seed(0)
    tokenizer = bytelevel(folder)
    size = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    size |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 80}
    tokens = {"decoder_start_token_id": 2, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = WhisperConfig(
        vocab_size=len(tokenizer), max_source_positions=1500, max_target_positions=32, init_std=0.3, **size, **tokens
    )
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    model.generation_config.max_new_tokens = 8
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


def save_vits(folder: Path, **options: Any) -> Path:
    """A VITS of letters; without noise, so that it speaks a text always the same."""
    from transformers import VitsConfig, VitsModel, VitsTokenizer

    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    vocabulary = {letter: i for i, letter in enumerate(["_", "<unk>", " ", *"abcdefghijklmnopqrstuvwxyz"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    VitsTokenizer(folder / "vocab.json", phonemize=False, pad_token="_").save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 16, "flow_size": 16, "upsample_initial_channel": 32}
    size |= {"spectrogram_bins": 9, "duration_predictor_filter_channels": 16, "posterior_encoder_num_wavenet_layers": 1}
    size |= {"upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8]}
    size |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]]}
    quiet = {"noise_scale": 0.0, "noise_scale_duration": 0.0}
    config = VitsConfig(vocab_size=len(vocabulary), sampling_rate=16_000, **size, **quiet, **options)
    VitsModel(config).eval().save_pretrained(folder)
    return folder


def save_many_voices(folder: Path) -> Path:
    return save_vits(folder, num_speakers=3, speaker_embedding_size=8)


def save_multilingual_whisper(folder: Path) -> Path:
    """Whisper with its own tokenizer: languages, tasks, timestamps of segments and of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizer,
    )

    torch.manual_seed(0)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    bpe = json.loads(trained.to_str())["model"]
    names = ["startoftranscript", "en", "de", "fr", "translate", "transcribe", "startoflm", "startofprev", "nospeech"]
    special = [f"<|{name}|>" for name in (*names, "notimestamps")]
    tokenizer = WhisperTokenizer(vocab=bpe["vocab"], merges=[tuple(pair) for pair in bpe["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(1501)])
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*special, "<|endoftext|>")}
    size = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    size |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 80}
    end = ids["<|endoftext|>"]
    tokens = {"decoder_start_token_id": ids["<|startoftranscript|>"], "eos_token_id": end, "pad_token_id": end}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        max_source_positions=1500,
        max_target_positions=64,
        init_std=0.3,
        bos_token_id=end,
        **size,
        **tokens,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():  # most of its tokens are timestamps: less likely ones, so that there is text between them
        model.model.decoder.embed_tokens.weight[len(tokenizer) - 1501 :] *= 0.3
    settings = model.generation_config
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    settings._from_model_config = False  # else it is made anew when the model is loaded
    settings.is_multilingual = True
    settings.lang_to_id = {name: ids[name] for name in ("<|en|>", "<|de|>", "<|fr|>")}
    settings.task_to_id = {name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")}
    settings.no_timestamps_token_id = ids["<|notimestamps|>"]
    settings.prev_sot_token_id = ids["<|startofprev|>"]
    settings.alignment_heads = [[0, 0], [1, 1]]
    settings.max_initial_timestamp_index = 50
    settings.return_timestamps = False
    settings.max_length = 60
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


MODELS = {
    "text-classification": save_classifier,
    "zero-shot-classification": save_zero_shot,
    "text-ranking": save_ranker,
    "token-classification": save_tagger,
    "question-answering": save_reader,
    "fill-mask": save_filler,
    "text2text-generation": save_t5,
    "image-classification": save_vit,
    "object-detection": save_yolos,
    "automatic-speech-recognition": save_ctc,
    "audio-classification": save_audio_classifier,
    "text-to-speech": save_vits,
}


def tone(seconds: float, frequency: float = 440.0, rate: int = 16_000) -> Any:
    """Samples of a sound that is not silent anywhere."""
    import numpy as np

    times = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * frequency * times) + 0.1 * np.sin(2 * np.pi * 31 * times)).astype(np.float32)
