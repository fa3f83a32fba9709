"""Chat templates of a plan: which one a model has, and what it is given.

May import pdscope.{errors,plan}; pdscope.codegen_templates, and with it jinja2, only to render.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    special: dict[str, str]  # special tokens by name, as templates read them

    @classmethod
    def of(cls, plan: Plan, config: Mapping[str, Any]) -> Self:
        """The template of a plan: chat_template.jinja, else tokenizer_config.json's
        `chat_template`.

        `config` is the parsed tokenizer_config.json. Raises InputError when the model has none.
        """
        source: object = config.get("chat_template")
        if "chat_template.jinja" in plan.files:
            source = plan.read_text("chat_template.jinja")
        elif isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise InputError(
                f"{plan.path}: the model has no chat template: pass the prompt as text (--prompt), "
                "without --chat"
            )
        special: dict[str, str] = {}
        for name in _SPECIAL:
            value = config.get(name)
            if isinstance(value, Mapping):  # an AddedToken
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
        return cls(source, special)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of `messages` ({"role", "content"} each), up to the assistant's turn."""
        from pdscope.codegen_templates import render_chat

        if not messages:
            raise InputError("no messages: give at least one {'role': 'user', 'content': ...}")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise InputError(
                    f"message {index} has no 'role': give {{'role', 'content'}} objects"
                )
        return render_chat(self.source, messages, **{**self.special, **options})
