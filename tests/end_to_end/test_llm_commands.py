"""`flambeau llm …` and what README and docs show of it, with the model that comes with Flambeau."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from flambeau.examples import storyteller
from support.running import RunningServer
from support.snippets import run, snippets
from support.terminal import Terminal

TARGET = storyteller.FOLDER / "target"


class LanguageServer(RunningServer):
    """`flambeau llm serve`."""

    subcommand = ("llm", "serve")
    start_timeout_s = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("llm") / "log"
    draft = str(storyteller.FOLDER / "draft")
    settings = log.parent / "f.yaml"
    settings.write_text("job_queue_size: 60\ncors_allowed_origin: '*'\n")
    arguments = (str(TARGET), "--name", "checkpoint", "--draft", draft, "--config", str(settings))
    variables = {"FLAMBEAU_MAX_NUM_SEQS": "8", "FLAMBEAU_RESPONSE_TIMEOUT": "77"}
    server = LanguageServer(log, *arguments, env={"OMP_NUM_THREADS": "1", **variables})
    yield server.wait_ready()
    server.stop()


def run_here(shell: str, server: LanguageServer, folder) -> str:
    """What a snippet prints, with this server's address and model."""
    here = shell.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}").replace("storyteller", "checkpoint")
    result = run(here, folder, FLAMBEAU_URL=server.url)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def readme_line(words: str) -> str:
    """The command of README with these words."""
    [line] = [line for shell in snippets("README.md", "sh") for line in shell.splitlines() if words in line]
    return line


def test_readme_streams_a_tale(server, tmp_path):
    assert len(run_here(readme_line("predictions/storyteller"), server, tmp_path).split()) > 20


def test_readme_client_of_openai_streams(server, tmp_path):
    [client] = [code for code in snippets("README.md", "python") if "openai" in code]
    code = client.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}").replace("storyteller", "checkpoint")
    code = code.replace("max_tokens=40", "max_tokens=40, temperature=0")  # what is drawn may be short
    (tmp_path / "client.py").write_text(code)
    result = subprocess.run([sys.executable, tmp_path / "client.py"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 40


def test_commands_of_the_page_run(server, tmp_path):
    _, asking = snippets("docs/llm.md", "sh")[:2]
    curl = asking.partition("flambeau llm chat")[0]
    assert len(run_here(curl, server, tmp_path)) > 40


def test_chat_prints_an_answer_as_it_comes(server, tmp_path):
    likeliest = readme_line("flambeau llm chat") + " --temperature 0"  # what is drawn may be short
    assert len(run_here(likeliest, server, tmp_path).strip()) > 10


def test_chat_remembers_what_was_said(server, tmp_path):
    talk = (
        "printf 'Good morning.\\n/clear\\nWho are you?\\n/quit\\n' | flambeau llm chat --max-tokens 8 --temperature 0"
    )
    answers = run_here(talk, server, tmp_path)
    alone = run_here('flambeau llm chat "Who are you?" --max-tokens 8 --temperature 0', server, tmp_path)
    assert answers.endswith(alone)
    assert len(answers) > len(alone)


def test_settings_of_serve_hold_for_llm_serve(server):
    described = server.describe("checkpoint")
    assert described["responseTimeout"] == 77
    assert described["jobQueueStatus"]["remainingCapacity"] == 60
    assert server.request("GET", "/ping").headers["access-control-allow-origin"] == "*"


def test_chat_edits_lines_remembers_them_and_obeys_commands(server, tmp_path):
    env = {"FLAMBEAU_URL": server.url, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    command = ["llm", "chat", "--max-tokens", "4", "--temperature", "0"]
    with Terminal(*command, folder=tmp_path, env=env) as terminal:
        terminal.type("/help\n", until="/save FILE")
        terminal.type("/system Be brief.\n", until="the system message is set")
        terminal.type("/system\n", until="Be brief.")
        left = "\x1b[D"
        terminal.type(f"Good row.{left * 4}mor\n", until="\n")  # arrow keys move the cursor
        terminal.type("/svae talk.json\n", until="did you mean /save?")
        terminal.type("/sa\t talk.json\n", until="3 messages are in talk.json")  # Tab completes a command
        terminal.type("/save talk.json\n", until="talk.json exists; name another file")
        terminal.type("/clear\n", until="a new conversation begins")
        terminal.type("\x04")
    system, asked, answer = json.loads((tmp_path / "talk.json").read_text())
    assert (system, asked) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Good morrow."},
    )
    assert answer["role"] == "assistant"
    with Terminal(*command, folder=tmp_path, env=env) as terminal:
        terminal.type("\x1b[A" * 3 + "\n", until="did you mean /save?")  # the history of the chat before
        terminal.type("/quit\n")
    history = tmp_path / "flambeau" / "chat_history"
    assert "Good morrow." in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_chat_without_a_server_names_the_remedy(tmp_path):
    result = run("flambeau llm chat hello --url http://127.0.0.1:9", tmp_path)
    assert result.returncode == 1
    assert "no server answers" in result.stderr


def test_bench_measures_a_server(server, tmp_path):
    shell = "flambeau llm bench --streams 1,3 --new-tokens 8 --json"
    one, three = json.loads(run_here(shell.replace("bench", f"bench {server.url}"), server, tmp_path))
    assert (one["streams"], three["streams"]) == (1, 3)
    assert min(one["tokens_per_s"], three["tokens_per_s"], one["first_token_ms"]) > 0


def test_bench_measures_a_checkpoint_and_ends_in_peace(tmp_path):
    result = run(f"flambeau llm bench {TARGET} --streams 1 --new-tokens 8 --json", tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0]["tokens_per_s"] > 0


def test_bench_with_too_long_a_prompt_says_so(tmp_path):
    result = run(f"flambeau llm bench {TARGET} --streams 1 --prompt-tokens 5000", tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("flambeau: the prompt has 5000 tokens")


def test_engine_is_a_library(tmp_path):
    [code] = [code for code in snippets("docs/llm.md", "python") if "from_pretrained" in code]
    (tmp_path / "library.py").write_text(code.replace("path/to/checkpoint", str(TARGET)))
    command = [sys.executable, "-W", "ignore", tmp_path / "library.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 20


def test_a_smaller_checkpoint_is_written_and_its_loss_printed(tmp_path):
    (tmp_path / "sample.txt").write_text(
        "Once there was a bear.\n\nHe lived in a cave and liked honey best of all.\n" * 2
    )
    [shell] = [shell for shell in snippets("docs/quantization.md", "sh") if "llm quantize" in shell]
    result = run(shell.replace("path/to/checkpoint", str(TARGET)).replace("path/to/smaller", "smaller"), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "perplexity" in result.stdout
    assert (tmp_path / "smaller" / "config.json").is_file()


def test_a_broken_chat_template_ends_serve_in_one_line(tmp_path):
    shutil.copytree(TARGET, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% if %}")
    result = run("flambeau llm serve model --port 0 --management-port 0 --metrics-port 0", tmp_path)
    assert result.returncode == 1, result.stderr
    assert "the chat template is broken: TemplateSyntaxError" in result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout


@pytest.mark.parametrize("command", ["serve {}", "bench {}", "quantize {} into", f"bench {TARGET} --draft {{}}"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [("./no/such", "does not exist; give"), (".", "holds no weights"), ("notes.txt", "is not a checkpoint; give")],
)
def test_what_is_no_checkpoint_is_refused_at_once(tmp_path, command, words, reason):
    (tmp_path / "notes.txt").write_text("not a model")
    result = run(f"flambeau llm {command.format(words)}", tmp_path)
    assert result.returncode == 1
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
