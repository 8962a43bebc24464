"""Mistakes of any Python code, in one sentence: what was found, where, and the remedy."""

from __future__ import annotations

import pytest

from flambeau.file_import import import_file
from flambeau.worker.code_mistakes import locate
from flambeau.worker.handler_mistakes import explain_exception


@pytest.fixture
def raised(tmp_path):
    """The exception that the author's code raises, when it is called with a batch of one request."""

    def call(source: str) -> BaseException:
        (tmp_path / "mine_to_call.py").write_text(f"def handle(data, context=None):\n    {source}\n")
        with pytest.raises(Exception) as caught:  # noqa: PT011
            import_file(tmp_path / "mine_to_call.py").handle([{"body": {"txt": "a", "n": [1, 2]}}])
        return caught.value

    return call


CASES = {
    "np.zeros(2)": "name 'np' is not defined (mine_to_call.py:2): it is not imported. Write `import numpy as np` at",
    "json.loads('')": "it is not imported. Write `import json` at the top of the file",
    "return [dta for row in data]": "name 'dta' is not defined (mine_to_call.py:2): did you mean data?",
    "return [zzzz_q]": "define it before this line, or import it",
    "import os; os.environ['NOBODY_SETS_IT']": "export NOBODY_SETS_IT=…; or give a default: os.environ.get(",
    "data[1]": "data has one dict for each request of the batch, 1 now, and batches differ in size. Take them one by",
    "data[0]['body']['n'][7]": "data[0]['body']['n'] is list of 2 int. Check its length",
    "data[0]['text']": "The fields of a JSON body are in it: data[0]['body'] has the keys 'txt', 'n'",
    "data[0]['txt']": "The fields of a JSON body are in it. Write data[0]['body']['txt']",
    "data[0]['data']": "A plain body is under 'body', each field of a form under its name",
    "b'\\xff'.decode()": "(mine_to_call.py:2): these bytes are not text. Use them as they are",
    "next(iter(()))": "StopIteration (mine_to_call.py:2): next(…) found nothing. Give it a default",
    "getattr(bytearray(b'x'), 'read')": "a body is bytes, and no file. Make it one: io.BytesIO(body)",
    "bytearray(1 << 62)": "MemoryError (mine_to_call.py:2): memory is short. Lower batchSize",
    "raise AttributeError(\"Can't get attribute 'Net' on <module '__main__'>\")": "Move the class into a module beside",
    "handle(data)": "a function calls itself without an end",
}


@pytest.mark.parametrize("source", CASES)
def test_mistake_is_explained(raised, source):
    assert CASES[source] in explain_exception(raised(source))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise ValueError('bad x')", "ValueError: bad x (mine_to_call.py:2), in `raise ValueError('bad x')`. If the"),
        ("assert len(data) > 3", "AssertionError (mine_to_call.py:2), in `assert len(data) > 3`. If the request is"),
        ("return 1 / 0", "ZeroDivisionError: division by zero (mine_to_call.py:2), in `return 1 / 0`. If the request"),
    ],
)
def test_any_other_exception_is_located(raised, source, sentence):
    error = raised(source)
    assert explain_exception(error) == ""
    assert locate(error).startswith(sentence)


TORCH = {
    "torch.nn.Linear(2, 2).load_state_dict({'w': torch.zeros(1)})": 'Unexpected key(s) in state_dict: "w" (mine_',
    "torch.nn.Linear(2, 2).load_state_dict({'module.weight': torch.zeros(2, 2)})": "saved from DataParallel",
    "torch.nn.Linear(2, 2)(input_ids=1)": "'input_ids' (mine_to_call.py:2): it takes (input). Call",
    "torch.tensor(data[0]['body'])": "a tensor is made of numbers, or of lists of them",
    "torch.tensor(data[0]['body']['txt'])": "a tensor is made of numbers, or of lists of them",
    "torch.tensor([[1, 2], [3]])": "the lists have different lengths",
    "torch.stack([torch.zeros(1), torch.zeros(2)])": "the requests of a batch differ in size",
    "torch.ones(1, requires_grad=True).numpy()": "or compute it under `with torch.inference_mode():`",
}


@pytest.mark.parametrize("source", TORCH)
def test_mistake_with_torch_is_explained(raised, source):
    pytest.importorskip("torch")
    assert TORCH[source] in explain_exception(raised(f"import torch; {source}"))
