"""The interfaces that handlers written for GPT Fast expect: `model(x, input_pos)`, and SentencePiece's method names.

Shapes: B sequences · T tokens of the call · C cached places · H heads · G key-value heads · D head size · V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.errors import HandlerError
from flambeau.llm.backends.eager import attend_to, attention_mask
from flambeau.llm.models.attention import AttentionOptions
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.text.tokenizer import Tokenizer

NO_ID = -1  # SentencePiece's id of a token that the vocabulary does not have
FIRST_PLACES = 256  # of the cache; it doubles when a position does not fit


class CachedModel(nn.Module):
    """The engine's network as `model(x, input_pos)` → logits, with a KV cache of its own.

    It shares the weights and their names with the network. Positions say where tokens are: a prompt at 0, 1, 2, …
    begins a new text, and a token at a position replaces what was there. The engine's own requests are not affected.
    """

    def __init__(self, network: Transformer, *, is_whole: bool = True) -> None:
        super().__init__()
        self.arch = network.arch
        self.model, self.lm_head, self.rotation = network.model, network.lm_head, network.rotation
        self._networks = (network,)  # in a tuple, so that weights are not registered twice
        self._is_whole = is_whole
        self._cache: list[tuple[Tensor, Tensor]] = []  # of each layer [B, C, G, D]

    @property
    def network(self) -> Transformer:
        """The network as the engine runs it."""
        return self._networks[0]

    @torch.inference_mode(False)  # the caller may change the logits in place, in any mode
    @torch.no_grad()
    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of the tokens [B, T] at positions [T], by default 0 … T-1."""
        if not self._is_whole:
            raise HandlerError(
                "model(x, input_pos) is not possible with several ranks, because each has a part of the network; "
                "call super().generate, or remove parallelType"
            )
        if x.dim() != 2:
            raise HandlerError(f"x must be token ids [B, T], not a tensor of shape {list(x.shape)}")
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)
        if input_pos.shape != x.shape[1:]:
            raise HandlerError(
                f"input_pos must have one position for each of the {x.shape[1]} tokens, not the shape "
                f"{list(input_pos.shape)}"
            )
        if self.arch.latent_size:
            raise HandlerError(
                "model(x, input_pos) does not know the compressed cache of this network (MLA); use the engine instead: "
                "self.generate(…)"
            )
        num_places = int(input_pos.max()) + 1
        if num_places > self.arch.max_length or int(input_pos.min()) < 0:
            raise HandlerError(f"input_pos must be from 0 to {self.arch.max_length - 1}, the model's context")
        self._make_room(x.shape[0], num_places)
        attend = PositionAttention(self._cache, input_pos, num_places)
        return self.network.logits(self.network(x, input_pos.expand(x.shape), attend))

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        """Allocate the KV cache now; without this call it grows as needed."""
        self._cache = []
        self._make_room(max_batch_size, min(max_seq_length, self.arch.max_length))

    @torch.inference_mode(False)
    def _make_room(self, num_sequences: int, num_places: int) -> None:
        has_rows, has_places = self._cache[0][0].shape[:2] if self._cache else (0, 0)
        if has_rows >= num_sequences and has_places >= num_places:
            return
        if num_places > has_places:
            num_places = min(max(num_places, 2 * has_places, FIRST_PLACES), self.arch.max_length)
        shape = (max(num_sequences, has_rows), max(num_places, has_places), self.arch.num_kv_heads, self.arch.head_size)
        weight = self.model.embed_tokens.weight
        old, self._cache = self._cache, []
        for layer in range(self.arch.num_layers):
            pair = (weight.new_zeros(shape), weight.new_zeros(shape))
            if old:
                for new, kept in zip(pair, old[layer], strict=True):
                    new[:has_rows, :has_places] = kept
            self._cache.append(pair)


class UncachedModel(nn.Module):
    """In the place of a network of transformers, whose calls have another form."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Reject the call."""
        raise HandlerError(
            f"model(x, input_pos) needs the engine's own network, and this is {type(self.network).__name__} of "
            "transformers: call super().generate, or the network itself, self.model.network"
        )


def to_cached(network: nn.Module, *, is_whole: bool = True) -> CachedModel | UncachedModel:
    """A network in GPT Fast's form, if it is the engine's own."""
    return CachedModel(network, is_whole=is_whole) if isinstance(network, Transformer) else UncachedModel(network)


