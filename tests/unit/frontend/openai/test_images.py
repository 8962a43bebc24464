"""Images that are fetched: only from allowed public addresses, within limits, and with an error that tells nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flambeau.config.server import ServerConfig
from flambeau.errors import InvalidField
from flambeau.frontend.openai.images import check_reads_images, fetch_images
from flambeau.serving.model_sources.downloader import IMAGE_LIMITS, Downloader
from flambeau.serving.model_sources.urls import compile_patterns
from flambeau.serving.server import Server
from flambeau.torchserve.config_properties import TORCHSERVE, to_properties
from flambeau.wire.generation import ImageInput
from support.file_server import redirect, serving_files

DATA = ImageInput("first", "data:image/png;base64,AAAA")


@pytest.fixture
def files():
    with serving_files() as server:
        yield server


def fetched(
    url: str, *, allowed: str = "http://.*", allow_private: bool = True, max_bytes: int = 1000
) -> list[ImageInput]:
    async def fetch() -> list[ImageInput]:
        limits = replace(IMAGE_LIMITS, max_bytes=1000)
        downloader = Downloader(compile_patterns([allowed]), allow_private=allow_private, limits=limits)
        return await fetch_images([DATA, ImageInput("second", url)], downloader)

    return asyncio.run(fetch())


def refusal(url: str, **options) -> str:
    with pytest.raises(InvalidField) as caught:
        fetched(url, **options)
    assert caught.value.field == "second"
    return str(caught.value)


def test_remote_images_are_fetched_and_others_left_as_they_are(files):
    files.files["/a.png"] = b"the file"
    assert fetched(f"{files.url}/a.png") == [DATA, ImageInput("second", f"{files.url}/a.png", b"the file")]


def test_an_address_that_is_not_allowed_is_not_asked(files):
    assert "allowed_urls" in refusal(f"{files.url}/a.png", allowed="https://images.example/.*")
    assert "could not be fetched" in refusal(f"{files.url}/a.png", allow_private=False)
    assert files.asked == []


@pytest.mark.parametrize("path", ["/missing.png", "/large.png", "/away.png"])
def test_the_cause_is_not_shown(files, path):
    files.files |= {"/large.png": b"x" * 1001, "/away.png": redirect("http://[::1]:1/secret")}
    message = refusal(f"{files.url}{path}", allowed="http://127.*")
    assert message.startswith("second could not be fetched: it must be the public address of a file")
    assert not any(word in message for word in ("404", "127.0.0.1", "refused", "secret"))


def test_private_addresses_are_never_fetched_even_where_models_may_come_from_them():
    server = Server(ServerConfig(allowed_urls=("http://.*",), allow_private_urls=True))
    assert server.store.downloader.allow_private
    assert not server.image_downloader.allow_private
    assert server.image_downloader.allowed == server.store.downloader.allowed


def test_urls_that_are_allowed_by_default_are_for_models_alone():
    config = to_properties({}, TORCHSERVE, {}).server
    server = Server(config)
    assert server.store.downloader.allows("https://models.example/a.mar")
    assert not server.image_downloader.allows("https://models.example/a.png")
    explicit = Server(to_properties({"allowed_urls": "https://images.example/.*"}, TORCHSERVE, {}).server)
    assert explicit.image_downloader.allows("https://images.example/a.png")


class FakeModel:
    name = "m"

    def __init__(self, *, has_loaded: bool, abilities: frozenset[str]) -> None:
        self.pool = self
        self.has_loaded, self.abilities = has_loaded, abilities


def test_a_model_of_text_rejects_images_once_it_has_loaded():
    check_reads_images(FakeModel(has_loaded=False, abilities=frozenset()), [DATA])
    check_reads_images(FakeModel(has_loaded=True, abilities=frozenset({"vision"})), [DATA])
    check_reads_images(FakeModel(has_loaded=True, abilities=frozenset()), [])
    with pytest.raises(InvalidField, match="first is an image, and the model 'm' reads text only"):
        check_reads_images(FakeModel(has_loaded=True, abilities=frozenset({"chat"})), [DATA])
