"""Networks with recurrent layers on a GPU, eagerly and by CUDA graphs, say what they say on a CPU, in float32."""

from __future__ import annotations

import copy

import pytest
import torch

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cuda.backend import CudaBackend
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.sampling_params import SamplingParams
from support.tiny_models import tiny_engine, tiny_hybrid

supported_networks = pytest.importorskip(
    "flambeau.llm.backends.cuda.supported_networks", reason="there is no Triton here", exc_type=ImportError
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[5], [1, 2, 3], [*range(80)], [9, 8, 7, 6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.mark.parametrize("path", ["GPU kernels", "Inductor"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "short_conv", "delta_net", "joint"])
def test_tokens_are_those_of_a_cpu(kind, path, monkeypatch):
    if path == "Inductor":
        monkeypatch.setattr(supported_networks, "can_compute", lambda *_: False)
    monkeypatch.setitem(inductor.CUDA_OPTIONS, "force_shape_pad", True)  # also where it is not faster
    model, config = tiny_hybrid(kind), EngineConfig(block_size=4, max_num_seqs=4, max_step_tokens=32)
    expected = [completion.token_ids for completion in tiny_engine(model, max_step_tokens=32).generate(PROMPTS, GREEDY)]
    on_gpu = copy.deepcopy(model).to("cuda")
    cache = KVCache(model.arch, 200, 4, device="cuda", num_slots=4)
    engine = Engine(
        model.arch,
        CudaBackend(on_gpu, cache, max_num_seqs=4, max_blocks=64),
        num_blocks=200,
        state_cache=cache.states,
        config=config,
        device="cuda",
    )
    for _ in range(2):  # first eagerly, while graphs are compiled, then by them
        assert [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)] == expected
        assert engine.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected[0]
        engine.wait_until_compiled()
    assert engine.info.decode == f"CUDA graphs of {path}"
    engine.close()
