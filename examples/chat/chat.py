"""Asks a language model by the OpenAI API, and prints the text as it is generated."""

import sys

from openai import OpenAI

client = OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="none")
model = next(model.id for model in client.models.list())
stream = client.completions.create(model=model, prompt=sys.argv[2], max_tokens=20, stream=True)
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)
print()
