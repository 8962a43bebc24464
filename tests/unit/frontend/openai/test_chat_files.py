"""Files in chats: remote ones are fetched from allowed public addresses, within limits, and errors tell nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flambeau.config.server import ServerConfig
from flambeau.errors import InvalidField
from flambeau.frontend.openai import chat_files
from flambeau.frontend.openai.chat_files import check_reads, fetch_files, take_files
from flambeau.frontend.openai.file_parts import check_file
from flambeau.serving.model_sources.downloader import FILE_LIMITS, Downloader
from flambeau.serving.model_sources.urls import compile_patterns
from flambeau.serving.server import Server
from flambeau.torchserve.config_properties import TORCHSERVE, to_properties
from flambeau.wire.generation import MediaInput, MediaKind
from support.file_server import redirect, serving_files

DATA = MediaInput("first", "data:image/png;base64,AAAA")


@pytest.fixture
def files():
    with serving_files() as server:
        yield server


def fetched(
    url: str, *, allowed: str = "http://.*", allow_private: bool = True, kind: MediaKind = "image"
) -> list[MediaInput]:
    async def fetch() -> list[MediaInput]:
        limits = {**FILE_LIMITS, "image": replace(FILE_LIMITS["image"], max_bytes=1000)}
        patterns = compile_patterns([allowed])
        downloaders = {
            name: Downloader(patterns, allow_private=allow_private, limits=limit) for name, limit in limits.items()
        }
        return await fetch_files([DATA, MediaInput("second", url, kind=kind)], downloaders)

    return asyncio.run(fetch())


def refusal(url: str, **options) -> str:
    with pytest.raises(InvalidField) as caught:
        fetched(url, **options)
    assert caught.value.field == "second"
    return str(caught.value)


def test_remote_images_are_fetched_and_others_left_as_they_are(files):
    files.files["/a.png"] = b"the file"
    assert fetched(f"{files.url}/a.png") == [DATA, MediaInput("second", f"{files.url}/a.png", b"the file")]


def test_remote_sounds_stay_sounds(files):
    files.files["/a.wav"] = b"the file"
    found = fetched(f"{files.url}/a.wav", kind="sound")
    assert found[1] == MediaInput("second", f"{files.url}/a.wav", b"the file", "sound")


def test_remote_files_have_a_limit_together(files, monkeypatch):
    """A request of a few bytes may name many."""
    monkeypatch.setattr(chat_files, "MAX_FETCHED_BYTES", 8)
    files.files["/a.png"] = b"the file"
    assert len(fetched(f"{files.url}/a.png")) == 2
    monkeypatch.setattr(chat_files, "MAX_FETCHED_BYTES", 7)
    assert "the files that the server fetches for this request have more than" in refusal(f"{files.url}/a.png")


def test_a_video_may_be_larger_than_an_image(files):
    files.files["/a.mp4"] = b"x" * 1001
    assert fetched(f"{files.url}/a.mp4", kind="video")[1] == MediaInput(
        "second", f"{files.url}/a.mp4", b"x" * 1001, kind="video"
    )
    message = refusal(f"{files.url}/missing.mp4", kind="video")
    assert "at most 100 MB that arrives within 60 s" in message
    assert "does not fetch videos" in refusal(f"{files.url}/a.mp4", allowed="https://a.example/", kind="video")


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
    assert not server.file_downloaders["sound"].allow_private
    assert server.file_downloaders["sound"].allowed == server.store.downloader.allowed


def test_urls_that_are_allowed_by_default_are_for_models_alone():
    config = to_properties({}, TORCHSERVE, {}).server
    server = Server(config)
    assert server.store.downloader.allows("https://models.example/a.mar")
    assert not server.file_downloaders["sound"].allows("https://models.example/a.png")
    explicit = Server(to_properties({"allowed_urls": "https://images.example/.*"}, TORCHSERVE, {}).server)
    assert explicit.file_downloaders["sound"].allows("https://images.example/a.png")


class FakeModel:
    name = "m"

    def __init__(self, *, has_loaded: bool, abilities: frozenset[str]) -> None:
        self.pool = self
        self.has_loaded, self.abilities = has_loaded, abilities


def test_a_model_of_text_rejects_images_once_it_has_loaded():
    check_reads(FakeModel(has_loaded=False, abilities=frozenset()), [DATA])
    check_reads(FakeModel(has_loaded=True, abilities=frozenset({"vision"})), [DATA])
    check_reads(FakeModel(has_loaded=True, abilities=frozenset()), [])
    with pytest.raises(InvalidField, match="first is an image, and the model 'm' reads no images"):
        check_reads(FakeModel(has_loaded=True, abilities=frozenset({"chat"})), [DATA])
    video = MediaInput("second", "data:video/mp4;base64,AAAA", kind="video")
    check_reads(FakeModel(has_loaded=True, abilities=frozenset({"vision", "video"})), [DATA, video])
    with pytest.raises(InvalidField, match="second is a video, and the model 'm' reads no videos"):
        check_reads(FakeModel(has_loaded=True, abilities=frozenset({"vision"})), [DATA, video])


def test_videos_are_taken_out_of_messages():
    parts = [
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    [message], files = take_files([{"role": "user", "content": parts}])
    assert message["content"] == [{"type": "video"}, parts[1], {"type": "image"}]
    assert [(file.name, file.kind) for file in files] == [
        ("messages[0].content[0]", "video"),
        ("messages[0].content[2]", "image"),
    ]
    with pytest.raises(InvalidField, match="the request has 9 videos; send at most 8"):
        take_files([{"role": "user", "content": parts * 9}])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"video_url": {"url": "file:///a.mp4"}}, r"must be a data URL \(data:video/mp4;base64,"),
        ({"video_url": {"url": "data:video/mp4,AAAA"}}, "must have its data in base64: data:video/mp4"),
        ({"video_url": {"url": "https://a.example/b.mp4", "fps": 1}}, "has an unknown field 'fps'"),
        ({"video_url": {"url": "https://a.example/b.mp4", "detail": "low"}}, "has an unknown field 'detail'"),
        ({"video_url": 1}, "video_url must be an object with a url"),
        ({"video_url": {"url": "https://a.example/" + "b" * 8192}}, "address of 8210 characters; it may have 8192"),
    ],
)
def test_a_wrong_field_of_a_video_is_named(part, reason):
    with pytest.raises(InvalidField, match=reason) as caught:
        check_file({"type": "video_url", **part}, "messages[0].content[0]")
    assert caught.value.field.startswith("messages[0].content[0]")
