"""Three tenants on one engine: a prompt for all of them, an adapter each, floors and weights.

    python examples/many_tenants.py [MODEL]

The HTTP server has one tenant so far. This is how a program of yours has many: it starts an engine
process and talks to it through `EngineClient`, as the server does. MODEL is a Hugging Face folder;
unless told otherwise it is the one that `examples/prepare_model.py` makes, which the adapters are
for.
"""

import argparse
import asyncio
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loraplex.adapters.manifest import Activation, AdapterRef, Folder
from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.protocol import (
    BasePromptRef,
    EngineStats,
    GenerateRequest,
    PublishBasePrompt,
    RegisterAdapter,
    TenantShare,
    Usage,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.supervisor import EngineSupervisor
from loraplex.engine.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
MODEL = Path("~/.loraplex/models/gemma-3-270m").expanduser()
RULES = (
    "Saltmarsh Supply sells lamps, ropes and charts. It answers in plain words and in order. " * 8
)
SHARES = [
    TenantShare("north", floor=600, weight=3.0),  # blocks that are always its; thrice the turns
    TenantShare("south", floor=300),
    TenantShare("west", ceiling=900),  # never more than this
]


@dataclass(frozen=True)
class Question:
    tenant: str
    adapter: str
    text: str


QUESTIONS = [
    Question("north", "json", "Where is my order 4821? It is a lamp for Mara Lind in Oslo."),
    Question("south", "support", "My rope arrived wet. What now?"),
    Question("west", "sql", "How many orders went to Oslo?"),
]


class Shop:
    """What the three tenants have in common, and what each asks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = BasePromptRef(prompt_id="rules", version=1)
        self._adapters: dict[str, AdapterRef] = {}  # by name

    async def prepare(self, client: EngineClient) -> bool:
        """Tells a new engine all it has to know; called again if the engine is restarted."""
        await client.publish_base_prompt(
            PublishBasePrompt(
                request_id=uuid.uuid4().hex,
                prompt_id=self._rules.prompt_id,
                version=self._rules.version,
                token_ids=self._tokenizer.encode(RULES),
            )
        )
        for question in QUESTIONS:
            info = await client.register_adapter(
                RegisterAdapter(
                    request_id=uuid.uuid4().hex,
                    tenant=question.tenant,
                    adapter_id=question.adapter,
                    source=Folder(str(HERE / "adapters" / question.adapter)),
                    activation=Activation.AFTER_PROMPT,  # so it shares the rules with the others
                    base_prompt=self._rules,
                )
            )
            self._adapters[question.adapter] = info.ref
        await client.set_tenant_shares(SHARES)
        return True

    async def ask(self, client: EngineClient, question: Question) -> tuple[str, Usage]:
        """One tenant's answer from its adapter, behind the rules."""
        chat = self._tokenizer.render_chat([{"role": "user", "content": question.text}])
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            tenant=question.tenant,
            namespace=uuid.uuid4().hex,  # your server keeps one for each tenant and tells nobody
            prompt_token_ids=self._tokenizer.encode(chat, add_special_tokens=False),
            sampling=SamplingParams(
                temperature=0, max_tokens=64, stop=self._tokenizer.default_stop
            ),
            adapter=self._adapters[question.adapter],
        )
        text, usage = "", Usage(0, 0, 0)
        async for event in client.generate(request):
            text += event.text
            usage = event.usage or usage
        return text.strip(), usage


async def ask_all(client: EngineClient, shop: Shop) -> None:
    await client.wait_ready()
    answers = await asyncio.gather(*(shop.ask(client, question) for question in QUESTIONS))
    console = Console(highlight=False)
    for question, (text, usage) in zip(QUESTIONS, answers, strict=True):
        console.print(f"{question.tenant} asks {question.adapter}: {text}", markup=False)
        console.print(
            f"  {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them shared"
        )
    stats = await client.stats()
    for prompt in stats.base_prompts:
        console.print(f"The rules lie in memory once: {prompt.info.num_blocks} blocks.")
    console.print(table(stats))


def table(stats: EngineStats) -> Table:
    """What each tenant may have, has, and was served."""
    heads = ("tenant", "floor", "ceiling", "weight", "held", "cached", "computed", "service")
    found = Table(*heads, box=None)
    for tenant in stats.tenants:
        limits = (tenant.floor, tenant.ceiling, tenant.weight)
        now = (tenant.held_blocks, tenant.cached_blocks, tenant.prefill_tokens)
        found.add_row(tenant.tenant, *map(str, (*limits, *now)), f"{tenant.service:.0f}")
    return found


async def main(model: Path) -> None:
    shop = Shop(Tokenizer.from_folder(model))
    with tempfile.TemporaryDirectory() as folder:
        client = EngineClient(f"ipc://{folder}/engine.sock", shop.prepare)
        config = EngineConfig(model=str(model), adapter_store=f"{folder}/adapters")
        await client.start()
        engine = asyncio.create_task(EngineSupervisor(config, client).run())
        asking = asyncio.create_task(ask_all(client, shop))
        try:
            done, _ = await asyncio.wait([engine, asking], return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()  # an engine that ends has refused to start, and says why
        finally:
            asking.cancel()
            engine.cancel()
            await asyncio.gather(engine, asking, return_exceptions=True)
            await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    asyncio.run(main(parser.parse_args().model))
