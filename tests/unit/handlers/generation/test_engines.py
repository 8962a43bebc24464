"""An engine with another draft gives the text of the first one."""

from __future__ import annotations

import pytest

from flambeau.handlers.generation.engines import with_draft
from flambeau.llm.sampling_params import SamplingParams
from support.tiny_models import tiny_draft, tiny_engine, tiny_hybrid, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [[1, 2, 3, 1, 2], [7, 8]]


@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_hybrid("short_conv")], ids=["attention", "recurrent layers"])
def test_another_draft_changes_no_token(make):
    model = make()
    expected = [completion.token_ids for completion in tiny_engine(model).generate(PROMPTS, GREEDY)]
    for draft in (None, tiny_draft(tiny_model())):
        drafted = with_draft(tiny_engine(model), draft, 3, num_sequences=2)
        assert [completion.token_ids for completion in drafted.generate(PROMPTS, GREEDY)] == expected
