"""Asks every model of a running server the same question at once, so that one batch answers.

    python examples/ask_all.py "Where is my order 4821? It is a lamp for Mara Lind in Oslo."

The server and its key are read from OPENAI_BASE_URL and OPENAI_API_KEY, as the server prints them.
"""

import argparse
import asyncio
import re

import httpx
from openai import AsyncOpenAI
from rich.console import Console
from rich.text import Text

METRICS_MAX_AGE = 1.1  # seconds, and a little more
STEPS = re.compile(r"^loraplex:steps_total\{.*\} (\S+)$", re.MULTILINE)


async def ask(client: AsyncOpenAI, model: str, question: str, max_tokens: int) -> tuple[str, int]:
    """-> (answer, tokens in it)"""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
    )
    return answer.choices[0].message.content or "", answer.usage.completion_tokens


async def engine_steps(client: AsyncOpenAI) -> int:
    """Forward passes that the engine has made so far."""
    await asyncio.sleep(METRICS_MAX_AGE)
    async with httpx.AsyncClient() as http:
        metrics = await http.get(str(client.base_url.join("/metrics")))
    found = STEPS.search(metrics.text)
    return int(float(found[1])) if found else 0


async def main(question: str, max_tokens: int) -> None:
    client = AsyncOpenAI()
    models = [model.id async for model in client.models.list()]
    before = await engine_steps(client)
    answers = await asyncio.gather(*(ask(client, m, question, max_tokens) for m in models))
    steps = await engine_steps(client) - before
    console = Console(highlight=False)
    for model, (text, _) in zip(models, answers, strict=True):
        console.print(
            Text(f"{model:>8}  ", style="bold") + Text(text.strip().replace("\n", "\n" + " " * 10))
        )
    total = sum(tokens for _, tokens in answers)
    console.print(
        f"\n{total} tokens for {len(models)} models in {steps} forward passes", style="dim"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    asyncio.run(main(options.question, options.max_tokens))
