"""Chat templates: the same prompts as transformers renders, in a sandbox.

Holds the issue's `--chat` and `generate(messages)`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support import fake_plan

from pdscope.chat import ChatTemplate
from pdscope.codegen_templates import render, render_chat
from pdscope.errors import InputError
from pdscope.plan import Plan

TALK = [
    {"role": "system", "content": "Be \u00e9xact & <short>."},
    {"role": "user", "content": "  Hi {{ there }}\n"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "plain": fake_plan.CHAT,
    "blocks": (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if loop.first and m.role == 'system' %}\n"
        "[{{ m.content | trim }}]\n    {% continue %}\n    {% endif %}\n"
        "{{ m.role | upper }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}\nASSISTANT:\n{% endif %}\n"
    ),
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}"
        ""
        "{% set ns.n = ns.n + 1 %}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
        "{{ ns.n }}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "slices": "{% for m in messages[::-1] %}{{ m.content.split(' ')[-1].strip() }}|{% endfor %}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}{{ x }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(name: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False}
    theirs, _ = render_jinja_template(
        conversations=[TALK],
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        **variables,
    )
    ours = render_chat(TEMPLATES[name], TALK, add_generation_prompt=prompt, **variables)
    assert ours == theirs[0]


def test_strftime_now() -> None:
    assert len(render_chat("{{ strftime_now('%Y') }}", TALK)) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "no template that jinja reads .*line 1"),
        ("{{ 1 / 0 }}", "cannot render .*ZeroDivisionError"),
        ("{{ messages['x'].y }}", "cannot render .*has no attribute"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not allowed"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "nothing"),
    ],
)
def test_bad_templates(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render_chat(template, TALK)


def make_plan(folder: Path, config: dict[str, Any], jinja: str | None = None) -> Plan:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    fake_plan.write_manifest(folder)
    return Plan.open(folder)


def test_where_templates_come_from(tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<b>"}}
    assert ChatTemplate.of(make_plan(tmp_path, config), config).render(TALK) == "A<b>"
    config["chat_template"] = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    assert ChatTemplate.of(make_plan(tmp_path, config), config).render(TALK) == "D"
    plan = make_plan(tmp_path, config, jinja="J{{ messages | length }}")
    assert ChatTemplate.of(plan, config).render(TALK) == "J4"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", ("chat_template: is no template", "Expected an expression, got", "line 1")),
        ("{{ raise_exception('no system role') }}", ("chat_template: refuses", "no system role")),
        ("{{ missing.content }}", ("chat_template: cannot render", "'missing' is undefined")),
        ([{"name": "rag", "template": "x"}], ("named rag, expected one named default",)),
        ([{"name": "default", "template": ["x"]}], ("chat_template 'default': is list", "text")),
        (7, ("chat_template: is int", "the text of a template")),
    ],
)
def test_template_that_fails_is_named(
    tmp_path: Path, template: Any, words: tuple[str, ...]
) -> None:
    """Holds: one line that names the file, the field, and what jinja says."""
    config: dict[str, Any] = {"chat_template": template}
    with pytest.raises(InputError) as caught:
        ChatTemplate.of(make_plan(tmp_path, config), config).render(TALK)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'tokenizer_config.json'}: chat_template")
    assert "\n" not in message
    for word in words:
        assert word in message, message
    plan = make_plan(tmp_path, config, jinja="{{ x.y.z }}")
    with pytest.raises(InputError, match="chat_template.jinja: cannot render"):
        ChatTemplate.of(plan, config).render(TALK)


def test_variables_may_have_any_name() -> None:
    assert render_chat("{{ where }}{{ template }}", TALK, where=1, template=2) == "12"


def test_no_template_and_bad_messages(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template.*--prompt"):
        ChatTemplate.of(make_plan(tmp_path, {}), {})
    template = ChatTemplate("{{ messages }}", {})
    with pytest.raises(InputError, match="no messages"):
        template.render([])
    with pytest.raises(InputError, match="message 1 has no 'role'"):
        template.render([{"role": "user", "content": ""}, {"content": "x"}])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": "one"}]}, "one"),
        (
            {"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            "one two",
        ),
        ({"content": None, "tool_calls": [{"name": "f"}]}, ""),
        ({"tool_calls": [{"name": "f"}]}, ""),
    ],
)
def test_content_is_text_or_parts_of_text(message: dict[str, Any], expected: str) -> None:
    """Holds generate(messages): what clients of chat models send."""
    template = ChatTemplate("{{ messages[0].content }}|{{ messages[0].role }}", {})
    given = {"role": "anyone", **message}
    assert template.render([given]) == f"{expected}|anyone"
    assert given == {"role": "anyone", **message}  # the caller's object is as it was


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, "content is missing"),
        ({"content": None}, "content is None, expected a text"),
        ({"content": 5}, "content is 5, expected a text"),
        ({"content": {"type": "text", "text": "x"}}, "content is .*expected a text or a list"),
        ({"content": ["x"]}, r"content\[0\] is 'x', expected"),
        ({"content": [{"type": "text"}]}, r"content\[0\] is .*expected"),
        (
            {"content": [{"type": "text", "text": ""}, {"type": "image_url", "image_url": "y"}]},
            r"content\[1\] is .*image_url.*a plan reads text alone",
        ),
        ({"content": [{"type": "text", "text": None}]}, r"content\[0\]: text is None"),
        ({"content": "\udcff"}, "content is not valid UTF-8"),
    ],
)
def test_content_of_another_kind_is_named(message: dict[str, Any], words: str) -> None:
    template = ChatTemplate("{{ messages }}", {})
    first = {"role": "system", "content": "x"}
    with pytest.raises(InputError, match=f"^message 1: {words}"):
        template.render([first, {"role": "user", **message}])


def test_our_own_templates_refuse_undefined_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jinja2

    from pdscope import codegen_templates

    loader = jinja2.DictLoader({"t.j2": "{% if x %}\n  {{ x }}\n{% endif %}\n"})
    codegen_templates._c_environment.cache_clear()
    monkeypatch.setattr(jinja2, "FileSystemLoader", lambda _: loader)
    try:
        assert render("t.j2", x=3) == "  3\n"
        with pytest.raises(jinja2.UndefinedError):
            render("t.j2")
    finally:
        codegen_templates._c_environment.cache_clear()
