"""Messages, tools and calls of `peagle.v1`."""

from serving.errors import invalid
from serving.frontend import Frontend
from serving.protos import peagle_v1_pb2 as pb
from serving.stream import Delta
from serving.tools import NO_FORMAT, Arguments, call_id, refuse_equal_names, tool


def tools_of(chat: pb.Chat, frontend: Frontend) -> list[dict]:
    """The tools of a chat, as chat templates take them.

    Raises:
      ServiceError: INVALID_ARGUMENT; they are too many or not valid, or the model has no format of calls.
    """
    limits, objects = frontend.limits, Arguments(frontend.limits)
    if len(chat.tools) > limits.max_tools:
        raise invalid("chat.tools", f"{len(chat.tools)} are more than {limits.max_tools}")
    if chat.tools and not frontend.replies.has_calls:
        raise invalid("chat.tools", NO_FORMAT)
    tools = [_tool(one, place, objects) for place, one in enumerate(chat.tools)]
    refuse_equal_names(tools, field="chat.tools")
    return tools


def calls_of(delta: Delta) -> list[pb.ToolCall]:
    """New calls."""
    return [
        pb.ToolCall(id=call_id(), name=call.name, arguments_json=call.arguments)
        for call in delta.calls
    ]


def _tool(given: pb.Tool, place: int, objects: Arguments) -> dict:
    field, parameters = f"chat.tools[{place}]", None
    if given.parameters_json:
        parameters = objects.parse(given.parameters_json, field=f"{field}.parameters_json")
    try:
        return tool(given.name, given.description or None, parameters)
    except ValueError as error:
        raise invalid(f"{field}.name", str(error)) from error


def message_of(given: pb.ChatMessage, place: int, objects: Arguments) -> dict:
    """A message as chat templates take it.

    Raises:
      ServiceError: INVALID_ARGUMENT; the arguments of a call are not a JSON object.
    """
    message: dict[str, object] = {"role": given.role, "content": given.content}
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        message["tool_calls"] = [
            objects.call(
                call.id,
                call.name,
                call.arguments_json,
                field=f"chat.messages[{place}].tool_calls[{number}].arguments_json",
            )
            for number, call in enumerate(given.tool_calls)
        ]
    return message
