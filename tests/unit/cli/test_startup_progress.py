from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.cli.startup_progress import curl_arguments, example_in


def model(tmp_path, handler, *, abilities=(), **options):
    return SimpleNamespace(
        handler=handler,
        abilities=frozenset(abilities),
        config=SimpleNamespace(options=options),
        source=SimpleNamespace(folder=tmp_path),
    )


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        ("image_classifier", "-T PICTURE.jpg"),
        ("onnx", "-H 'content-type: application/json' -d @NUMBERS.json"),
        ("text_classifier", "-H 'content-type: application/json' -d '\"What a fine day\"'"),
        ("mine.py", "-H 'content-type: TYPE' -T FILE"),
    ],
)
def test_command_fits_the_handler(tmp_path, handler, words):
    assert curl_arguments(model(tmp_path, handler)) == words


def test_generator_is_shown_as_it_streams(tmp_path):
    assert curl_arguments(model(tmp_path, "gpt_handler", abilities=["generate"])).startswith("-N -H")


def test_example_of_the_model_comes_first_and_is_quoted(tmp_path):
    (tmp_path / "mine.py").write_text("example = 1")
    given = model(tmp_path, "mine.py", example='["it\'s"]')
    assert curl_arguments(given).endswith("""-d '["it'"'"'s"]'""")


@pytest.mark.parametrize("handler", ["mine.py", "mine", "mine:handle", "mine.py:Mine"])
def test_example_of_a_handler_is_a_literal_of_its_module_or_class(tmp_path, handler):
    (tmp_path / "mine.py").write_text("import nowhere\nclass Mine:\n    example = {'text': 'hello'}\n")
    assert example_in(tmp_path, handler) == {"text": "hello"}


@pytest.mark.parametrize("text", ["example = open('x')", "example = b'x'", "def (", "\0", "a.example = 1", ""])
def test_other_files_have_no_example(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    assert example_in(tmp_path, "mine.py") is None
    assert example_in(tmp_path, "../none.py") is None
