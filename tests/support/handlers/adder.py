"""Adds what its extra file says; asks for its files, configuration and function as an archive brings them."""

import json
from pathlib import Path

import helper


def answer(data, context):
    if data is None:
        return None
    folder = Path(context.system_properties["model_dir"])
    offset = json.loads((folder / "deep" / "offset.json").read_text())
    greeting = context.model_yaml_config["handler"]["greeting"]
    return [f"{greeting} {helper.add(int((row.get('data') or row.get('body')).decode()), offset)}" for row in data]
