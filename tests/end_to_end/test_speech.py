"""OpenAI's own client has speech written down and texts spoken, by Whisper and by handlers of the documentation."""

from __future__ import annotations

import base64
import importlib.util
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
HANDLERS = [code for code in snippets("docs/handlers.md", "python") if "abilities" in code]
CARELESS = """# careless.py
import json


class Careless:
    abilities = ("transcribe", "speak")

    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [{"text": "a"} if "file" in row else self.speak(row["speech"]) for row in data]

    def speak(self, text):
        for word in json.loads(text)["input"].split():
            if word == "fall":
                raise RuntimeError("it fell")
            yield RIFF if word == "good" else b"no sound"


RIFF = b"RIFF" + bytes(4) + b"WAVEfmt " + bytes((16, 0, 0, 0, 1, 0, 1, 0, 128, 62, 0, 0, 0, 125, 0, 0, 2, 0, 16, 0))
RIFF += b"data" + bytes((2, 0, 0, 0, 1, 2))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    store = folder / "store"
    store.mkdir()
    settings = folder / "model-config.yaml"
    settings.write_text(f"handler:\n  model_path: {save_multilingual_whisper(folder / 'whisper')}\n")
    recipe = Recipe(model_name="whisper", handler="transformers", config_file=settings)
    pack(recipe, store, format="no-archive")
    for code in (*HANDLERS, CARELESS):
        handler = folder / code.partition("\n")[0].removeprefix("# ")
        handler.write_text(code)
        pack(Recipe(model_name=handler.stem, handler=str(handler)), store)
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


def test_programs_of_the_documentation(server, client, tmp_path):
    listening, speaking = snippets("docs/openai.md", "python")[-2:]
    shutil.copy(SPEECH, tmp_path / "speech.wav")
    for program in (listening, speaking):
        (tmp_path / "program.py").write_text(program.replace("http://127.0.0.1:8080", server.url))
        ran = run("python program.py", tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert " --> " in ran.stdout or program is speaking
    assert (tmp_path / "speech.wav").read_bytes()[44:] == 3 * words_of_tones(client, "one")


def words_of_tones(client, text, **options):
    options = {"model": "tones", "voice": "high", "response_format": "pcm", **options}
    return client.audio.speech.create(input=text, **options).read()


def test_transcript_is_streamed(client, sound):
    *deltas, done = client.audio.transcriptions.create(model="clock", file=sound, stream=True)
    assert [event.delta for event in deltas] == ["transcribe: ", "1.0 ", "s "]
    assert (done.type, done.text) == ("transcript.text.done", "transcribe: 1.0 s")
    whole = client.audio.transcriptions.create(model="whisper", file=sound, language="de").text
    *deltas, done = client.audio.transcriptions.create(model="whisper", file=sound, language="de", stream=True)
    assert "".join(event.delta for event in deltas).strip() == done.text == whole


def test_speech_in_plain_formats(client):
    one = words_of_tones(client, "one")
    assert len(one) == 2 * 2400
    assert words_of_tones(client, "one", speed=2) == one[:2400]
    assert words_of_tones(client, "one", voice="low") != one
    file = words_of_tones(client, "one two", response_format="wav")
    with wave.open(io.BytesIO(file)) as reader:
        assert reader.getparams()[:3] == (1, 2, 24_000)
    assert file[44:] == 2 * one
    assert "tones" in [model.id for model in client.models.list()]


def test_speech_in_events(server):
    ask = {"model": "tones", "input": "one two", "response_format": "pcm", "stream_format": "sse"}
    reply = server.request("POST", "/v1/audio/speech", json.dumps(ask).encode())
    events = [json.loads(line.removeprefix("data: ")) for line in reply.body.decode().split("\n\n") if line]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    assert len(base64.b64decode(events[0]["audio"])) == 2 * 2400


def test_encoded_speech(client):
    if importlib.util.find_spec("soundfile") is None:
        with pytest.raises(openai.BadRequestError, match=r"flambeau\[audio\]"):
            client.audio.speech.create(model="tones", voice="low", input="one")
        return
    starts = {"mp3": b"\xff", "flac": b"fLaC", "opus": b"OggS"}
    for name, start in starts.items():
        assert words_of_tones(client, "one two", response_format=name).startswith(start)
    assert words_of_tones(client, "one two", response_format=openai.omit).startswith(starts["mp3"])


def test_refusals_of_speech_name_the_field(client, server):
    cases = [
        ({"voice": "middle"}, "middle"),
        ({"instructions": "softly"}, "instructions"),
        ({"speed": 5}, "speed"),
        ({"response_format": "aac"}, "response_format"),
        ({"model": "clock"}, "speak"),
        ({"model": "careless", "input": "good"}, "24000"),
        ({"input": "a" * 4097}, "4096"),
    ]
    for options, reason in cases:
        with pytest.raises(openai.BadRequestError, match=reason):
            words_of_tones(client, options.pop("input", "one"), **options)
    with pytest.raises(openai.InternalServerError, match="WAV"):
        words_of_tones(client, "bad", model="careless")
    ask = {"model": "careless", "input": "good fall", "response_format": "wav", "stream_format": "sse"}
    reply = server.request("POST", "/v1/audio/speech", json.dumps(ask).encode())
    assert "it fell" in json.loads(reply.body.decode().split("\n\n")[-2].removeprefix("data: "))["error"]["message"]
    with pytest.raises(openai.APIConnectionError):
        words_of_tones(client, "good fall", model="careless", response_format="wav")


def test_refusals_name_the_field(client, server, sound):
    cases = [
        ({"model": "whisper", "language": "tlh"}, "tlh"),
        ({"model": "nobody"}, "nobody"),
        ({"model": "whisper", "response_format": "diarized_json"}, "response_format"),
        ({"model": "whisper", "stream": True, "response_format": "srt"}, "stream"),
        ({"model": "whisper", "file": ("a.wav", b"no sound")}, "WAV|sound file"),
    ]
    for options, reason in cases:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=reason):
            client.audio.transcriptions.create(**{"file": sound, **options})
    with pytest.raises(openai.InternalServerError, match="segments"):
        client.audio.transcriptions.create(model="careless", file=sound, response_format="srt")
    # mp3 by default, which needs a package: what the model lacks is said first.
    with pytest.raises(openai.BadRequestError, match="makes no speech"):
        client.audio.speech.create(model="whisper", voice="low", input="one")
    for path, method, status in (("transcriptions", "GET", 405), ("speech", "GET", 405), ("songs", "POST", 404)):
        reply = server.request(method, f"/v1/audio/{path}")
        assert reply.status == status
        assert json.loads(reply.body)["error"]["message"]
