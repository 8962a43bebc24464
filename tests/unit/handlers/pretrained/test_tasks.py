"""Every task answers as transformers' pipelines do on the same weights, alone and in batches."""

from __future__ import annotations

import io
import json
import re
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from flambeau.archive.pretrained import TASKS  # noqa: E402
from flambeau.errors import BadRequest, HandlerError  # noqa: E402
from flambeau.handlers.loaders.pretrained import Runtime  # noqa: E402
from flambeau.handlers.pretrained.handler import load_task  # noqa: E402
from flambeau.handlers.pretrained.task_request import read_task_request  # noqa: E402
from support import pretrained_models  # noqa: E402

SHORT, LONG = "a cat", "The engineers watch the rocket while the cat looks at the river near London"
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for a busy machine's cores make small networks slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a tiny model, made once."""
    made: dict[str, Any] = {}

    def find(name: str):
        if name not in made:
            make = pretrained_models.MODELS.get(name) or getattr(pretrained_models, f"save_{name}")
            made[name] = make(tmp_path_factory.mktemp(name))
        return made[name]

    return find


@pytest.fixture(scope="module")
def task_of(folder_of):
    loaded: dict[str, Any] = {}

    def load(name: str, model: str = ""):
        if name + model not in loaded:
            runtime = Runtime(folder=folder_of(model or name), device=torch.device("cpu"), max_new_tokens=32)
            loaded[name + model] = load_task(name, runtime)
        return loaded[name + model]

    return load


def ask(task, *bodies: Any) -> list[Any]:
    """The replies to these requests as one batch."""
    rows = [{"body": body} for body in bodies]
    requests = [read_task_request(row, task.known, fields=task.fields, is_binary=task.is_binary) for row in rows]
    inputs = [task.prepare(request) for request in requests]
    outputs = iter(task.run([entry for own in inputs for entry in own]))
    pairs = zip(requests, inputs, strict=True)
    replies = [task.reply(request, own, [next(outputs) for _ in own]) for request, own in pairs]
    return json.loads(json.dumps(replies))  # a reply must be plain JSON


