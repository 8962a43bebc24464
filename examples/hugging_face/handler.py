"""Serves a text classifier in the format of Hugging Face with transformers."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class TextClassifier:
    example = {"text": "a fine day"}

    def initialize(self, context):
        folder = context.system_properties["model_dir"] + "/model"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def handle(self, data, context):
        texts = [row["body"]["text"] for row in data]
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        scores = self.model(**inputs).logits.softmax(dim=1)
        names = self.model.config.id2label
        return [{names[i]: round(score, 3) for i, score in enumerate(row)} for row in scores.tolist()]
