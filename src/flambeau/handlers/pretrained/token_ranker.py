"""TokenRanking: a language model ranks texts by how probable one token is behind its prompt (Qwen3-Reranker)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flambeau.archive.pretrained import module_kinds, read_document
from flambeau.errors import HandlerError
from flambeau.handlers.embedding.small_documents import read_json
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.pair_prompts import FormPrompt, PlainPrompt, read_form, token_id
from flambeau.handlers.pretrained.task import to_array
from flambeau.handlers.pretrained.text_tasks import TextRanking


class TokenRanking(TextRanking):
    """The score is the logit of one token, less that of another one if there are two."""

    auto_class = "AutoModelForCausalLM"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.pads = True  # padding stands on the left and is masked
        if "LogitScore" in module_kinds(runtime.folder):
            self._read_modules(runtime)
            return
        form = read_form(runtime.folder, read_document(runtime.folder / "config.json"), runtime.ranking)
        self.prompt = FormPrompt(self.tokenizer, form, runtime.ranking.get("instruction"))
        self.true_id = token_id(self.tokenizer, form.true_token)
        self.false_id = None if form.false_token is None else token_id(self.tokenizer, form.false_token)

    def _read_modules(self, runtime: Runtime) -> None:
        """The files of sentence-transformers 6: LogitScore has the tokens, the chat template the prompt."""
        if given := sorted(runtime.ranking):
            raise HandlerError(f"the folder's modules.json describes how it ranks; remove {', '.join(given)}")
        steps = read_json(runtime.folder / "modules.json", kind=list)
        path = next(str(one.get("path", "")) for one in steps if str(one.get("type", "")).endswith("LogitScore"))
        score = read_json(runtime.folder / path / "config.json")
        if len(steps) != 2 or type(score.get("true_token_id")) is not int:
            raise HandlerError("modules.json must hold Transformer and LogitScore, and the latter a true_token_id")
        self.true_id, self.false_id = score["true_token_id"], score.get("false_token_id")
        self.prompt = self.prompt or PlainPrompt(self.tokenizer, self.prefix)

    def count_labels(self) -> int:
        return 1

    def forward(self, encodings: Sequence[Mapping[str, Any]]) -> list[Array]:
        """The score of each encoding, B1, by the last token's logits."""
        rows = [list(encoding["input_ids"]) for encoding in encodings]
        width = max(map(len, rows))
        fill = self.tokenizer.pad_token_id or 0
        ids_BT = torch.tensor([[fill] * (width - len(row)) + row for row in rows], device=self.runtime.device)
        is_token_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=ids_BT.device)
        places_BT = (is_token_BT.cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            result = self.model(
                input_ids=ids_BT, attention_mask=is_token_BT, position_ids=places_BT, logits_to_keep=1, use_cache=False
            )
            logits_BV = result.logits[:, -1].float()
            scores_B = logits_BV[:, self.true_id]
            if self.false_id is not None:
                scores_B = scores_B - logits_BV[:, self.false_id]
            return [to_array(scores_B[:, None])]
