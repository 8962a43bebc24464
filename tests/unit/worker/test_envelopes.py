from __future__ import annotations

import sys

import pytest

from flambeau.errors import HandlerError
from flambeau.handlers.envelopes.base import JSONEnvelope
from flambeau.worker.envelopes import find_envelope


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_built_in_envelopes_go_by_their_names(tmp_path):
    assert find_envelope("json", tmp_path) is JSONEnvelope


def test_first_class_of_the_models_own_file_is_used(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ts.torch_handler.request_envelope.base import BaseEnvelope\n"
        "class Helper: pass\nclass First(BaseEnvelope): pass\nclass Second(BaseEnvelope): pass\n"
    )
    assert find_envelope("mine", tmp_path).__name__ == "First"


def test_installed_module_is_found(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "installed_envelope.py").write_text("class E:\n    def handle(self, d, c): pass\n")
    sys.path.insert(0, str(tmp_path / "elsewhere"))
    assert find_envelope("installed_envelope", tmp_path).__name__ == "E"


def test_error_inside_an_envelope_is_not_hidden(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "broken_envelope.py").write_text("import not_there_at_all\n")
    sys.path.insert(0, str(tmp_path / "elsewhere"))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        find_envelope("broken_envelope", tmp_path)


def test_unknown_envelope_names_the_known_ones(tmp_path):
    with pytest.raises(HandlerError, match="Built in: body, json, kserve, kservev2"):
        find_envelope("nosuch", tmp_path)
    (tmp_path / "bare.py").write_text("")
    with pytest.raises(HandlerError, match="no class"):
        find_envelope("bare", tmp_path)
