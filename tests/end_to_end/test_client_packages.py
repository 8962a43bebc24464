"""instructor, langchain-openai, litellm and openai-agents run ordinary programs against a real server, unmodified.

Their packages need other versions of shared ones than this project, so they run in an environment of their own:
`FLAMBEAU_CLIENT_PYTHONS` names the Pythons that have some of them, separated by colons (see `make clients`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sentencepiece")
pytest.importorskip("safetensors")
pytest.importorskip("llguidance")

from support.language_models import write_language_model
from support.network_server import serving_networks

PROGRAMS = Path(__file__).parents[1] / "support/clients"
PYTHONS = [*filter(None, os.environ.get("FLAMBEAU_CLIENT_PYTHONS", "").split(os.pathsep)), sys.executable]
MODULES = {
    "instructor_program.py": "instructor",
    "langchain_program.py": "langchain_openai",
    "litellm_program.py": "litellm",
    "agents_program.py": "agents",
}
HAS_MODULE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor -%}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{% endfor -%}
assistant:
"""
BYTES = range(3, 3 + 256)  # the ids of single bytes, after the three special tokens


def python_with(module: str) -> str:
    """A Python that has the module; skips the test if there is none."""
    for python in PYTHONS:
        if subprocess.run([python, "-c", HAS_MODULE, module], cwd=PROGRAMS, check=False).returncode == 0:
            return python
    pytest.skip(f"no Python with {module}; name one in FLAMBEAU_CLIENT_PYTHONS")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    model = write_language_model(folder / "model", context=4096)
    # A network that was never trained would rarely end its texts: half of the bytes do.
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *BYTES[0x80:]]}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with serving_networks(folder, {"tiny": model}, max_num_seqs=16, num_blocks=2000) as server:
        yield server.url


@pytest.mark.parametrize("program", MODULES)
def test_program_of_a_client_package(program, request, tmp_path):
    python = python_with(MODULES[program])  # before the server starts
    command = [python, str(PROGRAMS / program), request.getfixturevalue("url")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=140, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.rstrip().endswith("works")
