"""langchain-openai: chats, streams, tools, structured output, batches, both of OpenAI's APIs."""

import sys
from typing import Literal

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

url = sys.argv[1]


@tool
def weather(city: Literal["Ulm", "Bonn"], days: int) -> str:
    """The weather of some days in a city."""
    return f"rain in {city} for {days} days"


class Movie(BaseModel):
    """A movie."""

    model_config = ConfigDict(extra="forbid")

    title: Literal["Metropolis", "M"] = Field(description="its title")
    year: int = Field(ge=1900, le=2100)


asked = [SystemMessage("Be brief."), HumanMessage("How is the weather in Ulm?")]
for responses in (False, True):
    model = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", max_tokens=1000, max_retries=0, use_responses_api=responses
    )
    short = model.bind(max_tokens=8)
    reply = short.invoke(asked)
    assert reply.usage_metadata["output_tokens"] <= 8
    assert reply.response_metadata["model_name"] == "tiny"
    chunks = [*short.stream(asked)]
    assert isinstance(chunks[0], AIMessageChunk)
    assert "".join(chunk.text for chunk in chunks) is not None
    assert len(short.batch([asked, asked])) == 2
    chain = ChatPromptTemplate.from_messages([("system", "You are {name}."), ("human", "{text}")]) | short
    assert chain.invoke({"name": "Ada", "text": "Hello"}).type == "ai"

    forced = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    call = forced.invoke(asked)
    [found] = call.tool_calls
    result = weather.invoke(found)
    assert isinstance(result, ToolMessage)
    assert short.bind_tools([weather]).invoke([*asked, call, result]).type == "ai"
    merged = None
    for chunk in forced.stream(asked):
        merged = chunk if merged is None else merged + chunk
    assert merged.tool_calls[0]["name"] == "weather"
    assert merged.tool_calls[0]["args"]["city"] in ("Ulm", "Bonn")

    for method in ("json_schema", "function_calling"):
        movie = model.with_structured_output(Movie, method=method).invoke("Name a movie.")
        assert isinstance(movie, Movie), movie
        print(responses, method, movie)

completion = OpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", max_tokens=8, max_retries=0)
assert isinstance(completion.invoke("Once upon a time"), str)
assert isinstance("".join(completion.stream("Once upon a time")), str)
print("langchain works")
