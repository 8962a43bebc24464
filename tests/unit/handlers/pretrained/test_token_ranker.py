"""Language models that rank texts by one token: the scores are those of their authors' own computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flambeau.archive.pretrained import choose_handler  # noqa: E402
from flambeau.errors import BadRequest, HandlerError  # noqa: E402
from flambeau.handlers.loaders.pretrained import Runtime  # noqa: E402
from flambeau.handlers.pretrained.handler import load_task  # noqa: E402
from flambeau.handlers.pretrained.task_request import read_task_request  # noqa: E402
from support.pretrained_models import save_language_model, save_ranker  # noqa: E402

QUERY, LONG = "Where does Ada live?", "Ada Lovelace lives in London, near the river, and the engineers look at the sea."
PAIRS = [(QUERY, "a cat\n"), (QUERY, LONG), ("the mat?", "London")]
CARDS = {
    "qwen3": "---\npipeline_tag: text-ranking\n---\nJudge whether the Document meets the requirements based on",
    "gemma": "---\npipeline_tag: text-classification\n---\nGiven a query A and a passage B, determine whether",
    "qwen2": "---\npipeline_tag: text-ranking\n---\nmixedbread-ai/mxbai-rerank-base-v2",
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<Instruct>: {{ m.content }}\n{% elif m.role == 'query' %}"
    "<Query>: {{ m.content }}\n{% elif m.role == 'document' %}<Document>: {{ m.content }}<|im_end|>\nAnswer:{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_language_model(tmp_path_factory.mktemp(kind), kind)
            (made[kind] / "README.md").write_text(CARDS[kind])
        return made[kind]

    return find


def task_of(folder: Path, **ranking: Any) -> Any:
    return load_task("text-ranking", Runtime(folder=folder, device=torch.device("cpu"), ranking=ranking))


def ask(task: Any, document: Any) -> Any:
    request = read_task_request({"body": document}, task.known, fields=task.fields)
    inputs = task.prepare(request)
    return task.reply(request, inputs, task.run(inputs))


def scores(task: Any, pairs=PAIRS, **parameters: Any) -> list[float]:
    return ask(task, {"pairs": [list(pair) for pair in pairs], "parameters": parameters})["scores"]


def qwen_ids(
    tokenizer, query, text, instruction="Given a web search query, retrieve relevant passages that answer the query"
):
    """As in the model card: the prompt's ends are tokenized apart."""
    start = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    middle = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
    return [i for part in (start, middle, end) for i in tokenizer.encode(part, add_special_tokens=False)]


def bge_ids(tokenizer, query, text):
    prompt = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
        "prediction of either 'Yes' or 'No'."
    )
    parts = [f"A: {query}", "\n", f"B: {text}", "\n", prompt]
    return [tokenizer.bos_token_id] + [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]


def mxbai_ids(tokenizer, query, text):
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    start = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    )
    parts = [start, f"query: {query}", "\n", f"document: {text}", "\n", task, "<|im_end|>\n<|im_start|>assistant\n"]
    return [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]


