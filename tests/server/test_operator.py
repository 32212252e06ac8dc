"""What an operator may allow: new adapters, pages of other origins, templates of callers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.models.tokenizers import write_tokenizer
from support.server import KEY, Server, running_server

pytestmark = pytest.mark.server

OPERATOR = {"authorization": "Bearer the-operator's-key"}
TENANT = {"authorization": f"Bearer {KEY}"}
ORIGIN = "https://example.org"
CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def open_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = [
        f"--model={model_folder}",
        "--num-threads=1",
        "--kv-cache-memory=32MiB",
        "--operator-key=the-operator's-key",
        f"--cors-origins={ORIGIN},https://example.com",
        "--allow-chat-templates",
    ]
    with running_server(tmp_path_factory.mktemp("home"), *options) as server:
        yield server


@pytest.fixture
def http(open_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_server.url, timeout=60) as http:
        yield http


def names(http: httpx.Client) -> set[str]:
    return {model["id"] for model in http.get("/v1/models", headers=TENANT).json()["data"]}


def test_the_operator_loads_and_unloads_adapters(
    http: httpx.Client, adapters: dict[str, Path]
) -> None:
    load = {"lora_name": "red", "lora_path": str(adapters["red"])}

    loaded = http.post("/v1/load_lora_adapter", json=load, headers=OPERATOR)
    again = http.post("/v1/load_lora_adapter", json=load, headers=OPERATOR)
    answer = http.post("/v1/chat/completions", json={**CHAT, "model": "red"}, headers=TENANT)
    with_it = names(http)
    unloaded = http.post("/v1/unload_lora_adapter", json={"lora_name": "red"}, headers=OPERATOR)

    assert [r.status_code for r in (loaded, again, answer, unloaded)] == [200, 409, 200, 200]
    assert loaded.text.startswith("Success: ")
    assert (with_it, names(http)) == ({"base", "red"}, {"base"})
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "red"}, headers=OPERATOR)
    assert gone.status_code == 404


def test_an_adapters_own_template_is_used_and_its_tokenizer_is_told_of(
    http: httpx.Client, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(adapters["red"], tmp_path / "own")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_tokenizer(tmp_path / "other", vocab_size=300)
    shutil.copy(tmp_path / "other" / "tokenizer.json", folder)
    load = {"lora_name": "own", "lora_path": str(folder)}

    loaded = http.post("/v1/load_lora_adapter", json=load, headers=OPERATOR)
    answer = http.post("/v1/chat/completions", json={**CHAT, "model": "own"}, headers=TENANT)
    base = http.post("/v1/chat/completions", json=CHAT, headers=TENANT)
    card = http.get("/v1/models/own", headers=TENANT).json()
    http.post("/v1/unload_lora_adapter", json={"lora_name": "own"}, headers=OPERATOR)

    tokens = [reply.json()["usage"]["prompt_tokens"] for reply in (answer, base)]
    assert loaded.status_code == 200
    assert tokens[0] < 6 < tokens[1]
    assert (card["chat_template"], len(card["notes"])) == ("adapter", 1)


def test_a_tenant_may_not(http: httpx.Client, adapters: dict[str, Path]) -> None:
    load = {"lora_name": "red", "lora_path": str(adapters["red"])}

    refused = http.post("/v1/load_lora_adapter", json=load, headers=TENANT)

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "x", "lora_path": "relative"}, 400),
        ({"lora_name": "no name", "lora_path": "/x"}, 400),
        ({"lora_name": "x"}, 400),
        ({"lora_name": "x", "lora_path": "/there/is/none"}, 422),
    ],
)
def test_what_is_no_adapter_is_refused(
    http: httpx.Client, body: dict[str, str], status: int
) -> None:
    assert http.post("/v1/load_lora_adapter", json=body, headers=OPERATOR).status_code == status


def test_a_page_of_an_allowed_origin_may_ask_first_and_then_call(http: httpx.Client) -> None:
    ask = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    preflight = http.options("/v1/chat/completions", headers=ask)
    answer = http.get("/v1/models", headers={**TENANT, "origin": ORIGIN})
    stranger = http.get("/v1/models", headers={**TENANT, "origin": "https://evil.example"})

    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in stranger.headers


def test_a_caller_may_bring_a_template_which_runs_within_limits(http: httpx.Client) -> None:
    def ask(template: str) -> httpx.Response:
        body = {**CHAT, "chat_template": template}
        return http.post("/v1/chat/completions", json=body, headers=TENANT)

    own = ask("{{ messages[0].content }}")
    endless = ask("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    broken = ask("{% for %}")

    assert own.json()["usage"]["prompt_tokens"] < 6
    assert (endless.status_code, broken.status_code) == (400, 400)
    assert "too much time" in endless.text


def test_a_key_may_come_in_a_header_of_its_own(http: httpx.Client) -> None:
    right = http.get("/v1/models", headers={"x-api-key": KEY})
    wrong = http.get("/v1/models", headers={"x-api-key": "wrong"})

    assert (right.status_code, wrong.status_code) == (200, 401)


def test_a_load_balancer_finds_what_it_asks_for(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
