"""Tenants with more work than the machine can do, and what each of them is served."""

from collections import Counter
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import count

from support.engine.scheduling import SchedulerHarness, Setup, generate_request
from support.models.constant_model import ConstantModel

from loraplex.engine.scheduling.fair_share import FairPolicy
from loraplex.engine.scheduling.policy import SchedulingPolicy
from loraplex.engine.scheduling.service_ledger import price
from loraplex.engine.sequence import Sequence


@dataclass(frozen=True)
class Demand:
    """What one tenant asks for, again and again: request i takes the i-th of each, modulo."""

    weight: float = 1.0
    prompts: Listing[int] = (8,)  # lengths
    outputs: Listing[int] = (4,)
    adapters: Listing[str | None] = (None,)


class Town:
    """Steps a scheduler under the demands; each tenant is named by its place in the list.

    Prompts of different tenants and requests share no prefix, so that each is computed.
    """

    def __init__(
        self,
        demands: Listing[Demand],
        setup: Setup,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.demands = demands
        self.policy = policy or FairPolicy()
        self.harness = SchedulerHarness(setup, policy=self.policy)
        self.harness.model = ConstantModel()
        self.stakes: Counter[str] = Counter()  # most that a tenant's running work can be charged
        self._requests = count()
        self._asked: Counter[str] = Counter()
        for index, demand in enumerate(demands):
            self.policy.ledger.set_weight(f"{index}", demand.weight)

    def ask(self, index: int, times: int = 1) -> list[Sequence]:
        return [self._ask(index) for _ in range(times)]

    def keep_backlogged(self, indices: Listing[int]) -> None:
        """Sees to it that of each of these tenants more requests wait than a step can begin."""
        depth = self.harness.setup.max_num_seqs + 1
        waiting = Counter(sequence.tenant for sequence in self.harness.scheduler.waiting)
        for index in indices:
            self.ask(index, max(0, depth - waiting[f"{index}"]))

    def step(self) -> dict[str, int]:
        """One step; returns the tokens that it computed, per tenant."""
        output = self.harness.scheduler.schedule()
        self._note_stakes()
        computed: Counter[str] = Counter()
        for item in output.scheduled:
            computed[item.sequence.tenant] += item.num_tokens
        self.harness.scheduler.update(output, self.harness.model.execute(output.step))
        return computed

    def service(self, index: int) -> float:
        """What a tenant was served, by weight: its counter without lifts."""
        service = self.policy.ledger.of(f"{index}")
        served = price(service.prefill_tokens, service.decode_tokens, service.loaded_bytes)
        return served / self.demands[index].weight

    def stake(self, index: int) -> float:
        return self.stakes[f"{index}"] / self.demands[index].weight

    def _ask(self, index: int) -> Sequence:
        tenant, demand, turn = f"{index}", self.demands[index], self._asked[f"{index}"]
        self._asked[tenant] += 1
        serial = next(self._requests)
        prompt = [serial % 11, serial // 11 % 11, serial // 121 % 11]
        length = demand.prompts[turn % len(demand.prompts)]
        request = generate_request(
            f"{tenant}-{serial}",
            (prompt + [2] * length)[:length],
            tenant=tenant,
            namespace=f"{tenant}-{serial}",
            adapter=demand.adapters[turn % len(demand.adapters)],
            max_tokens=demand.outputs[turn % len(demand.outputs)],
            ignore_eos=True,
        )
        return self.harness.add(request)

    def _note_stakes(self) -> None:
        stakes: Counter[str] = Counter()
        for sequence in self.harness.scheduler.running:
            size = 0 if sequence.adapter is None else self.harness.slots.size_of(sequence.adapter)
            left = (sequence.sampling.max_tokens or 0) - sequence.num_output_tokens
            stakes[sequence.tenant] += price(sequence.num_tokens, left, size)
        self.stakes |= stakes
