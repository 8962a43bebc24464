from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import pytest

from flambeau.errors import DownloadFailed, FileTaken
from flambeau.serving.model_sources.downloader import (
    MAX_TOGETHER,
    STOPPING,
    Downloader,
    DownloadLimits,
    RateMeter,
    sweep_parts,
)
from flambeau.serving.model_sources.urls import compile_patterns
from support.file_server import redirect, serving_files


@pytest.fixture
def web():
    with serving_files() as server:
        yield server


def downloader(*patterns, private=True, **limits):
    return Downloader(compile_patterns(patterns or (".*",)), allow_private=private, limits=DownloadLimits(**limits))


def fetch(tmp_path, url, made=None, **options):
    return asyncio.run((made or downloader()).download(url, tmp_path, **options))


def refused(tmp_path, url, made=None, **options):
    with pytest.raises(DownloadFailed, match=f"^Failed to download archive from: {url}$".replace("?", r"\?")) as info:
        fetch(tmp_path, url, made, **options)
    assert [*tmp_path.iterdir()] == []  # no part of it stays
    return info.value.cause


def test_file_arrives_whole_under_the_name_of_its_path(tmp_path, web):
    web.files["/a/b.mar?x=1"] = content = os.urandom(3 << 20)
    path = fetch(tmp_path, f"{web.url}/a/b.mar?x=1")
    assert path == tmp_path / "b.mar"
    assert path.read_bytes() == content
    assert [*tmp_path.iterdir()] == [path]


def test_nothing_is_overwritten_and_nothing_asked_where_the_name_is_taken(tmp_path, web):
    (tmp_path / "b.mar").write_bytes(b"mine")
    with pytest.raises(FileTaken, match=r"^Model file already exists b\.mar$"):
        fetch(tmp_path, f"{web.url}/b.mar")
    assert web.asked == []
    assert (tmp_path / "b.mar").read_bytes() == b"mine"


def test_name_that_is_taken_during_the_download_stays_with_the_other(tmp_path, web):
    def answer(handler):
        (tmp_path / "b.mar").write_bytes(b"other")
        handler.send_response(200)
        handler.send_header("Content-Length", "1")
        handler.end_headers()
        handler.wfile.write(b"x")

    web.files["/b.mar"] = answer
    with pytest.raises(FileTaken):
        fetch(tmp_path, f"{web.url}/b.mar")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"other"]


def test_private_address_is_refused_before_it_is_asked(tmp_path, web):
    cause = refused(tmp_path, f"{web.url}/b.mar", downloader(private=False))
    assert "allow_private_urls" in cause
    assert "localhost" in refused(tmp_path, f"http://localhost:{web.server_port}/b.mar", downloader(private=False))
    assert web.asked == []


def test_host_is_looked_up_once_and_the_checked_address_is_called(tmp_path, web, monkeypatch):
    answers = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))]]
    called = []

    def look_up(*_, **__):
        return answers.pop(0)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect", lambda self, where: called.append(where) or refuse())

    def refuse():
        raise ConnectionRefusedError("refused")

    assert refused(tmp_path, "http://rebinding.example/b.mar", downloader(private=False)) == "refused"
    assert called == [("93.184.216.34", 80)]


def test_redirects_are_followed_where_they_are_allowed(tmp_path, web):
    web.files["/b.mar"] = redirect("/c/d.mar")
    web.files["/c/d.mar"] = b"content"
    assert fetch(tmp_path, f"{web.url}/b.mar").read_bytes() == b"content"


def test_redirects_lead_only_to_what_is_allowed(tmp_path, web):
    web.files["/b.mar"] = redirect("http://169.254.169.254/latest/meta-data/x.mar")
    cause = refused(tmp_path, f"{web.url}/b.mar", downloader(rf"{web.url}/.*"))
    assert "matches no expression of allowed_urls" in cause
    web.files["/f.mar"] = redirect("file:///etc/passwd")
    assert "scheme" in refused(tmp_path, f"{web.url}/f.mar")
    web.files["/loop.mar"] = redirect("/loop.mar")
    assert "more than 5 times" in refused(tmp_path, f"{web.url}/loop.mar")
    web.files["/nowhere.mar"] = lambda handler: (handler.send_response(302), handler.end_headers())
    assert "without a target" in refused(tmp_path, f"{web.url}/nowhere.mar")


def test_failures_say_why(tmp_path, web):
    assert "404" in refused(tmp_path, f"{web.url}/none.mar")
    assert "names no file" in refused(tmp_path, f"{web.url}/")
    assert "user name" in refused(tmp_path, "http://a:b@127.0.0.1/x.mar")
    assert refused(tmp_path, "http://127.0.0.1:9/x.mar")
    assert refused(tmp_path, f"https://127.0.0.1:{web.server_port}/x.mar")  # it does not speak TLS


def test_what_is_cut_short_is_no_archive(tmp_path, web):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"only this")
        handler.close_connection = True

    web.files["/b.mar"] = answer
    assert "9 of 100 bytes" in refused(tmp_path, f"{web.url}/b.mar")


