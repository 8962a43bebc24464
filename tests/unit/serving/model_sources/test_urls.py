from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flambeau.errors import ConfigError
from flambeau.serving.model_sources.urls import (
    canonical,
    compile_patterns,
    decoded,
    file_name_of,
    has_dots,
    is_allowed,
    is_public,
    is_url,
    local_path_of,
    parse_web_url,
    readings_of,
)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",  # metadata of most clouds
        "100.100.100.200",  # of Alibaba's
        "192.0.0.192",  # of Oracle's
        "168.63.129.16",  # of Azure's
        "224.0.1.1",
        "255.255.255.255",
        "240.0.0.1",
        "::1",
        "::",
        "fec0::1",
        "3fff::1",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",  # metadata of AWS
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",  # 6to4 of 127.0.0.1
        "64:ff9b::a9fe:a9fe",  # NAT64 of 169.254.169.254
    ],
)
def test_addresses_that_only_this_machine_or_its_network_reaches_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


def test_patterns_match_whole_urls_in_any_case():
    patterns = compile_patterns([r"https://models\.example\.com/.*", r"file:///srv/models/.*"])
    assert is_allowed("HTTPS://models.example.com/a.mar", patterns)
    assert is_allowed("file:///srv/models/a.mar", patterns)
    assert not is_allowed("http://models.example.com/a.mar", patterns)
    assert not is_allowed("https://evil.com/?https://models.example.com/a.mar", patterns)
    assert not is_allowed("https://models.example.com", patterns)
    assert not is_allowed("https://models.example.com/a.mar", [])


def test_pattern_that_is_none_is_named():
    with pytest.raises(ConfigError, match="is not a regular expression"):
        compile_patterns(["https://(unclosed"])


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/a/b.mar", "b.mar"),
        ("https://h/b.mar?X-Amz-Signature=ab/cd&x=1#f", "b.mar"),
        ("https://h/", ""),
        ("https://h", ""),
        ("https://h/a/.hidden", ""),
        ("file:///srv/c.tar.gz", "c.tar.gz"),
    ],
)
def test_file_is_named_after_the_path(url, name):
    assert file_name_of(url) == name


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/a.mar",
        "https://good.com\\@evil.com/a.mar",
        "https:///a.mar",
        "https://host/a b.mar",
        "https://host/a\r\nHost: evil/b.mar",
        "https://host:99999/a.mar",
        "https://host:x/a.mar",
        "ftp://host/a.mar",
        "https://[::1/a.mar",
    ],
)
def test_urls_that_could_mislead_are_refused(url):
    with pytest.raises(ValueError, match=r"."):
        parse_web_url(url)


def test_url_is_taken_apart():
    address = parse_web_url("https://Host.example:8443/a/b.mar?x=1")
    assert (address.host, address.port, address.is_tls) == ("host.example", 8443, True)
    assert (address.target, address.netloc) == ("/a/b.mar?x=1", "host.example:8443")
    assert parse_web_url("http://[2606::1]").netloc == "[2606::1]"
    assert parse_web_url("http://bücher.example/a.mar").host == "xn--bcher-kva.example"


@pytest.mark.parametrize("url", ["file:///srv/%2e%2e/etc/passwd", "file://other/srv/a.mar", "file:///srv/a%00.mar"])
def test_file_urls_do_not_climb_or_name_other_machines(url):
    with pytest.raises(ValueError, match=r"."):
        local_path_of(url)


def test_file_url_names_a_path():
    assert str(local_path_of("file:///srv/my%20model.mar")) == "/srv/my model.mar"


def test_what_is_a_url():
    assert [is_url(text) for text in ("HTTP://x", "https://x", "file:///x", "a.mar", "s3://b/x", "ftp://x")] == [
        *(True,) * 3,
        *(False,) * 3,
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("HTTPS://Models.Example.COM:8443/A/b.mar?Sig=%2F", "https://models.example.com:8443/A/b.mar?Sig=%2F"),
        ("https://h/%61%2Emar#.public.mar", "https://h/a.mar"),
        ("https://h:/a.mar", "https://h/a.mar"),
        ("https://h/a%20b%2Fc.mar", "https://h/a%20b%2Fc.mar"),
        ("http://[::1]:80/a.mar", "http://[::1]:80/a.mar"),
        ("http://b\u00fccher.example/a.mar", "http://xn--bcher-kva.example/a.mar"),
        ("FILE:///srv/a%2Emar", "file:///srv/a.mar"),
    ],
)
def test_url_has_one_spelling(url, expected):
    assert canonical(url) == expected == canonical(expected)


DOTS = ["..", "%2e%2e", ".%2E", "%252e%252e", "%25252e.", "..;x=1", "%2e%2e;", "%2e%2e%2f", "..%5c", ".", "%2e"]


@pytest.mark.parametrize("dots", DOTS)
@pytest.mark.parametrize("start", ["https://h/public", "file:///srv/public"])
def test_dots_are_rejected_however_they_are_written(start, dots):
    with pytest.raises(ValueError, match=r"its path"):
        canonical(f"{start}/{dots}/secret.mar")


@pytest.mark.parametrize(
    "url", ["https://h/a\\..\\b.mar", "https://h/a\n.mar", "https://h/a%00.mar", "file:///a.mar?x.mar"]
)
def test_urls_that_are_read_differently_are_rejected(url):
    with pytest.raises(ValueError, match=r"^it"):
        canonical(url)


def test_encoded_slash_must_match_as_a_slash_too():
    url = canonical("https://h/private%2fa.mar")
    [narrow] = compile_patterns([r"https://h/[^/]+\.mar"])
    assert [bool(narrow.fullmatch(reading)) for reading in readings_of(url)] == [True, False]


def test_invalid_urls_are_rejected_with_a_reason():
    for url in ("http://[x/a.mar", "http://h:99999/a.mar", "http://h/%" + "25" * 9 + "2e/a.mar"):
        assert not has_dots(url)
        with pytest.raises(ValueError, match=r"."):
            canonical(url)


PIECES = [*DOTS, "a", "/", "\\", "%", "25", "2e", "65", "2f", "%2f", "%5c", ";", ".mar"]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
@example("%2%65a")
@example("%2%65%2e/x")  # the code itself is encoded
@example("%252%65.")
def test_no_accepted_path_leaves_its_folder(path):
    try:
        url = canonical(f"https://h/public/{path}")
    except ValueError:
        return
    segments = re.split(r"[/\\\\]", decoded(url.removeprefix("https://h")))
    assert not {"..", "."} & {segment.partition(";")[0] for segment in segments}
    assert canonical(url) == url


@pytest.mark.parametrize("path", ["%3" * 1000 + "5", "%25" * 3000, "a" * 8192])
def test_addresses_that_would_take_long_to_read_are_rejected_at_once(path):
    """Each pass over the first one decodes a single code, which is a part of the next."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r"encoded several times|has \d+ characters, more than 8192"):
        canonical(f"https://models.example/{path}")
    assert time.process_time() - began < 1
    assert canonical("https://models.example/" + "a" * 8000).endswith("a" * 8000)
