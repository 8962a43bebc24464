"""OpenAI's own client has speech written down, by Whisper and by the handler of the documentation."""

from __future__ import annotations

import io
import json
import shutil
import wave

import pytest

from flambeau.archive.pack import Recipe, pack
from support.running import RunningServer
from support.snippets import ROOT, run, snippets

np = pytest.importorskip("numpy")
openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.language_models import ONE_THREAD  # noqa: E402
from support.pretrained_models import save_multilingual_whisper, tone  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's translations
SECONDS = 1.0
SPEECH = ROOT / "tests/support/audio/speech.wav"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    store = folder / "store"
    store.mkdir()
    settings = folder / "model-config.yaml"
    settings.write_text(f"handler:\n  model_path: {save_multilingual_whisper(folder / 'whisper')}\n")
    recipe = Recipe(model_name="whisper", handler="transformers", config_file=settings)
    pack(recipe, store, format="no-archive")
    handler = folder / "clock.py"
    handler.write_text(snippets("docs/openai.md", "python")[-1])
    pack(Recipe(model_name="clock", handler=str(handler)), store)
    careless = folder / "careless.py"
    careless.write_text(
        "class Careless:\n    abilities = ('transcribe',)\n    def initialize(self, context): pass\n"
        "    def handle(self, data, context): return [{'text': 'a'} for row in data]\n"
    )
    pack(Recipe(model_name="careless", handler=str(careless)), store)
    running = RunningServer(folder / "log", str(store), env=ONE_THREAD).wait_listening()
    try:
        running.until(lambda: running.is_ready, timeout=120)  # it loads torch
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def sound():
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes((tone(SECONDS) * 32767).astype("<i2").tobytes())
    return ("speech.wav", file.getvalue())


def test_whisper_in_every_format(client, sound):
    ask = {"model": "whisper", "file": sound, "language": "de"}
    whole = client.audio.transcriptions.create(**ask)
    assert whole.text
    assert whole.usage.seconds == SECONDS
    text = client.audio.transcriptions.create(**ask, response_format="text")
    assert text.strip() == whole.text
    verbose = client.audio.transcriptions.create(
        **ask, response_format="verbose_json", timestamp_granularities=["segment", "word"], prompt="the cat"
    )
    assert (verbose.language, verbose.duration) == ("german", SECONDS)
    assert verbose.segments[0].start is not None
    assert verbose.words is not None
    assert client.audio.transcriptions.create(**ask, response_format="vtt").startswith("WEBVTT\n")
    assert " --> " in client.audio.translations.create(model="whisper", file=sound, response_format="srt")


def test_handler_of_the_documentation(client, sound):
    said = "transcribe: 1.0 s"
    assert client.audio.transcriptions.create(model="clock", file=sound).text == said
    assert client.audio.translations.create(model="clock", file=sound).text == "translate: 1.0 s"
    srt = client.audio.transcriptions.create(model="clock", file=sound, response_format="srt")
    assert srt == f"1\n00:00:00,000 --> 00:00:01,001\n{said}\n\n"  # its seconds count the header too
    found = client.audio.transcriptions.create(
        model="clock", file=sound, response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert [word.word for word in found.words] == said.split()
    assert "clock" in [model.id for model in client.models.list()]


def test_program_of_the_documentation(server, tmp_path):
    program = snippets("docs/openai.md", "python")[-2]
    (tmp_path / "program.py").write_text(program.replace("http://127.0.0.1:8080", server.url))
    shutil.copy(SPEECH, tmp_path / "speech.wav")
    ran = run("python program.py", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert " --> " in ran.stdout


def test_refusals_name_the_field(client, server, sound):
    cases = [
        ({"model": "whisper", "language": "tlh"}, "tlh"),
        ({"model": "nobody"}, "nobody"),
        ({"model": "whisper", "response_format": "diarized_json"}, "response_format"),
        ({"model": "whisper", "stream": True}, "stream"),
        ({"model": "whisper", "file": ("a.wav", b"no sound")}, "WAV"),
    ]
    for options, reason in cases:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=reason):
            client.audio.transcriptions.create(**{"file": sound, **options})
    with pytest.raises(openai.InternalServerError, match="segments"):
        client.audio.transcriptions.create(model="careless", file=sound, response_format="srt")
    for path, method, status in (("transcriptions", "GET", 405), ("speech", "POST", 404)):
        reply = server.request(method, f"/v1/audio/{path}")
        assert reply.status == status
        assert json.loads(reply.body)["error"]["message"]
