"""What one request for a form of answers can cost: grammars that take long to compile, or whose first mask does, are refused."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from json_policy import EOS, PIECES, policy, tokenizer
from running import RunningServer

from paceline import Engine
from paceline.config import EngineConfig
from paceline.engine.grammar import Grammars
from paceline.structured_outputs import Grammar

NESTED = 1000


def doubled(name: str) -> str:
    """A grammar in Lark's syntax of 2^40 letters, by terminals (a capital) or by rules."""
    return f"start: {name}0\n" + "\n".join(f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(40)) + f'\n{name}40: "a"'


HARD = {
    "counted": {"regex": "((a{1,1000}){1,1000}){1,1000}"}, "exactly counted": {"regex": "(a{1000}){1000}"},
    "counted choice": {"regex": "(a|b|ab){1,100000}"}, "exponential": {"regex": "(a|b)*a(a|b){30}"},
    "intersection": {"grammar": "start: A\nA: /(.*a.{20})/ & /(.*b.{20})/ & ~/(.*c.{20})/"},
    "doubled terminals": {"grammar": doubled("T")}, "doubled rules": {"grammar": doubled("r")},
    "choices": {"choice": [f"a{i}" for i in range(7000)]}, "alternation": {"regex": "|".join(f"a{i}" for i in range(9000))},
    "alternatives": {"json": {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(900)]}},
    "remainders": {"json": {"type": "integer", "multipleOf": 999983}},
    "many remainders": {"json": {"prefixItems": [{"type": "integer", "multipleOf": 9000 + i} for i in range(50)]}},
    "escaped": {"json": '{"type": "integer", "multipl\\u0065Of": 999983}'},
    "product of remainders": {"json": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}},
    "deep schema": {"json": '{"type": "array", "items": ' * NESTED + "{}" + "}" * NESTED},
    "deep regex": {"regex": "(" * NESTED + "a" + ")*" * NESTED},
    "deep rule": {"grammar": f"start: {'(' * 5000}\"a\"{')' * 5000}"},
    "deep ebnf": {"grammar": f"root ::= {'(' * 5000}\"a\"{')' * 5000}"},
    "doubled references": {"json": {"$ref": "#/$defs/d0", "$defs": {"d30": {}, **{
        f"d{i}": {"properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}} for i in range(30)}}}},
}
REFUSED = {"intersection", "doubled terminals", "remainders", "many remainders", "escaped", "product of remainders",
           "deep schema", "deep regex", "deep rule", "deep ebnf"}


@pytest.fixture(scope="module")
def server():
    engine = Engine(policy(), tokenizer(), "suffix", "off", EngineConfig(kv_tokens=4096, max_batch=8, profile=False))
    with RunningServer(engine) as running:
        yield running


def post(server: RunningServer, form: dict) -> httpx.Response:
    return httpx.post(f"{server.address}/v1/completions", timeout=120,
                      json={"model": "tiny", "prompt": [5, 9], "max_tokens": 8, "structured_outputs": form})


@pytest.mark.parametrize("name", HARD)
def test_a_hard_grammar_takes_little_time_and_memory(server, name):
    """It is compiled or refused, and what comes of it is an answer or an error of one line."""
    post(server, {"regex": "ab"})  # the library is loaded
    began, before = time.process_time(), num_bytes()
    answer = post(server, HARD[name])
    assert time.process_time() - began < 5 and num_bytes() - before < 400 << 20
    assert answer.status_code in (200, 400), answer.text
    if name in REFUSED:
        assert answer.status_code == 400
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] == "structured_outputs" and "\n" not in error["message"] and len(error["message"]) < 400


def num_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_others_go_on_while_hard_grammars_are_compiled(server):
    forms = [{"choice": [f"{letter}{i}" for i in range(6000)]} for letter in "abcdef"]
    asked = [threading.Thread(target=post, args=(server, form)) for form in forms]
    for thread in asked:
        thread.start()
    began = time.monotonic()
    assert httpx.get(f"{server.address}/health").status_code == 200
    assert post(server, {"regex": "ab"}).status_code == 200
    assert time.monotonic() - began < 20
    for thread in asked:
        thread.join()


def test_usual_forms_are_compiled():
    grammars = Grammars(tokenizer(), len(PIECES), (EOS,))
    formats = ["email", "uri", "date-time", "hostname", "ipv6", "uuid"]
    schema = {"type": "object", "required": ["a", "price", "rows"], "properties": {
        **{f"p{i}": {"type": "string", "format": formats[i % 6], "maxLength": 200} for i in range(30)},
        "a": {"enum": [f"value {i}" for i in range(2000)]}, "price": {"type": "number", "multipleOf": 0.01, "minimum": 0},
        "minutes": {"type": "integer", "multipleOf": 15}, "steps": {"type": "integer", "multipleOf": 1024},
        "rows": {"type": "array", "minItems": 1, "maxItems": 1000, "items": {"type": "array", "items": {"type": "number"}}}}}
    for kind, text in (("json", json.dumps(schema)), ("choice", json.dumps([f"city {i}" for i in range(1500)])),
                       ("regex", r"(\w{1,40} ){1,50}[0-9]{1,20}(\.[0-9]{2})?"), ("regex", ".{0,4000}")):
        grammars.check(Grammar(kind, text))


def test_long_grammars_are_not_all_kept():
    """A compiled grammar can take hundreds of megabytes."""
    grammars = Grammars(tokenizer(), len(PIECES), (EOS,))
    for i in range(40):
        grammars.check(Grammar("regex", f"a{i}"))
    assert len(grammars._compiled) == 32
    for letter in "abc":
        grammars.check(Grammar("regex", "|".join(f"{letter}{i}" for i in range(15_000))))
    assert sum(len(known.text) for known in grammars._compiled) < 256 << 10