def expected(folder, make_ids, true_token, false_token=None, pairs=PAIRS, **options):
    """Each pair alone, without padding, by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for query, text in pairs:
        with torch.inference_mode():
            logits = network(torch.tensor([make_ids(tokenizer, query, text, **options)])).logits[0, -1]
        chosen = logits[tokenizer.convert_tokens_to_ids(true_token)]
        if false_token is None:
            found.append(float(chosen.sigmoid()))
        else:
            both = torch.stack([logits[tokenizer.convert_tokens_to_ids(false_token)], chosen])
            found.append(float(both.softmax(0)[1]))
    return found


@pytest.mark.parametrize(
    ("kind", "make_ids", "true_token", "false_token"),
    [("qwen3", qwen_ids, "yes", "no"), ("gemma", bge_ids, "Yes", None), ("qwen2", mxbai_ids, "1", "0")],
)
def test_models_with_a_known_card_are_scored_as_their_authors_do(folder_of, kind, make_ids, true_token, false_token):
    folder = folder_of(kind)
    chosen = choose_handler(folder)
    assert (chosen.handler, chosen.task) == ("transformers", "text-ranking")
    task = task_of(folder)
    wanted = expected(folder, make_ids, true_token, false_token)
    assert scores(task) == pytest.approx(wanted, abs=1e-5)  # in one batch, of different lengths
    assert max(wanted) - min(wanted) > 0.01
    ranked = ask(task, {"query": QUERY, "texts": [text for _, text in PAIRS[:2]]})
    assert [one["index"] for one in ranked] == sorted(range(2), key=lambda i: -wanted[i])


def test_an_instruction_and_the_settings_of_vllm(folder_of):
    folder = folder_of("qwen3")
    wanted = expected(folder, qwen_ids, "yes", "no", instruction="Find the cat")
    assert scores(task_of(folder), instruction="Find the cat") == pytest.approx(wanted, abs=1e-5)
    assert scores(task_of(folder, instruction="Find the cat")) == pytest.approx(wanted, abs=1e-5)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["yes", "no"],
        "is_original_qwen3_reranker": True,
    }
    turned = expected(folder, qwen_ids, "no", "yes")
    assert scores(task_of(folder, hf_overrides=overrides)) == pytest.approx(turned, abs=1e-5)


def test_a_prompt_of_the_settings(folder_of):
    form = {"prompt": "{query}|{document}=", "true_token": "1"}
    task = task_of(folder_of("qwen2"), ranking=form)
    make = lambda tokenizer, query, text: tokenizer.encode(f"{query}|{text}=", add_special_tokens=False)  # noqa: E731
    pairs = [("a {document}", "{query} b"), *PAIRS]  # what fills one place may look like another
    assert scores(task, pairs) == pytest.approx(expected(folder_of("qwen2"), make, "1", pairs=pairs), abs=1e-5)


def test_folders_of_sentence_transformers_say_how_they_rank(folder_of, tmp_path):
    """As CrossEncoder saves them: LogitScore, and a chat template with the roles query and document."""
    folder = save_language_model(tmp_path, "qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("yes", "no")}
    name = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    steps = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": name},
    ]
    write(folder / "modules.json", steps)
    write(folder / "1_LogitScore/config.json", {"true_token_id": ids["yes"], "false_token_id": ids["no"]})
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    write(folder / "sentence_bert_config.json", {"modality_config": {"text": message, "message": message}})
    prompts = {"prompts": {"web": "Find"}, "default_prompt_name": "web", "model_type": "CrossEncoder"}
    write(folder / "config_sentence_transformers.json", prompts)
    (folder / "chat_template.jinja").write_text(TEMPLATE)

    def make(tokenizer, query, text):
        prompt = f"<Instruct>: Find\n<Query>: {query}\n<Document>: {text}<|im_end|>\nAnswer:"
        return tokenizer.encode(prompt, add_special_tokens=False)

    assert choose_handler(folder).task == "text-ranking"
    task = task_of(folder)
    assert scores(task) == pytest.approx(expected(folder, make, "yes", "no"), abs=1e-5)
    task.limit = 60  # a document is cut, the end of the prompt is not
    with pytest.raises(BadRequest, match=r"have \d+ tokens with the prompt, and the model takes 60"):
        scores(task)
    [encoding] = task.encode_pairs([(QUERY, LONG)], truncates=True)
    shown = task.tokenizer.decode(encoding["input_ids"])
    assert len(encoding["input_ids"]) <= 60
    assert shown.startswith(f"<Instruct>: Find\n<Query>: {QUERY}\n<Document>: Ada")
    assert shown.endswith("<|im_end|>\nAnswer:")
    task.limit = 20
    with pytest.raises(BadRequest, match="the query is too long"):
        scores(task, truncation=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(HandlerError, match="does not show messages of the role document"):
        task_of(folder)


def test_texts_with_special_tokens_are_refused(folder_of):
    with pytest.raises(BadRequest, match=r"<\|im_end\|>, a special token .* plain query"):
        scores(task_of(folder_of("qwen3")), [("cat", "a<|im_end|>")])


def test_what_is_not_known_is_refused_by_name(folder_of, tmp_path):
    folder = folder_of("qwen3")
    for ranking, reason in (
        ({"ranking": "qwen4"}, "ranking: 'qwen4' is not known.*qwen3_reranker, bge_reranker, mxbai_rerank"),
        ({"hf_overrides": {"num_labels": 3}}, "hf_overrides has num_labels"),
        ({"ranking": {"prompt": "{query}", "true_token": "1"}}, "each once"),
        ({"ranking": {"prompt": "{query}{document}", "true_token": True}}, "quote yes and no"),
        ({"ranking": {"prompt": "{query}{document}", "true_token": "the sea"}}, "tokens of this model, not one"),
    ):
        with pytest.raises(HandlerError, match=reason):
            task_of(folder, **ranking)
    chat = save_language_model(tmp_path / "chat", "qwen3")  # no card: a model that chats
    assert choose_handler(chat).handler == "gpt_handler"
    with pytest.raises(HandlerError, match="its prompt is not known"):
        task_of(chat)
    encoder = save_ranker(tmp_path / "encoder")
    with pytest.raises(HandlerError, match="ranking is for language models"):
        task_of(encoder, ranking="qwen3_reranker")
    with pytest.raises(BadRequest, match="no place for an instruction"):
        scores(task_of(encoder), instruction="Find")


def test_a_cross_encoder_puts_its_default_prompt_before_the_query(tmp_path):
    folder = save_ranker(tmp_path)
    plain = task_of(folder)
    write(folder / "config_sentence_transformers.json", {"prompts": {"q": "the cat "}, "default_prompt_name": "q"})
    assert scores(task_of(folder), [("sat", "mat")]) == pytest.approx(scores(plain, [("the cat sat", "mat")]), abs=1e-6)


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
