"""CpuHead: the layers of a head that proposes tokens in one call of the C++ kernels; the plain version is `DraftHead`.

Shapes: T entries of the pass · E hidden
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cpu.bindings import CMatrix, CNetwork, kernels
from flambeau.llm.backends.cpu.network import can_attend, has_known_layers, to_ctokens
from flambeau.llm.backends.cpu.network_pointers import NetworkPointers
from flambeau.llm.backends.cpu.packed_linear import pack_layers
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.draft_heads import DraftHead, Eagle3Layer, HeadBody
from flambeau.llm.models.norms import CenteredNorm, RMSNorm

log = logging.getLogger(__name__)


class CpuHead:
    """A head and its cache as the kernels read them, as soon as these are loaded."""

    def __init__(self, head: DraftHead, cache: KVCache) -> None:
        self._head, self._cache = head, cache
        self._pointers = NetworkPointers(cache, packs_float32=True)
        self._network: CNetwork | None = None

    def run(self, inputs: StepInputs, hidden_TE: Tensor) -> Tensor | None:
        """What the head goes on from [T, E]; None: the kernels are not loaded yet."""
        library = kernels.library
        if library is None:
            return None
        if self._network is None:
            self._network = self._build()
        x_TE, given = self._head.begin(self._head.embed(inputs.ids_T), hidden_TE)
        x_TE, given = x_TE.contiguous(), None if given is None else given.contiguous()
        out_TE = torch.empty_like(x_TE)
        tokens = to_ctokens(inputs)
        tokens.hidden, tokens.states = x_TE.data_ptr(), out_TE.data_ptr()
        tokens.attention_input = None if given is None else given.data_ptr()
        library.flambeau_step(self._network, tokens, None, 0, None, torch.get_num_threads())
        return self._head.finish(out_TE)

    def _build(self) -> CNetwork:
        head = self._head
        pack_layers(head, (nn.Linear,))  # most weights need 16 bits
        log.info("the head (%s) runs on CPU kernels", head.settings.kind)
        return self._pointers.network(
            head.arch,
            head.model.layers,
            head.rotation,
            body=None,
            head=CMatrix(),
            recorded=(head.arch.num_layers,),
        )


def can_compute_head(head: DraftHead, cache: KVCache) -> bool:
    """Whether the kernels support the layers of a head, whose numbers are float32."""
    norms = [module for module in head.model.layers.modules() if isinstance(module, RMSNorm | CenteredNorm)]
    if any(weight.dtype != torch.float32 for norm in norms for weight in norm.parameters()):
        return False
    if head.arch.is_parallel or head.settings.num_depths > 1 or not can_attend(head.arch, head.rotation, cache):
        return False
    return has_known_layers(head, (DraftHead, HeadBody, Eagle3Layer, nn.Identity))