class PositionAttention:
    """Writes keys and values at their positions and attends to every place up to the token's own."""

    def __init__(self, cache: Sequence[tuple[Tensor, Tensor]], positions_T: Tensor, num_places: int) -> None:
        self._cache, self._positions_T, self._num_places = cache, positions_T, num_places
        self._places_C = torch.arange(num_places, device=positions_T.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [B, T, H, D] and k, v [B, T, G, D] to [B, T, H, D]."""
        num_sequences = q.shape[0]
        keys, values = self._cache[layer]
        keys[:num_sequences, self._positions_T] = k.to(keys.dtype)
        values[:num_sequences, self._positions_T] = v.to(values.dtype)
        mask_TC = attention_mask(self._positions_T, self._places_C, options.window, options.chunk)
        y_BHTD = attend_to(
            q.transpose(1, 2),
            keys[:num_sequences, : self._num_places].transpose(1, 2).to(q.dtype),
            values[:num_sequences, : self._num_places].transpose(1, 2).to(q.dtype),
            mask_TC,
            options,
        )
        return y_BHTD.transpose(1, 2)


class PieceTokenizer:
    """The engine's tokenizer under SentencePiece's names.

    `encode` begins with BOS where the model's prompts do; `encode_as_ids` is SentencePiece's own, without BOS.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    # ---- ids ----

    def bos_id(self) -> int:
        return id_or_none(self._tokenizer.bos_id)

    def eos_id(self) -> int:
        return id_or_none(self._tokenizer.eos_id)

    def pad_id(self) -> int:
        return id_or_none(self._tokenizer.pad_id)

    def unk_id(self) -> int:
        return id_or_none(self._tokenizer.unk_id)

    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def get_piece_size(self) -> int:
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def id_to_piece(self, token_id: int | Sequence[int] | Tensor) -> Any:
        """The piece of an id, as the vocabulary's file has it; a list for several ids."""
        ids = plain(token_id)
        return [self._tokenizer.piece(one) for one in ids] if isinstance(ids, list) else self._tokenizer.piece(ids)

    def piece_to_id(self, piece: str | Sequence[str]) -> Any:
        """The id of a piece; that of the unknown token if there is no such piece."""
        if not isinstance(piece, str):
            return [self.piece_to_id(one) for one in piece]
        found = self._tokenizer.piece_id(piece)
        return self.unk_id() if found is None else found

    # ---- texts ----

    def encode(
        self,
        text: str | Sequence[str],
        out_type: type[int] | type[str] = int,
        *,
        add_bos: bool | None = None,
        add_eos: bool = False,
        add_special: bool = True,
    ) -> Any:
        """The ids (or pieces) of a text, or of each of several; `add_bos` None: as the model's prompts begin."""
        if not isinstance(text, str):
            options: Any = {"add_bos": add_bos, "add_eos": add_eos, "add_special": add_special}
            return [self.encode(one, out_type, **options) for one in text]
        ids = self._tokenizer.encode(text, add_special=add_special if add_bos is None else False)
        if add_bos and self.bos_id() != NO_ID:
            ids = [self.bos_id(), *ids]
        if add_eos and self.eos_id() != NO_ID:
            ids = [*ids, self.eos_id()]
        return self.id_to_piece(ids) if out_type is str else ids

    def encode_as_ids(self, text: str | Sequence[str]) -> Any:
        return self.encode(text, add_bos=False)

    def encode_as_pieces(self, text: str | Sequence[str]) -> Any:
        return self.encode(text, str, add_bos=False)

    def decode(self, token_ids: int | Sequence[Any] | Tensor) -> Any:
        """The text of ids, as a list, a tensor [T] or one id; a list of texts for [B, T]."""
        ids = plain(token_ids)
        if not isinstance(ids, list):
            ids = [ids]
        if ids and isinstance(ids[0], list):
            return [self._tokenizer.decode(row) for row in ids]
        return self._tokenizer.decode(ids)

    def decode_ids(self, token_ids: Sequence[int] | Tensor) -> Any:
        return self.decode(token_ids)

    # ---- beyond SentencePiece ----

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a text; some models have several."""
        return self._tokenizer.eos_ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt of a conversation, by the model's chat template."""
        return self._tokenizer.encode_chat(messages, **options)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return self._tokenizer.render_chat(messages, **options)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


def id_or_none(token_id: int | None) -> int:
    return NO_ID if token_id is None else token_id


def plain(ids: Any) -> Any:
    """Tensors as numbers, also inside a list."""
    if isinstance(ids, Tensor):
        return ids.tolist()
    return [plain(one) for one in ids] if isinstance(ids, (list, tuple)) else int(ids)
