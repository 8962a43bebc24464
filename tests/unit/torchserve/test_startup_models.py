from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.errors import ModelNotFound
from flambeau.torchserve.startup_models import everything_in, locate, named_models


@pytest.fixture
def store(tmp_path):
    for name in ("a.mar", "b.model", "c.tar.gz", ".hidden.mar", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / ".cache").mkdir()
    return tmp_path


def names(wanted, store):
    return [(model.name, model.url) for model in named_models(wanted, store)]


def test_lists_names_and_urls(store):
    assert names("", store) == []
    assert names("a.mar, m=a.mar,,", store) == [(None, "a.mar"), ("m", "a.mar")]
    url = "https://host/x.mar?key=value"
    assert names(f"{url},m={url}", store) == [(None, url), ("m", url)]


def test_all_is_everything_but_what_is_hidden_or_no_model(store):
    assert everything_in(store) == ["a.mar", "b.model", "c.tar.gz", "folder"]
    assert [url for _, url in names("All", store)] == everything_in(store)


def test_store_comes_first(store, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("folder", "other"):
        (elsewhere / name).mkdir()
    monkeypatch.chdir(elsewhere)
    assert locate("a.mar", store) == store / "a.mar"
    assert locate("/any/where/a.mar", store) == store / "a.mar"
    assert locate(str(elsewhere / "other"), store) == elsewhere / "other"
    assert locate("folder", store).resolve() == elsewhere / "folder"
    monkeypatch.chdir(store.parent)
    assert locate("folder", store) == store / "folder"
    assert locate("https://host/a.mar", store) is None
    (store / "unpacked" / "MAR-INF").mkdir(parents=True)
    (store / "unpacked" / "MAR-INF" / "MANIFEST.json").touch()
    assert locate("unpacked.mar", store) == store / "unpacked"
    monkeypatch.chdir(store)
    assert locate("unpacked.mar", elsewhere) == Path("unpacked")
    with pytest.raises(ModelNotFound, match=r"Model not found at: none\.mar"):
        locate("none.mar", store)
