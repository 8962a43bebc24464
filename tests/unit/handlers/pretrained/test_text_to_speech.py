"""Texts are spoken by a tiny VITS."""

from __future__ import annotations

import io
import json
import wave

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from flambeau.errors import BadRequest  # noqa: E402
from flambeau.handlers.loaders.pretrained import Runtime  # noqa: E402
from flambeau.handlers.pretrained.handler import find_task, load_task  # noqa: E402
from flambeau.handlers.pretrained.task_request import read_task_request  # noqa: E402
from support.pretrained_models import save_many_voices, save_vits  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated", "ignore:.*weight_norm"
)  # of the library


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums must not depend on how a busy machine shares the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(save):
        folder = save(tmp_path_factory.mktemp("vits"))
        return load_task(find_task(folder, ""), Runtime(folder=folder, device=torch.device("cpu")))

    return load


@pytest.fixture(scope="module")
def task(load):
    return load(save_vits)


def reply_to(task, row):
    request = read_task_request(row, task.known, fields=task.fields, speaks=True)
    inputs = task.prepare(request)
    return task.reply(request, inputs, task.run(inputs))


def say(task, text, **order):
    """What the front end gets."""
    return [*reply_to(task, {"speech": bytearray(json.dumps({"input": text, **order}).encode())})]


def samples_of(file):
    with wave.open(io.BytesIO(file)) as reader:
        assert reader.getparams()[:3] == (1, 2, 24_000)
        return np.frombuffer(reader.readframes(reader.getnframes()), "<i2")


def same(first, second):
    """Whether two sounds are the same, but for rounding."""
    one, other = (np.concatenate([*map(samples_of, files)]).astype(int) for files in (first, second))
    return len(one) == len(other) and np.abs(one - other).max() <= 64


def test_speech_is_that_of_the_library(task):
    from transformers import VitsModel, VitsTokenizer

    folder = task.runtime.folder
    ids = VitsTokenizer.from_pretrained(folder)("hello there", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        wanted = VitsModel.from_pretrained(folder).eval()(ids).waveform[0]
    [file] = say(task, "Hello there!")
    found = samples_of(file)
    assert len(found) == pytest.approx(len(wanted) * 1.5, abs=1)  # 16,000 samples per second become 24,000
    assert np.abs(found).max() / 32767 == pytest.approx(float(wanted.abs().max()), rel=0.2)


def test_sentences_are_pieces_and_a_prediction_is_one_file(task):
    pieces = say(task, "Hello there. How are you?\nFine.")
    assert len(pieces) == 3
    body = {"inputs": "Hello there. How are you?\nFine."}
    whole = reply_to(task, {"body": body})
    assert same([whole], pieces)


def test_speed_shortens_the_sound(task):
    [slow], [plain], [fast] = (say(task, "hello there my dear", speed=speed) for speed in (0.5, 1, 2))
    assert len(slow) > len(plain) > len(fast)
    assert same(say(task, "hello there my dear"), [plain])


def test_voices_are_numbers(load, task):
    several = load(save_many_voices)
    first = say(several, "hello")
    assert same(first, say(several, "hello", voice="0"))
    assert same(first, say(several, "hello", voice="default"))
    assert not same(first, say(several, "hello", voice="2"))
    with pytest.raises(BadRequest, match="0 … 2"):
        say(several, "hello", voice="3")
    assert same(say(task, "hello", voice="default"), say(task, "hello"))


@pytest.mark.parametrize(
    ("text", "order", "reason"),
    [
        ("three cats, 4 dogs", {}, "'4'"),
        ("naïve", {}, "'ï'"),
        ("...", {}, "nothing to say"),
        ("", {}, "empty"),
        ("hello", {"voice": "alloy"}, "default"),
        ("hello", {"instructions": "softly"}, "instructions"),
        ("hello", {"speed": 9}, "speed"),
        ("a" * 5000, {}, "4096"),
    ],
)
def test_what_cannot_be_said_is_refused(task, text, order, reason):
    with pytest.raises(BadRequest, match=reason):
        say(task, text, **order)


def test_several_texts_are_refused(task):
    with pytest.raises(BadRequest, match="one text"):
        reply_to(task, {"body": {"inputs": ["a", "b"]}})