def close(value: Any) -> Any:
    """For comparison: numbers at any depth may differ by 1e-5."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-5)
    if isinstance(value, dict):
        return {key: close(item) for key, item in value.items()}
    return [close(item) for item in value] if isinstance(value, (list, tuple)) else value


def same(found: Any, wanted: Any) -> None:
    assert json.loads(json.dumps(found)) == close(json.loads(json.dumps(wanted, default=float)))


def pipeline(task: str, folder: Any) -> Any:
    return transformers.pipeline(task, model=str(folder), device="cpu")


def test_text_classification(task_of, folder_of):
    task, reference = task_of("text-classification"), pipeline("text-classification", folder_of("text-classification"))
    everything = {"inputs": LONG, "parameters": {"top_k": 3}}
    some = {"inputs": [SHORT, LONG], "parameters": {"top_k": 2, "function_to_apply": "sigmoid"}}
    pair = {"inputs": {"text": SHORT, "text_pair": LONG}}
    for bodies in [
        [SHORT],
        [[LONG, SHORT]],
        [everything],
        [some],
        [pair],
        [SHORT, [LONG, SHORT], everything, some, pair],
    ]:
        for found, body in zip(ask(task, *bodies), bodies, strict=True):
            inputs = body["inputs"] if isinstance(body, dict) else body
            same(found, reference(inputs, **(body.get("parameters", {}) if isinstance(body, dict) else {})))


def test_zero_shot_classification(task_of, folder_of):
    task = task_of("zero-shot-classification")
    reference = pipeline("zero-shot-classification", folder_of("zero-shot-classification"))
    options = [
        {"candidate_labels": ["space", "cooking", "politics"]},
        {"candidate_labels": "space, the sea", "multi_label": True},
        {"candidate_labels": ["space", "sea"], "hypothesis_template": "It is about {} ."},
    ]
    bodies = [{"inputs": text, "parameters": given} for text in (SHORT, [LONG, SHORT]) for given in options]
    wanted = [reference(body["inputs"], **body["parameters"]) for body in bodies]
    same(ask(task, *bodies), wanted)
    same([ask(task, body)[0] for body in bodies], wanted)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_token_classification(task_of, folder_of, strategy):
    task = task_of("token-classification")
    reference = pipeline("token-classification", folder_of("token-classification"))
    given = {"aggregation_strategy": strategy}
    bodies = [{"inputs": text, "parameters": given} for text in (SHORT, LONG, [LONG, "Ada§ lives"])]
    wanted = [reference(body["inputs"], **given) for body in bodies]
    same(ask(task, *bodies), wanted)
    same([ask(task, body)[0] for body in bodies], wanted)
    assert any(wanted)


def test_token_classification_ignores_what_it_is_asked_to(task_of, folder_of):
    task = task_of("token-classification")
    [found] = ask(task, {"inputs": LONG, "parameters": {"ignore_labels": ["O", "B-PER", "I-PER"]}})
    assert {entity["entity"] for entity in found} <= {"B-LOC", "I-LOC"}


def test_fill_mask(task_of, folder_of):
    task, reference = task_of("fill-mask"), pipeline("fill-mask", folder_of("fill-mask"))
    bodies = [
        {"inputs": "The [MASK] sat on the mat"},
        {"inputs": "The [MASK] sat near the [MASK] and looked at the sea", "parameters": {"top_k": 3}},
        {"inputs": ["a [MASK]", "The engineers watch the [MASK] while it flies to the moon"]},
        {"inputs": "a [MASK]", "parameters": {"targets": ["cat", "sea"]}},
    ]
    wanted = [reference(body["inputs"], **body.get("parameters", {})) for body in bodies]
    same(ask(task, *bodies), wanted)
    same([ask(task, body)[0] for body in bodies], wanted)


def test_ranking_orders_texts_by_the_score_of_each_pair(task_of, folder_of):
    task, reference = task_of("text-ranking"), pipeline("text-classification", folder_of("text-ranking"))
    texts = [LONG, SHORT, "The moon", "Paris is the capital of France"]
    scores = [reference({"text": "What is a cat?", "text_pair": text})["score"] for text in texts]
    order = sorted(range(4), key=lambda i: -scores[i])
    wanted = [{"index": i, "score": scores[i]} for i in order]
    body = {"query": "What is a cat?", "texts": texts}
    same(ask(task, body, {"inputs": body, "parameters": {"top_k": 2, "return_text": True}}, body)[0], wanted)
    [found] = ask(task, {"inputs": body, "parameters": {"top_k": 2, "return_text": True}})
    same(found, [{**entry, "text": texts[entry["index"]]} for entry in wanted[:2]])
    [raw] = ask(task, {**body, "raw_scores": True})
    assert 1 / (1 + np.exp(-raw[0]["score"])) == pytest.approx(found[0]["score"], abs=1e-5)


RAW = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("file", "document"),
    [
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder", "activation_fn": RAW}),
        ("config.json", {"sentence_transformers": {"activation_fn": RAW}}),
        ("config.json", {"sbert_ce_default_activation_function": RAW}),
    ],
)
def test_scores_are_logits_wherever_sentence_transformers_says_so(folder_of, tmp_path, file, document):
    folder = copied(folder_of("text-ranking"), tmp_path, file, document)
    pair = {"pairs": [[SHORT, LONG]]}
    task = load_task("text-ranking", Runtime(folder=folder, device=torch.device("cpu")))
    plain = load_task("text-ranking", Runtime(folder=folder_of("text-ranking"), device=torch.device("cpu")))
    [raw], [bounded] = ask(task, pair), ask(plain, pair)
    assert 1 / (1 + np.exp(-raw["scores"][0])) == pytest.approx(bounded["scores"][0], abs=1e-5)
    assert raw["scores"] != pytest.approx(bounded["scores"], abs=1e-6)  # both are equal at 0.659


@pytest.mark.parametrize(
    ("document", "named"),
    [({"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"), ({"default_prompt_name": "query"}, "'query'")],
)
def test_what_would_change_scores_and_is_not_known_is_refused(folder_of, tmp_path, document, named):
    folder = copied(folder_of("text-ranking"), tmp_path, "config_sentence_transformers.json", document)
    with pytest.raises(HandlerError, match=named):
        load_task("text-ranking", Runtime(folder=folder, device=torch.device("cpu")))


def copied(folder, target, file, document):
    """A folder whose file has more keys."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / file
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **document}))
    return target


