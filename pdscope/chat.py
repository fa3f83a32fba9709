"""Chat templates of a plan: which one a model has, and what it is given.

May import pdscope.{arguments,errors,plan}; pdscope.codegen_templates, and with it jinja2, only
to render.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pdscope.arguments import text
from pdscope.errors import InputError
from pdscope.plan import Plan

_SPECIAL = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


def find_template(
    folder: Path, jinja: str | None, config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Source of a model's chat template, and its name for errors; None: the model has none.

    `jinja` is the text of chat_template.jinja, which goes before `config`, the parsed
    tokenizer_config.json. Raises InputError when what is there is no template that can be used.
    """
    if jinja:
        return jinja, str(folder / FILE)
    source: object = config.get("chat_template")
    if not source:
        return None
    where = f"{folder / CONFIG}: chat_template"
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        if "default" not in named:
            names = ", ".join(map(str, named)) or "none"
            raise InputError(
                f"{where}: is a list of templates named {names}, expected one named default: name "
                "one so and compile again, or pass the prompt as text, without --chat"
            )
        source, where = named["default"], f"{where} 'default'"
    if not isinstance(source, str):
        raise InputError(
            f"{where}: is {type(source).__name__}, expected the text of a template: take the file "
            "from the model's original repository, or pass the prompt as text, without --chat"
        )
    return source, where


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    special: dict[str, str]  # special tokens by name, as templates read them
    where: str = "chat template"  # its name in errors

    @classmethod
    def of(cls, plan: Plan, config: Mapping[str, Any]) -> Self:
        """The template of a plan; see find_template. `config` is the parsed tokenizer_config.json.

        Raises InputError when the model has none, or none that can be used.
        """
        jinja = plan.read_text(FILE) if FILE in plan.files else None
        found = find_template(plan.path, jinja, config)
        if found is None:
            raise InputError(
                f"{plan.path}: the model has no chat template: pass the prompt as text (--prompt), "
                "without --chat"
            )
        source, where = found
        special: dict[str, str] = {}
        for name in _SPECIAL:
            value = config.get(name)
            if isinstance(value, Mapping):  # an AddedToken
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
        return cls(source, special, where)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of `messages` ({"role", "content"} each), up to the assistant's turn.

        content: text, or a list of {"type": "text", "text": ...} parts, which a space joins as
        `transformers serve` does; a message with tool_calls may have none. Which roles there are
        is the template's. Raises InputError naming the message and its field.
        """
        return self._render(_plain(messages), options)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole conversation, no turn added, and the pieces of it, [begin, end) in
        characters, that the assistant wrote: its contents, without the template's own marks.

        A content is looked for behind what the template makes of the messages before it. One that
        the template changes or drops is not found, and counts as text of the prompt.
        """
        plain = _plain(messages)
        whole = self._render(plain, {"add_generation_prompt": False})
        spans, at = [], 0
        for index, message in enumerate(plain):
            content = message["content"].strip()
            if message["role"] == "assistant" and index:
                at = max(at, self._prompt_end(plain[:index], whole))
            found = whole.find(content, at) if content else -1
            if found < 0:
                continue
            at = found + len(content)
            if message["role"] == "assistant":
                spans.append((found, at))
        return whole, spans

    def _prompt_end(self, before: list[dict[str, Any]], whole: str) -> int:
        """Where the prompt made of the messages `before` ends in `whole`; 0: it does not begin so,
        or the template refuses them."""
        try:
            prompt = self._render(before, {})
        except InputError:
            return 0
        return len(prompt) if whole.startswith(prompt) else 0

    def _render(self, plain: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        from pdscope.codegen_templates import render_chat

        return render_chat(self.source, plain, self.where, **{**self.special, **options})


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with contents that are text; InputError names what is none."""
    if not messages:
        raise InputError("no messages: give at least one {'role': 'user', 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(f"message {index} has no 'role': give {{'role', 'content'}} objects")
    return [{**m, "content": _content(i, m)} for i, m in enumerate(messages)]


def _content(index: int, message: Mapping[str, Any]) -> str:
    name, content = f"message {index}: content", message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if "content" not in message:
        raise InputError(f"{name} is missing: give {{'role', 'content'}} objects")
    if isinstance(content, str):
        return text(name, content)
    if not isinstance(content, list | tuple):
        raise InputError(f"{name} is {content!r}, expected a text or a list of text parts")
    parts = []
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
            raise InputError(
                f"{name}[{at}] is {part!r:.100}, expected {{'type': 'text', 'text': ...}}: a plan "
                "reads text alone"
            )
        parts.append(text(f"{name}[{at}]: text", part["text"]))
    return " ".join(parts)
