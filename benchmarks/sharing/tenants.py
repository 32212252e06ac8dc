"""Many tenants with one base prompt: how much of it is computed and kept, and how soon they answer.

    python benchmarks/sharing/tenants.py MODEL [--threads N] [--tenants N] [--save FILE]

Each tenant has four adapters of its own, all activated behind the base prompt, and sends one
request with each: the base prompt, some private tokens, a short answer. First eight tenants ask
alone, one after the other; then all requests come at once. Three servers take the same requests:

    all      the prompt is published: everybody shares it
    tenant   it is not, and each tenant shares with itself alone
    none     nobody shares: each request has a namespace of its own (every fifth tenant asks)

`prompt computed` counts the prompt's tokens that were computed, in all, those for its publication
included. `blocks` are held when most sequences run, each of so many tokens for one group of layers;
`prompt` is the published prompt's part of them, `each` the rest for each sequence. `cold / later`
compares the first request without sharing with those of the second and later tenants.
"""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from zlib import crc32

from asking import ask, make_activated, publish, register
from driver import open_engine, parser, random_prompt, request, save, show

from loraplex.adapters.manifest import AdapterRef
from loraplex.engine.llm_engine import LLMEngine
from loraplex.engine.protocol import GenerateRequest, TokenEvent

SHARING = ("all", "tenant", "none")
HEADS = "sharing;requests;prompt computed;blocks;prompt;each;TTFT first;second;later;cold / later"
ADAPTERS_EACH = 4
INVOCATION = [7, 8]
RANK = 4


@dataclass(frozen=True)
class Sizes:
    tenants: int
    alone: int  # tenants that ask one after the other
    base: int  # tokens
    private: int
    outputs: int
    max_model_len: int


FULL = Sizes(tenants=50, alone=8, base=1000, private=16, outputs=8, max_model_len=1040)
QUICK = Sizes(tenants=6, alone=2, base=18, private=6, outputs=2, max_model_len=64)
NONE_SHARE = 5  # without sharing only every fifth tenant asks


@dataclass(frozen=True)
class Run:
    sharing: str
    requests: int
    prompt_tokens_computed: int  # of the base prompt
    blocks: int  # held when most sequences ran
    prompt_blocks: int  # of the published prompt, among them
    blocks_each: float  # the others, per sequence
    ttft_first: float  # seconds
    ttft_second: float
    ttft_later: float  # median
    tokens_per_second: float  # of prompts and answers, under the whole load


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tenants", type=int, help="50 unless told otherwise")
    arguments = options.parse_args()
    sizes = QUICK if arguments.quick else FULL
    tenants = arguments.tenants or sizes.tenants
    with tempfile.TemporaryDirectory() as folder:
        count = tenants * ADAPTERS_EACH
        folders = make_activated(arguments.model, Path(folder), count, RANK, INVOCATION)
        runs = []
        for sharing in SHARING:
            settings = {"max_model_len": sizes.max_model_len, "max_num_seqs": 16}
            with open_engine(arguments, **settings) as engine:
                runs.append(Load(engine, sharing, sizes, folders).run())
    show(
        [*HEADS.split(";"), "tokens/s"],
        [
            [
                run.sharing,
                run.requests,
                f"{run.prompt_tokens_computed:,}",
                f"{run.blocks:,}",
                f"{run.prompt_blocks:,}",
                f"{run.blocks_each:.1f}",
                *(f"{t * 1e3:.0f} ms" for t in (run.ttft_first, run.ttft_second, run.ttft_later)),
                f"{runs[-1].ttft_first / run.ttft_later:.1f}",
                f"{run.tokens_per_second:,.0f}",
            ]
            for run in runs
        ],
    )
    save(arguments, "tenants", [asdict(run) for run in runs])


class Load:
    """The requests of all tenants on one engine."""

    def __init__(self, engine: LLMEngine, sharing: str, sizes: Sizes, folders: list[Path]) -> None:
        self._engine = engine
        self._sharing = sharing
        self._sizes = sizes
        self._base = random_prompt(engine, sizes.base, seed=0)
        step = ADAPTERS_EACH * (NONE_SHARE if sharing == "none" else 1)
        self._adapters = {
            str(first): [register(engine, f, str(first)) for f in folders[first:][:ADAPTERS_EACH]]
            for first in range(0, len(folders), step)
        }  # by tenant

    def run(self) -> Run:
        engine, sizes = self._engine, self._sizes
        ask(engine, request("warm up", self._base[1:], 4, tenant="nobody"))
        before = engine.stats()
        if self._sharing == "all":
            publish(engine, self._base)
        ttfts = self._ask_alone()
        requests = [
            self._request(tenant, ref) for tenant, refs in self._adapters.items() for ref in refs
        ]
        start = time.perf_counter()
        blocks, prompt_blocks, blocks_each = self._ask_together(requests)
        seconds = time.perf_counter() - start
        num_private = (len(ttfts) + len(requests)) * sizes.private
        computed = engine.stats().computed_prompt_tokens - before.computed_prompt_tokens
        return Run(
            sharing=self._sharing,
            requests=len(requests),
            prompt_tokens_computed=computed - num_private,
            blocks=blocks,
            prompt_blocks=prompt_blocks,
            blocks_each=blocks_each,
            ttft_first=ttfts[0],
            ttft_second=ttfts[1],
            ttft_later=median(ttfts[1:]),
            tokens_per_second=len(requests)
            * (sizes.base + sizes.private + sizes.outputs)
            / seconds,
        )

    def _ask_alone(self) -> list[float]:
        """The first tenants' times to the first token, with one adapter each."""
        tenants = list(self._adapters.items())[: self._sizes.alone]
        return [ask(self._engine, self._request(t, refs[0], "alone")).ttft for t, refs in tenants]

    def _ask_together(self, requests: list[GenerateRequest]) -> tuple[int, int, float]:
        """Blocks held when most sequences ran: all, the published prompt's, and the rest each."""
        engine = self._engine
        for item in requests:
            engine.add(item)
        most, counts = 0, (0, 0, 0.0)
        while engine.has_work or engine.is_waiting:
            outputs = [event for event in engine.step() if isinstance(event, TokenEvent)]
            decoding = sum(event.finish_reason is None for event in outputs)
            if decoding > most:
                most, counts = decoding, self._count_blocks(decoding)
        return counts

    def _count_blocks(self, num_sequences: int) -> tuple[int, int, float]:
        stats = self._engine.stats()
        held = stats.num_blocks - stats.num_free_blocks
        prompt = sum(item.info.num_blocks for item in stats.base_prompts)
        return held, prompt, (held - prompt) / num_sequences

    def _request(self, tenant: str, ref: AdapterRef, kind: str = "load") -> GenerateRequest:
        """The same private tokens for the same adapter and kind."""
        name = f"{kind} {ref.adapter_id}"
        seed = crc32(name.encode())
        rest = random_prompt(self._engine, self._sizes.private - len(INVOCATION), seed)
        options = {"namespace": name} if self._sharing == "none" else {}
        return request(
            name,
            [*self._base, *INVOCATION, *rest],
            self._sizes.outputs,
            tenant=tenant,
            adapter=ref,
            **options,
        )


if __name__ == "__main__":
    main()
