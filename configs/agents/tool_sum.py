"""An agent that adds digits with OpenAI's SDK and a calculator as its tool. It contains no code for training."""

import json
import os

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The last digit of x + y.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
        },
    },
}
MAX_TURNS = 16

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
row = json.loads(os.environ["AREAL_LIKE_ROW"])
messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(MAX_TURNS):
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0].message
    messages.append(answer.model_dump(exclude_none=True))
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        given = json.loads(call.function.arguments)
        try:
            result = str((int(given["x"]) + int(given["y"])) % 10)
        except (KeyError, TypeError, ValueError):
            result = "?"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(messages[-1]["content"])