@pytest.mark.parametrize("name", ["text-ranking", "text-classification"])
def test_a_network_with_one_label_scores_pairs_for_front_ends(task_of, name):
    task = task_of(name, "text-ranking")
    assert "score" in task.abilities
    [ranked] = ask(task_of("text-ranking"), {"query": SHORT, "texts": [LONG, "the river"]})
    [found] = ask(task, {"pairs": [[SHORT, LONG], [SHORT, "the river"]], "truncation": False})
    scores = {one["index"]: one["score"] for one in ranked}
    same(found["scores"], [scores[0], scores[1]])
    assert found["num_tokens"] > 10
    for wrong in ([], "a", [["a"]], [["a", 1]]):
        with pytest.raises(BadRequest, match="pairs"):
            ask(task, {"pairs": wrong})


def test_classes_for_front_ends_are_the_probabilities_of_all(task_of):
    task = task_of("text-classification")
    assert task.abilities == ("classify",)
    [found] = ask(task, {"inputs": [SHORT, LONG], "parameters": {"usage": True}})
    [ranked] = ask(task, {"inputs": [SHORT, LONG], "parameters": {"top_k": 3}})
    for one, labels in zip(found["classes"], ranked, strict=True):
        assert one["label"] == labels[0]["label"]
        same(sorted(one["probs"], reverse=True), [label["score"] for label in labels])


