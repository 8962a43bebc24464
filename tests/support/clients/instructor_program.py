"""instructor: objects of pydantic classes instead of text."""

import asyncio
import sys
from typing import Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field


class User(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a model that was never trained adds properties without end

    name: Literal["Ada", "Grace", "Linus"]
    age: int = Field(ge=0, le=120)
    is_admin: bool


class Team(BaseModel):
    model_config = ConfigDict(extra="forbid")
    users: list[User] = Field(min_length=1, max_length=3)


url = sys.argv[1]
ask = {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "Ada is 36 years old."}]}
plain = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    user, completion = client.chat.completions.create_with_completion(response_model=User, max_retries=0, **ask)
    assert isinstance(user, User), user
    assert completion.usage.completion_tokens > 0
    *_, last = client.chat.completions.create_partial(response_model=User, max_retries=0, **ask)
    assert last.name is not None
    assert 0 <= last.age <= 120
    print(mode, user, last)

client = instructor.from_openai(plain)
team = client.chat.completions.create(response_model=Team, max_retries=0, **ask)
assert 1 <= len(team.users) <= 3
client = instructor.from_openai(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
assert isinstance(asyncio.run(client.chat.completions.create(response_model=User, max_retries=0, **ask)), User)
print("instructor works")
