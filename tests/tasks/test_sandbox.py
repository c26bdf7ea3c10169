"""Chat templates render in another process as in this one, and cannot take time or memory from it."""

import os
import signal
import time

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from qrl.engine import hf
from qrl.errors import BadInput
from qrl.tasks import prompt, sandbox
from qrl.tracking import sources

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  1 + 1? «é😀»\n<b>&</b> \u2028"}]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages[::-1] %}{% set n.i = n.i + 1 %}{% endfor %}{{n.i}}",
    "macro": "{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "values": "{{ bos_token }}{{ flag }}{{ number + 1 }}{{ none is none }}{% if not tools %}no tools{% endif %}",
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "date": "{{ strftime_now('%Y') }}",
    "blank lines": "\n{%- for m in messages -%}\n {{ m.role }}\n{%- endfor %}\n{# a comment #}\n",
    "filters": "{{ messages | map(attribute='role') | join(', ') | upper }}{{ missing | default('none') }}",
    "missing": "[{{ missing }}]",
    "undefined": "{{ documents is none }}{{ tools is defined }}{{ add_generation_prompt }}",
}
HOSTILE = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10000000000 }}",
    "a long prompt": "{{ 'a' * 9000000 }}",
    "a long list": "{{ messages * 1000000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested source": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "a long source": "a" * (50 << 20),
    "an attribute of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "no template": "{% if %}",
    "an error of its own": "{{ raise_exception('system role not supported') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_same_in_both_processes(name, tiny_checkpoint):
    tokens = hf.tokenizer(tiny_checkpoint)
    tokens.chat_template = TEMPLATES[name]
    values = {"bos_token": "<s>", "flag": True, "number": 2}
    expected, _ = render_jinja_template([CHAT], chat_template=TEMPLATES[name], add_generation_prompt=True, **values)
    assert sandbox.render(tokens, CHAT, values) == expected[0]
    assert expected[0] == tokens.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False, **values)


@pytest.mark.process
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_a_sentence_within_seconds(name, tiny_checkpoint, monkeypatch):
    tokens = hf.tokenizer(tiny_checkpoint)
    tokens.chat_template = HOSTILE[name]
    monkeypatch.setattr(sandbox, "CPU_S", 1.0)
    started = time.monotonic()
    with pytest.raises(BadInput, match="chat template fails on a single question") as refused:
        prompt.render(tokens, "1 + 1?", "plain")
    assert len(str(refused.value)) < 500 and time.monotonic() - started < 60


def test_a_process_that_was_killed_is_replaced(tiny_checkpoint):
    tokens = hf.tokenizer(tiny_checkpoint)
    expected = prompt.render(tokens, "1 + 1?", "plain")
    process = sandbox._processes[os.getpid()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert prompt.render(tokens, "1 + 1?", "plain") == expected


def test_results_depend_on_the_code_that_renders():
    found = {file.name for file in sources.files("evaluate")}
    assert {"sandbox.py", "chat_templates.py"} <= found


def test_variables_are_those_that_a_template_does_not_set():
    source = (
        "{{ thinking }}{% set a = 1 %}{{ a }}{{ messages }}{{ strftime_now('%Y') }}{% for b in range(2) %}{% endfor %}"
    )
    assert sandbox.variables(source) == {"thinking", "messages"}
    with pytest.raises(TemplateError):
        sandbox.variables("{% if %}")


@pytest.mark.process
def test_the_process_ends_with_the_one_that_it_serves(tmp_path):
    import subprocess
    import sys

    import psutil

    lines = [
        "import os, signal",
        "from qrl.tasks import sandbox",
        "sandbox.variables('{{ messages }}')",
        "print(sandbox._processes[os.getpid()].pid, flush=True)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    for _ in range(100):
        if not psutil.pid_exists(int(done.stdout)):
            return
        time.sleep(0.1)
    raise AssertionError("an orphan is left")
