"""An agent that edits a file through the tools of a chat: `python docs/examples/agent.py FILE "what
to change"`.

It works with every server of OpenAI's API whose model calls tools. The small model inside
peagle-jax cannot reason: with `peagle-serve --reply-format qwen3` it answers in text and calls
nothing. The test of this file gives it its replies.
"""

import argparse
import json
import os
from pathlib import Path

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Returns the text of the file.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "replace",
            "description": "Replaces a text that stands in the file exactly once.",
            "parameters": {
                "type": "object",
                "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
                "required": ["old", "new"],
            },
        },
    },
]


def run_tool(path: Path, name: str, arguments: dict) -> str:
    """Runs one call. A mistake of the model becomes a text that it can read."""
    text = path.read_text(encoding="utf-8")
    if name == "read":
        return text
    if name != "replace":
        return f"Error: there is no tool {name!r}."
    old, new = arguments.get("old"), arguments.get("new")
    if not isinstance(old, str) or not isinstance(new, str) or text.count(old) != 1:
        return "Error: old must stand in the file exactly once, and new must be a text."
    path.write_text(text.replace(old, new), encoding="utf-8")
    return "Done."


def edit(client: openai.OpenAI, model: str, path: Path, task: str, *, turns: int = 10) -> str:
    """Lets the model call tools until it answers in words, at most `turns` times; returns the
    answer.
    """
    messages: list = [{"role": "user", "content": f"{task} The file is {path.name}."}]
    for _ in range(turns):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_completion_tokens=1000
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = run_tool(path, call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"The model had not finished after {turns} turns."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("task")
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    parser.add_argument("--url", default=url, help="of the server (default: %(default)s)")
    args = parser.parse_args()
    with openai.OpenAI(base_url=args.url, api_key="none") as client:
        try:
            model = client.models.list().data[0].id
            print(edit(client, model, args.file, args.task))
        except (openai.APIError, OSError) as error:
            parser.exit(1, f"{parser.prog}: error: {args.url}: {error}\n")


if __name__ == "__main__":
    main()
