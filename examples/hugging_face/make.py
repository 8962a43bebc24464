"""Trains a tiny BERT on eight texts and saves it as Hugging Face does. A stand-in: use a real model in its place."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

GOOD = ["a fine day", "a lovely day", "what a good film", "lovely and good"]
BAD = ["a bad day", "an awful day", "what a bad film", "awful and bad"]
words = sorted({word for text in GOOD + BAD for word in text.split()})
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
plain.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
)

torch.manual_seed(0)
torch.set_num_threads(1)  # tiny tensors
config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    id2label={0: "bad", 1: "good"},
    label2id={"bad": 0, "good": 1},
)
model = BertForSequenceClassification(config)
inputs = tokenizer(BAD + GOOD, padding=True, return_tensors="pt")
labels = torch.tensor([0] * len(BAD) + [1] * len(GOOD))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    model(**inputs, labels=labels).loss.backward()
    optimizer.step()
model.save_pretrained("model")
tokenizer.save_pretrained("model")