def best_span(folder: Any, question: str, context: str, longest: int = 15) -> tuple[float, str]:
    """The answer by trying every span, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets, sides = encoded.pop("offset_mapping")[0].tolist(), encoded.sequence_ids(0)
    with torch.inference_mode():
        result = model(**encoded)
    allowed = torch.tensor([side == 1 or i == 0 for i, side in enumerate(sides)])
    start, end = (
        torch.where(allowed, logits[0], -10000.0).softmax(-1) for logits in (result.start_logits, result.end_logits)
    )
    own = [i for i, side in enumerate(sides) if side == 1]
    spans = [(float(start[a] * end[b]), a, b) for a in own for b in own if a <= b < a + longest]
    score, first, last = max(spans)
    return score, context[offsets[first][0] : offsets[last][1]]


def test_question_answering(task_of, folder_of):
    task, folder = task_of("question-answering"), folder_of("question-answering")
    asked = [("Where does Ada live?", pretrained_models.TEXTS[1]), ("What is it?", SHORT), ("Who watches?", LONG)]
    bodies = [{"inputs": {"question": q, "context": c}, "parameters": {"align_to_words": False}} for q, c in asked]
    for found in (ask(task, *bodies), [ask(task, body)[0] for body in bodies]):
        for answer, (question, context) in zip(found, asked, strict=True):
            score, text = best_span(folder, question, context)
            assert answer["answer"] == text == context[answer["start"] : answer["end"]]
            assert answer["score"] == pytest.approx(score, abs=1e-5)
    [three] = ask(task, {**bodies[0], "parameters": {"top_k": 3}})
    assert len(three) <= 3
    assert [a["score"] for a in three] == sorted([a["score"] for a in three], reverse=True)
    [empty] = ask(task, {**bodies[0], "parameters": {"top_k": 50, "handle_impossible_answer": True}})
    assert "" in [answer["answer"] for answer in empty]


def test_questions_of_kserve_clients_are_tensors_with_one_text(task_of):
    task = task_of("question-answering")
    [wanted] = ask(task, {"question": "What is it?", "context": SHORT})
    row = {"question": ["What is it?"], "context": [SHORT.encode()]}
    request = read_task_request(row, task.known, fields=task.fields)
    windows = task.prepare(request)
    same(task.reply(request, windows, task.run(windows)), wanted)
    assert {name: type(value) for name, value in wanted.items()} == {
        "score": float,
        "start": int,
        "end": int,
        "answer": str,
    }
    assert {*wanted} == {*task.output_types}


def test_long_contexts_are_read_in_windows_to_their_end(task_of):
    task = task_of("question-answering")
    context = " ".join(f"word{i} and the sea" for i in range(80)) + " Zanzibar"
    [window, *_] = windows = task.prepare(
        read_task_request({"body": {"question": "Where?", "context": context}}, task.known, fields=task.fields)
    )
    assert len(windows) > 3
    assert all(len(entry["input_ids"]) <= 64 for entry in windows)
    assert windows[-1]["offsets"][-2][1] == len(context)
    [answer] = ask(task, {"question": "Where?", "context": context})
    assert context[answer["start"] : answer["end"]] == answer["answer"] != ""
    assert window["sides"][0] is None


def generated(folder: Any, text: str, **options: Any) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokens = model.generate(**tokenizer(text, return_tensors="pt"), **options)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def test_summaries_and_translations(task_of, folder_of):
    folder = folder_of("text2text-generation")
    summarize = task_of("summarization", "text2text-generation")
    wanted = [{"summary_text": generated(folder, f"summarize: {t}", max_length=12, num_beams=2)} for t in (SHORT, LONG)]
    assert wanted[0] != wanted[1]
    assert ask(summarize, SHORT, [LONG, SHORT]) == [wanted[:1], wanted[::-1]]
    assert ask(summarize, LONG) == [wanted[1:]]
    translate = task_of("translation", "text2text-generation")
    french = {"src_lang": "en", "tgt_lang": "fr"}
    text = generated(folder, f"translate English to French: {SHORT}", max_length=12)
    assert ask(translate, {"inputs": SHORT, "parameters": french}) == [[{"translation_text": text}]]
    other = task_of("text2text-generation")
    wanted_text = generated(folder, LONG, max_new_tokens=6)
    bodies = [{"inputs": LONG, "parameters": {"max_new_tokens": 6}}, {"inputs": SHORT, "parameters": {"num_beams": 2}}]
    assert ask(other, *bodies)[0] == [{"generated_text": wanted_text}]


def picture(width: int, height: int) -> tuple[Image.Image, bytes]:
    image = Image.fromarray(RANDOM.integers(0, 255, (height, width, 3), np.uint8))
    file = io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


def test_image_classification(task_of, folder_of):
    task, reference = (
        task_of("image-classification"),
        pipeline("image-classification", folder_of("image-classification")),
    )
    pictures = [picture(40, 30), picture(32, 64), picture(100, 100)]
    wanted = [reference(image) for image, _ in pictures]
    same(ask(task, *(data for _, data in pictures)), wanted)
    same([ask(task, data)[0] for _, data in pictures], wanted)
    same(ask(task, {"inputs": encoded(pictures[0][1]), "parameters": {"top_k": 2}})[0], wanted[0][:2])


def test_object_detection(task_of, folder_of):
    task, reference = task_of("object-detection"), pipeline("object-detection", folder_of("object-detection"))
    pictures = [picture(48, 32), picture(32, 48), picture(48, 32), picture(90, 40)]
    wanted = [reference(image, threshold=0.3) for image, _ in pictures]
    assert any(wanted)
    bodies = [{"inputs": encoded(data), "parameters": {"threshold": 0.3}} for _, data in pictures]
    same(ask(task, *bodies), wanted)
    same([ask(task, body)[0] for body in bodies], wanted)


def encoded(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def wav(samples: Any, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


SOUNDS = [pretrained_models.tone(0.05), pretrained_models.tone(0.12, 700), pretrained_models.tone(0.05, 200)]


def as_json(samples: Any) -> dict[str, Any]:
    return {"inputs": {"array": samples.tolist(), "sampling_rate": 16_000}}


def test_speech_recognition_with_ctc(task_of, folder_of):
    task = task_of("automatic-speech-recognition")
    reference = pipeline("automatic-speech-recognition", folder_of("automatic-speech-recognition"))
    wanted = [reference(samples.copy()) for samples in SOUNDS]
    assert all(entry["text"] for entry in wanted)
    same(ask(task, *map(as_json, SOUNDS)), wanted)
    same([ask(task, as_json(samples))[0] for samples in SOUNDS], wanted)


def transcribed(folder: Any, samples: Any, **options: Any) -> str:
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    tokens = model.generate(**extractor(samples, sampling_rate=16_000, return_tensors="pt"), **options)
    return transformers.AutoTokenizer.from_pretrained(folder).decode(tokens[0], skip_special_tokens=True)


def test_speech_recognition_with_a_decoder(task_of, folder_of):
    task, folder = task_of("automatic-speech-recognition", "whisper"), folder_of("whisper")
    wanted = [{"text": transcribed(folder, samples, max_new_tokens=6)} for samples in SOUNDS]
    assert all(entry["text"] for entry in wanted)
    given = {"max_new_tokens": 6}
    bodies = [{**as_json(samples), "parameters": given} for samples in SOUNDS]
    same(ask(task, *bodies), wanted)
    same([ask(task, body)[0] for body in bodies], wanted)


def reply_to(speech, samples: Any, **order: Any) -> Any:
    """The reply to what the front end asks for."""
    given = json.dumps({"task": "transcribe", "timestamps": [], **order}).encode()
    row = {"file": bytearray(wav(samples)), "transcription": bytearray(given)}
    request = read_task_request(row, speech.known, fields=speech.fields, is_binary=speech.is_binary)
    inputs = speech.prepare(request)
    return speech.reply(request, inputs, speech.run(inputs))


def transcribe(speech, samples: Any, **order: Any) -> dict[str, Any]:
    return json.loads(json.dumps(reply_to(speech, samples, **order)))


@pytest.mark.parametrize("seconds", [2.0, 65.0])  # the second in three windows or more
def test_streamed_transcript_is_the_whole_one(task_of, seconds):
    task = task_of("automatic-speech-recognition", "multilingual_whisper")
    sound, order = pretrained_models.tone(seconds), {"language": "de", "prompt": "the cat"}
    whole = transcribe(task, sound, **order)["text"]
    pieces = [piece["text"] for piece in reply_to(task, sound, **order, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    left = reply_to(task, sound, **order, stream=True)
    assert next(left)["text"] == pieces[0]
    left.close()
    assert [piece["text"] for piece in reply_to(task, sound, **order, stream=True)] == pieces


@pytest.mark.filterwarnings("ignore:std")  # of the library, for the times of few words
def test_transcripts_are_those_of_the_library(task_of, folder_of):
    task = task_of("automatic-speech-recognition", "multilingual_whisper")
    reference = pipeline("automatic-speech-recognition", folder_of("multilingual_whisper"))
    sound = pretrained_models.tone(2.0)
    options = {"language": "de", "task": "transcribe", "num_beams": 1}
    wanted = reference(sound.copy(), generate_kwargs=dict(options))["text"]
    assert wanted
    assert transcribe(task, sound, language="de") == {"text": wanted, "duration": 2.0}
    assert transcribe(task, sound, language="German")["text"] == wanted
    translated = transcribe(task, sound, language="de", task="translate")["text"]
    assert translated == reference(sound.copy(), generate_kwargs={**options, "task": "translate"})["text"] != wanted
    assert transcribe(task, sound, language="de", prompt="the cat " * 50)["text"] != wanted  # cut to what fits

    timed = transcribe(task, sound, language="de", timestamps=["segment", "word"])
    chunks = reference(sound.copy(), return_timestamps=True, generate_kwargs=dict(options))["chunks"]
    assert [entry["text"] for entry in timed["segments"]] == [chunk["text"] for chunk in chunks]
    assert [entry["start"] for entry in timed["segments"]] == [chunk["timestamp"][0] for chunk in chunks]
    assert all(entry["end"] is not None for entry in timed["segments"])
    assert "".join(entry["word"] for entry in timed["words"]).split() == timed["text"].split()
    assert timed["language"] == "german"
    assert transcribe(task, sound, timestamps=["segment"])["language"] in ("english", "german", "french")


@pytest.mark.parametrize(
    ("model", "order", "reason"),
    [
        ("multilingual_whisper", {"language": "tlh"}, "tlh"),
        ("multilingual_whisper", {"timestamps": ["segment", "word"], "temperature": 0.5}, "temperature"),
        ("multilingual_whisper", {"prompt": "<|en|>"}, "prompt"),
        ("whisper", {"timestamps": ["segment"]}, "timestamps"),
        ("whisper", {"language": "en"}, "leave language out"),
        ("whisper", {"task": "translate"}, "one language"),
        ("whisper", {"prompt": "Ada"}, "prompt"),
        ("automatic-speech-recognition", {"timestamps": ["segment"]}, "timestamps"),
        ("automatic-speech-recognition", {"prompt": "Ada"}, "prompt"),
        ("automatic-speech-recognition", {"task": "translate"}, "transcriptions"),
    ],
)
def test_transcripts_that_a_model_cannot_make_are_refused(task_of, model, order, reason):
    task = task_of("automatic-speech-recognition", model.removeprefix("automatic-speech-recognition"))
    with pytest.raises(BadRequest, match=reason):
        transcribe(task, SOUNDS[1], **order)


def test_transcript_of_a_model_with_one_output_per_frame(task_of):
    found = transcribe(task_of("automatic-speech-recognition"), SOUNDS[1])
    assert found["text"]
    assert found["duration"] == pytest.approx(0.12)


def test_audio_classification(task_of, folder_of):
    task, reference = (
        task_of("audio-classification"),
        pipeline("audio-classification", folder_of("audio-classification")),
    )
    wanted = [reference(samples.copy()) for samples in SOUNDS]
    same(ask(task, *map(as_json, SOUNDS)), wanted)
    same([ask(task, as_json(samples))[0] for samples in SOUNDS], wanted)
    [file] = ask(task, wav(SOUNDS[1]))
    assert [entry["label"] for entry in file] == [entry["label"] for entry in wanted[1]]
    assert file[0]["score"] == pytest.approx(wanted[1][0]["score"], abs=1e-3)  # 16 bits


PAGE = (Path(__file__).parents[4] / "docs" / "hugging-face.md").read_text()
DOCUMENTED = re.findall(r"### ([\w-]+)\n\n```json\n(.*?)```\n```json\n(.*?)```", PAGE, re.DOTALL)


def test_every_task_is_documented():
    assert {name for name, _, _ in DOCUMENTED} | set(re.findall(r"(?:\n\| |\*\*)([\w-]+)(?: \||\*\*)", PAGE)) >= {
        *TASKS
    }


@pytest.mark.parametrize(("name", "request_text", "reply_text"), DOCUMENTED)
def test_documented_requests_have_replies_of_the_documented_form(task_of, name, request_text, reply_text):
    task = task_of(name, "text2text-generation" if name == "summarization" else "")
    [found] = ask(task, json.loads(request_text))
    assert form_of(found) == form_of(json.loads(reply_text)) or found == []  # a random network may find no entity


def form_of(value: Any) -> Any:
    """The keys and types of a reply; lists are as their first element."""
    if isinstance(value, dict):
        return {key: form_of(item) for key, item in value.items()}
    return [form_of(value[0])] if isinstance(value, list) and value else type(value)


BAD = [
    ("text-classification", {"input": "x"}, "no inputs"),
    ("text-classification", {"inputs": ""}, "is empty"),
    ("text-classification", {"inputs": 5}, "must be text, not a number"),
    ("text-classification", [], "list of inputs is empty"),
    ("text-classification", {"inputs": "\ud800"}, "half a surrogate pair"),
    ("text-classification", {"inputs": SHORT, "parameters": {"topk": 2}}, "did you mean top_k?"),
    ("text-classification", {"inputs": SHORT, "parameters": {"top_k": 0}}, "at least 1, not 0"),
    ("text-classification", {"inputs": SHORT, "parameters": [1]}, "parameters must be an object, not a list"),
    ("text-classification", {"inputs": {"text": SHORT, "pair": LONG}}, "did you mean text_pair?"),
    ("text-classification", {"inputs": "cat " * 90}, '"truncation": true'),
    ("zero-shot-classification", SHORT, "candidate_labels"),
    (
        "zero-shot-classification",
        {"inputs": SHORT, "parameters": {"candidate_labels": ["a"], "hypothesis_template": "x"}},
        "must contain {}",
    ),
    ("token-classification", {"inputs": SHORT, "parameters": {"aggregation_strategy": "all"}}, "one of none, simple"),
    ("question-answering", {"inputs": "Where?"}, '"question"'),
    ("question-answering", {"question": "a " * 70, "context": SHORT}, "max_question_len"),
    ("fill-mask", SHORT, "no [MASK]"),
    ("fill-mask", {"inputs": "[MASK]", "parameters": {"targets": ["zanzibar"]}}, "is not one token"),
    ("text-ranking", {"query": "a", "texts": []}, "texts must be a list of texts, not an empty list"),
    ("text-ranking", {"inputs": "a"}, '"query"'),
    ("text2text-generation", {"inputs": SHORT, "parameters": {"max_new_tokens": 33}}, "the limit is 32"),
    ("text2text-generation", {"inputs": SHORT, "parameters": {"num_beams": 99}}, "the limit is 16"),
    (
        "text2text-generation",
        {"inputs": SHORT, "parameters": {"src_lang": "en", "tgt_lang": "de"}},
        "translation_en_to_fr",
    ),
    ("image-classification", b"not an image", "not an image"),
    ("image-classification", "https://example.com/a.png", "fetches no addresses"),
    ("object-detection", {"inputs": 7}, "as base64 text in JSON, not as a number"),
    ("automatic-speech-recognition", b"RIFFxxxxWAVEfmt ", "cut off"),
    ("automatic-speech-recognition", {"inputs": {"array": [0.0], "sampling_rate": 16000}}, "or more"),
    ("automatic-speech-recognition", {"inputs": {"array": [0.0]}}, "sampling_rate must be"),
    ("audio-classification", {"inputs": {"array": ["a"], "sampling_rate": 16000}}, "list of numbers"),
]


@pytest.mark.parametrize(("name", "body", "reason"), BAD)
def test_bad_input_is_refused_with_the_remedy(task_of, name, body, reason):
    with pytest.raises(BadRequest) as error:
        ask(task_of(name), body)
    assert reason in str(error.value)


def test_long_texts_are_truncated_on_request(task_of):
    [found] = ask(task_of("text-classification"), {"inputs": "cat " * 90, "parameters": {"truncation": True}})
    assert found[0]["label"] in ("BAD", "GOOD", "SO SO")


def test_model_without_the_head_of_a_task_is_refused(folder_of):
    runtime = Runtime(folder=folder_of("fill-mask"), device=torch.device("cpu"))
    with pytest.raises(HandlerError, match=r"lack classifier\..*would answer at random"):
        load_task("text-classification", runtime)


def test_weights_of_another_size_are_refused_by_name(tmp_path):
    folder = pretrained_models.change_config(pretrained_models.save_classifier(tmp_path), intermediate_size=40)
    with pytest.raises(HandlerError, match=r"do not fit config\.json|lack "):
        load_task("text-classification", Runtime(folder=folder, device=torch.device("cpu")))


def test_dtype_of_the_runtime_is_used(folder_of):
    runtime = Runtime(folder=folder_of("text-classification"), device=torch.device("cpu"), dtype=torch.bfloat16)
    task = load_task("text-classification", runtime)
    assert task.model.dtype is torch.bfloat16
    assert ask(task, SHORT)[0][0]["score"] <= 1


def test_compiled_network_answers_the_same(task_of, folder_of):
    runtime = Runtime(
        folder=folder_of("text-classification"),
        device=torch.device("cpu"),
        compile_options={"backend": "eager", "dynamic": True},
    )
    task = load_task("text-classification", runtime)
    assert isinstance(task.model, torch._dynamo.OptimizedModule)
    same(ask(task, SHORT, [LONG, SHORT]), ask(task_of("text-classification"), SHORT, [LONG, SHORT]))
    assert isinstance(task.model, torch._dynamo.OptimizedModule)  # not replaced by the plain one after a failure


def test_fields_of_a_form_are_numbers_texts_and_files(task_of):
    task = task_of("image-classification")
    row = {"inputs": picture(20, 20)[1], "top_k": bytearray(b"1"), "function_to_apply": b"sigmoid"}
    request = read_task_request(row, task.known, fields=task.fields, is_binary=True)
    assert (request.inputs, request.parameters) == (row["inputs"], {"top_k": 1, "function_to_apply": "sigmoid"})
    texts = task_of("text-classification")
    numbers = read_task_request({"inputs": b"42", "top_k": b"2"}, texts.known)
    assert (numbers.inputs, numbers.parameters) == ("42", {"top_k": 2})
    with pytest.raises(BadRequest, match="curl sends a form unless it has a content type"):
        read_task_request({"What a fine day": b""}, texts.known)
