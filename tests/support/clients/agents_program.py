"""openai-agents: an agent with tools, a structured answer, a handoff, a session and a stream, over both APIs."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
cities = []


@function_tool
def weather(city: Literal["Ulm", "Bonn"]) -> str:
    """The weather in a city."""
    cities.append(city)
    return "rain"


class Report(BaseModel):
    city: Literal["Ulm", "Bonn"]
    degrees: int = Field(ge=-50, le=50)


def check(report):
    assert isinstance(report, Report), report


async def use(model):
    cities.clear()
    called = ModelSettings(tool_choice="required", max_tokens=1000, parallel_tool_calls=False)
    agent = Agent(
        name="weather",
        instructions="Be brief.",
        model=model,
        tools=[weather],
        model_settings=called,
        output_type=Report,
    )
    result = await Runner.run(agent, "How is the weather?", max_turns=50)
    check(result.final_output)
    assert cities, "the tool was not called"

    session = SQLiteSession("one")
    speaker = Agent(name="speaker", model=model, model_settings=ModelSettings(max_tokens=1000))
    await Runner.run(speaker, "Hello", session=session)
    await Runner.run(speaker, "And now?", session=session)
    assert len(await session.get_items()) >= 2  # an untrained model may say nothing

    streamed = Runner.run_streamed(agent, "How is the weather?", max_turns=50)
    kinds = {event.type async for event in streamed.stream_events()}
    check(streamed.final_output)
    assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds

    front = Agent(name="front", model=model, model_settings=called, handoffs=[speaker])
    result = await Runner.run(front, "Hello")
    assert result.last_agent.name == "speaker"
    print(type(model).__name__, cities)


async def main():
    await use(OpenAIChatCompletionsModel(model="tiny", openai_client=client))
    await use(OpenAIResponsesModel(model="tiny", openai_client=client))


asyncio.run(main())
print("agents works")
