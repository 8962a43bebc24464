"""Networks with recurrent layers on two ranks, with tokens that are proposed and dropped: texts are those without."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.llm.loader import load_engine
from flambeau.llm.sampling_params import SamplingParams
from support.checkpoints import write_checkpoint
from support.sharded import OPTIONS, generate_on_ranks
from support.tokenizer_files import write_sentencepiece

PROMPTS = [[*range(40, 56)] * 2, [9] * 20, [77]]


def checkpoint(folder: Path, kind: str) -> Path:
    write_checkpoint(folder, kind, vocab_size=400)
    write_sentencepiece(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "proposals"),
    [("qwen-3-next", "lookup"), ("granite-4-hybrid", "draft"), ("lfm-2", "draft"), ("jamba", "lookup")],
)
def test_proposals_do_not_change_the_text_of_two_ranks(kind, proposals, tmp_path):
    folder = checkpoint(tmp_path / "checkpoint", kind)
    options = {"speculation": "lookup"} if proposals == "lookup" else {"draft": str(folder)}
    found = generate_on_ranks(folder, PROMPTS, speculate_k=3, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    alone = load_engine(folder, **OPTIONS, max_num_seqs=4).generate(PROMPTS, params)
    assert found.tokens == [completion.token_ids for completion in alone]
    assert found.num_drafted > 0
