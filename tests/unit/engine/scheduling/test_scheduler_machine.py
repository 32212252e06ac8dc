"""Requests come, fork, are preempted and aborted in any order: each answer is as if alone."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.engine.offloading import OffloadingHarness
from support.engine.scheduling import Answer, SchedulerHarness, Setup, generate_request, undisturbed

from loraplex.engine.protocol import GenerateRequest

# Just enough for the longest request alone: 24 tokens of prompt and 8 of output.
TIGHT = Setup(
    num_blocks=14, max_num_seqs=5, max_num_batched_tokens=9, max_logits_rows=4, load_delay=2
)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8)},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(-3, 3),
        "repetition_penalty": st.just(1.2),
        "min_tokens": st.just(1),
        "stop": st.sampled_from([("e",), ("t s", "n"), ("the cat",)]),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
    },
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.harness = self.make_harness()
        self.requests: dict[str, tuple[GenerateRequest, int]] = {}
        self.aborted: set[str] = set()

    def make_harness(self) -> SchedulerHarness:
        return SchedulerHarness(TIGHT)

    @rule(
        length=st.integers(1, 24),
        branch=st.integers(0, 24),
        family=st.integers(1, 2),
        adapter=st.sampled_from([None, "a", "b", "c"]),
        adapter_start=st.sampled_from([0, 0, 6, 8]),
        sampling=SAMPLING,
        priority=st.integers(0, 1),
        namespace=st.sampled_from(["x", "y"]),
    )
    def add(
        self, *, length: int, branch: int, family: int, adapter_start: int, **options: object
    ) -> None:
        prompt = [family if i < branch else 10 * family for i in range(length)]
        sampling = options.pop("sampling")
        assert isinstance(sampling, dict)
        request = generate_request(f"{len(self.requests)}", prompt, **options, **sampling)
        self.requests[request.request_id] = (request, adapter_start)
        self.harness.add(request, adapter_start)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.harness.scheduler.abort(request_id)
        self.aborted.add(request_id)
        alive = [*self.harness.scheduler.running, *self.harness.scheduler.waiting]
        assert request_id not in {sequence.request_id for sequence in alive}

    @rule(num_steps=st.integers(1, 3))
    def run_short_of_memory(self, num_steps: int) -> None:
        self.harness.take_memory()
        self.step(num_steps)
        self.harness.give_memory_back()

    @invariant()
    def books_balance(self) -> None:
        self.harness.kv.check_integrity()

    def teardown(self) -> None:
        self.harness.run(max_steps=400 + 40 * len(self.requests))
        self.harness.check_nothing_is_held()
        for request_id, (request, adapter_start) in self.requests.items():
            alone = undisturbed(request, adapter_start)
            for index, expected in enumerate(alone):
                found = self.harness.answers.get((request_id, index), Answer())
                if found.finish_reason is None:
                    assert request_id in self.aborted
                    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
                else:
                    assert found == expected


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestSchedulerMachine = SchedulerMachine.TestCase


class OffloadingMachine(SchedulerMachine):
    """The same above a host tier that is short of memory, too."""

    def make_harness(self) -> SchedulerHarness:
        return OffloadingHarness(TIGHT, num_host_slots=9)


OffloadingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestOffloadingMachine = OffloadingMachine.TestCase
