"""Tools that Anthropic's clients run. A client declares such a tool by its type alone. Anthropic's models know the
schemas; other models get them in the prompt."""


def _schema(required: str, **properties: object) -> dict[str, object]:
    given = {
        name: {"type": one} if isinstance(one, str) else one for name, one in properties.items()
    }
    return {"type": "object", "properties": given, "required": required.split()}


def _commands(names: str, **properties: object) -> dict[str, object]:
    return _schema("command", command={"type": "string", "enum": names.split()}, **properties)


_RANGE = {"type": "array", "items": {"type": "integer"}}
_EDITS = dict(
    path="string", file_text="string", old_str="string", new_str="string", insert_line="integer",
    insert_text="string", view_range=_RANGE,
)  # fmt: skip
_BASH = (
    "Runs a command in a shell that keeps its state. restart starts the shell anew.",
    _schema("", command="string", restart="boolean"),
)
_EDITOR = (
    "Views and edits files. view shows a file, or the lines of view_range (-1 is the last), or lists a directory; create "
    "writes file_text; str_replace replaces old_str, which must occur once, by new_str; insert puts insert_text after "
    "the line insert_line.",
    _commands("view create str_replace insert", **_EDITS) | {"required": ["command", "path"]},
)
_MEMORY = (
    "Keeps notes in files below /memories; look there first. view shows a file, or the lines of view_range, or lists a "
    "directory; create writes file_text; str_replace replaces old_str by new_str; insert puts insert_text after the line "
    "insert_line; delete removes path; rename moves old_path to new_path.",
    _commands(
        "view create str_replace insert delete rename",
        **_EDITS, old_path="string", new_path="string",
    ),
)  # fmt: skip
CLIENT_TOOLS = {
    "bash_20250124": _BASH,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""Description and schema of the arguments, by type."""
