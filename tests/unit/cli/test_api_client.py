"""Error responses become exceptions."""

from __future__ import annotations

import pytest

from flambeau.cli.api_client import guess_hint, guess_type, predict, to_error
from flambeau.errors import BadRequest


@pytest.mark.parametrize("body", [b'{"error": {"message": "why"}}', b'{"code": 400, "message": "why"}', b"why"])
def test_message_is_found_in_every_form_of_an_error(body):
    assert str(to_error(400, body)) == "why (HTTP 400)"


def test_page_of_another_server_is_not_printed():
    assert str(to_error(404, b"<!DOCTYPE HTML>\n<html>")).startswith("the answer is a page for browsers")


def test_content_type_is_guessed_by_name_then_by_content():
    assert guess_type("cat.png", b"{}") == "image/png"
    assert guess_type("-", b"{}") == "application/json"
    assert guess_type("-", b"{") == "application/octet-stream"


def test_guessed_address_comes_with_the_variable_that_names_it(monkeypatch):
    monkeypatch.setenv("FLAMBEAU_URL", "http://h:9")
    assert "FLAMBEAU_MANAGEMENT_URL" in guess_hint("http://h:10")
    assert guess_hint("http://h:9") == guess_hint("http://other:10") == ""
    monkeypatch.delenv("FLAMBEAU_URL")
    assert guess_hint("http://h:10") == ""


def test_data_in_place_of_a_file_comes_with_the_remedy():
    with pytest.raises(BadRequest, match="flambeau predict shout -"):
        predict("http://h:9", "shout", None, '{"text": 5}', None)
    with pytest.raises(BadRequest, match=r"nowhere\.json cannot be read: No such file or directory$"):
        predict("http://h:9", "shout", None, "nowhere.json", None)