def test_size_and_time_are_limited(tmp_path, web):
    web.files["/b.mar"] = bytes(2000)
    assert "larger than 1000 bytes" in refused(tmp_path, f"{web.url}/b.mar", downloader(max_bytes=1000))

    def endless(handler):
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(100))
        except OSError:
            handler.close_connection = True

    web.files["/e.mar"] = endless
    assert "larger" in refused(tmp_path, f"{web.url}/e.mar", downloader(max_bytes=100_000))
    assert "longer than 0.2 s" in refused(tmp_path, f"{web.url}/e.mar", downloader(total_s=0.2))


def test_silence_ends_a_download(tmp_path, web):
    over = threading.Event()
    web.files["/b.mar"] = lambda handler: over.wait(20)
    assert "timed out" in refused(tmp_path, f"{web.url}/b.mar", downloader(silence_s=0.2))
    over.set()


async def test_cancelled_download_ends_at_once_and_leaves_nothing(tmp_path, web):
    begun, over = threading.Event(), threading.Event()

    def slow(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        begun.set()
        over.wait(20)

    web.files["/b.mar"] = slow
    made = downloader()
    task = asyncio.create_task(made.download(f"{web.url}/b.mar", tmp_path))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await made.close()  # the closed socket ends the thread
    over.set()
    assert [*tmp_path.iterdir()] == []


def drip(handler):
    """An answer that never ends, a byte at a time."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.01)
    except OSError:
        handler.close_connection = True


def drip_heads(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    drip(handler)


@pytest.mark.parametrize("answer", [drip, drip_heads])
def test_slow_download_is_aborted(tmp_path, web, answer):
    web.files["/b.mar"] = answer
    cause = refused(tmp_path, f"{web.url}/b.mar", downloader(window_s=0.5))
    assert "slower than 10000 bytes/s for 0.5 s" in cause


def test_rate_is_an_average_over_the_window():
    meter = RateMeter(100, 10, now=0)
    assert not meter.is_slow(0, now=9)  # the window is not over
    assert not meter.is_slow(1000, now=10)
    assert not meter.is_slow(1000, now=19)  # nothing for 9 s
    assert meter.is_slow(1500, now=29)
    assert not meter.is_slow(9000, now=30)
    assert not RateMeter(0, 10, now=0).is_slow(0, now=100)


async def test_stopping_ends_running_and_waiting_downloads(tmp_path, web):
    web.files["/b.mar"] = drip
    made = downloader()
    names = [f"{web.url}/b.mar?{number}" for number in range(MAX_TOGETHER + 2)]
    web.files.update({f"/b.mar?{number}": drip for number in range(MAX_TOGETHER + 2)})
    tasks = [asyncio.create_task(made.download(name, tmp_path)) for name in names]
    while len(web.asked) < MAX_TOGETHER:
        await asyncio.sleep(0.01)
    made.stop()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {result.cause for result in results} == {STOPPING}
    assert len(web.asked) == MAX_TOGETHER
    await made.close()
    assert [*tmp_path.iterdir()] == []


async def test_look_up_that_hangs_does_not_delay_the_end(tmp_path, monkeypatch):
    begun, over = threading.Event(), threading.Event()

    def look_up(*_, **__):
        begun.set()
        over.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("flambeau.serving.model_sources.downloader.GRACE_S", 0.05)
    made = downloader()
    task = asyncio.create_task(made.download("http://slow.example/b.mar", tmp_path))
    await asyncio.to_thread(begun.wait, 20)
    await made.close()
    with pytest.raises(DownloadFailed):
        await task
    assert [*tmp_path.iterdir()] == []
    over.set()


def test_what_was_matched_is_fetched(tmp_path, web):
    made = downloader(rf"{web.url}/public/[^/]+\.mar")
    web.files["/public/a.mar"] = b"content"
    assert made.allows(f"{web.url}/public/%61%2emar#x")
    assert fetch(tmp_path, f"{web.url}/public/%61%2emar#x", made).name == "a.mar"
    assert web.asked == ["/public/a.mar"]
    for path in ("%2e%2e/secret.mar", "..%2fsecret.mar", "x%2fsecret.mar", "%252e%252e%252fsecret.mar", "..;/s.mar"):
        assert not made.allows(f"{web.url}/public/{path}")
    web.files["/public/b.mar"] = redirect("/public/%2e%2e/secret.mar")
    (tmp_path / "new").mkdir()
    assert "its path holds" in refused(tmp_path / "new", f"{web.url}/public/b.mar", made)


def test_file_urls_are_copied(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "a.mar").write_bytes(b"content")
    assert fetch(tmp_path / "to", f"file://{tmp_path}/from/a.mar").read_bytes() == b"content"
    (tmp_path / "to" / "a.mar").unlink()
    assert "not a file" in refused(tmp_path / "to", f"file://{tmp_path}/from/none.mar")
    assert "not a file" in refused(tmp_path / "to", f"file://{tmp_path}/from")


def test_store_that_cannot_be_written_is_a_failed_download(tmp_path, web):
    web.files["/b.mar"] = b"x"
    with pytest.raises(DownloadFailed):
        fetch(tmp_path / "nowhere", f"{web.url}/b.mar")


def test_old_parts_are_swept(tmp_path):
    old, fresh, own = tmp_path / ".a.mar.0.part", tmp_path / ".b.mar.1.part", tmp_path / "notes.part"
    for path in (old, fresh, own):
        path.touch()
    os.utime(old, (1, 1))
    os.utime(own, (1, 1))
    sweep_parts(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.mar.1.part", "notes.part"]
