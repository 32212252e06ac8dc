"""The names of the engine are made of the field's words, or of ones that the glossary explains."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"[A-Z]{2,}(?=[A-Z][a-z]|\b)|[A-Z][a-z0-9]*")
# Words of the field, and of programs in general, that need no explanation here.
PLAIN = """
    abort attention bad batch beat bounds broken buffers cached call capacity capture cause chat
    check checker client code commands compiler config content context copy cost costs cuda
    decode demand detector detokenizer disk drafter embedding encoding ended error event failed
    failure fair fcfs feed fetch finish flat folder format forward found full gated generate get
    graph graphs group hang header hello hidden host idle in info input integral invalid key
    keys layer layout limits linear llm loaded logits logprob logprobs long lookup lower lru
    manager map mask memory message meter metering metrics model move moves norm offsets output
    packed paged params parts phase pinned place placer plan planner pool position processes
    progress provider publish published question queue reader reason recompute record ref
    reference refusal refused register registered registry rejected restart retire retired rms
    row run runner sampled sampler sampling scheduled scheduler scheduling scope seeds server
    service set shares size sliding socket staging stand start started state stats status step
    stop storage supervisor takes template terms text tokenizer too transfers unavailable
    unregister unregistered unsupported update uploads usage waiting window
"""


def glossary_words() -> set[str]:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {word for term in terms for word in re.findall(r"[a-z0-9]+", term.lower())}


def public_classes() -> Iterator[str]:
    for path in (ROOT / "engine").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name


def test_every_public_class_of_the_engine_is_named_in_words_that_are_explained() -> None:
    known = glossary_words() | set(PLAIN.split())
    strange = {
        name: words
        for name in public_classes()
        if (words := [w for w in WORD.findall(name) if not {w.lower(), w.lower()[:-1]} & known])
    }

    assert strange == {}


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = [term.lower() for term in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)[1:]]
    terms = [term for term in terms if not term.startswith("---")]

    assert terms == sorted(terms)
