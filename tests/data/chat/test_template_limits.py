# SPDX-License-Identifier: Apache-2.0
"""Chat templates that would not end, or would fill the memory: one line instead."""

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jrl.data.chat import template_limits
from jrl.data.chat.templates import render_dialogue
from tests.tiny import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


MAP_NORESERVE = 0x4000  # Linux's; Python 3.13 has it in mmap
MARKED = "{% generation %}{% endgeneration %}"


def rendered(template, *, with_mask=False):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return render_dialogue(tokenizer, MESSAGES, tools=None, template_kwargs=None, with_mask=with_mask)


@pytest.mark.parametrize("body", ["", "x", "{% set a = i * j %}"])
def test_a_loop_that_does_not_end(monkeypatch, body):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}" + body + "{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"chat template took more than 0\.2 s"):
        rendered(loops)
    with pytest.raises(ValueError, match=r"chat template took more than 0\.2 s"):
        rendered(loops + MARKED, with_mask=True)
    assert sys.gettrace() is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10_000_000_000 }}",
        "{{ 'x' * 0xFFFFFFFFF }}",
        "{{ 'x' * (1e10 | int) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%-10000000000s' % 1 }}",
        "{{ '{0:>10000000000}'.format(1) }}",
        "{{ messages[0].content.ljust(10000000000) }}",
    ],
)
def test_ten_billion_characters(template):
    with pytest.raises(ValueError, match=r"chat template asks for too much: it names [\d,]{14}"):
        rendered(template)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory is not looked at")
def test_a_text_that_doubles(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_BYTES", 64 << 20)
    monkeypatch.setattr(template_limits, "_SECONDS_UNWATCHED", 0.0)
    doubling = (
        "{% set ns = namespace(s='x' * 1000000) %}{% for i in range(12) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}{{ ns.s | length }}"
    )
    with pytest.raises(
        ValueError, match="chat template asks for too much: it took more than 0 GiB of memory"
    ):
        rendered(doubling)


@pytest.mark.skipif(sys.platform != "linux", reason="address space without memory")
def test_other_threads_may_allocate_what_they_like():
    with template_limits.bounded_rendering(), ThreadPoolExecutor() as pool:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        pool.submit(mmap.mmap, -1, 64 << 30, flags=flags).result().close()


def test_threads_may_render_at_once():
    """With marks, of which transformers tracks those of one rendering at a time."""
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: rendered(template, with_mask=True), range(400)))
    finally:
        sys.setswitchinterval(switch)
    assert all(one == found[0] for one in found) and all(found[0][1])


@pytest.mark.parametrize("template", ["{{ '{%s: %5d} 20241022 100000000' % ('a', 1) }}", "{{ '-' * 50 }}"])
def test_ordinary_numbers_are_no_widths(template):
    rendered(template)


def test_a_text_that_is_too_long():
    with pytest.raises(ValueError, match="wrote 10,000,001 characters for one dialogue"):
        rendered("{{ 'x' * 5000000 }}{{ 'x' * 5000001 }}")
    with pytest.raises(ValueError, match="wrote 10,000,001 characters for one dialogue"):
        rendered("{{ 'x' * 5000000 }}{{ 'x' * 5000001 }}" + MARKED, with_mask=True)


@pytest.mark.parametrize("template", ["{{ 10 ** 10 ** 9 }}", "{% set n = messages|length ** 9 %}"])
def test_powers_are_refused(template):
    with pytest.raises(ValueError, match="raises a number to a power"):
        rendered(template)


def test_an_ordinary_template_is_not_touched():
    ids, _ = rendered("{% for m in messages %}**{{ m.content }}** {{ dict(**{'a': 'b'}).a }}{% endfor %}")
    assert tiny_tokenizer().decode(ids) == "**hi** b**ho** b"
