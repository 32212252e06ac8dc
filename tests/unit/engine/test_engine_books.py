"""Tenants, adapters, base prompts, budgets, forks, offloads, aborts and restarts in any order: each
answer is as if alone, each tenant reads only what it may, and the books balance after every step.

That nobody reads another's blocks is checked by the toy model at every read."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.engine.kv import adapter_ref
from support.engine.scheduling import Answer, Setup, generate_request, undisturbed
from support.engine.whole_engine import WholeEngine
from support.models.toy_adapters import FRONTIERS, TENANTS

from loraplex.adapters.manifest import Activation, AdapterRef, Folder
from loraplex.engine.errors import RequestRejected
from loraplex.engine.kv.budgets import OPERATOR
from loraplex.engine.kv.storage.groups import KVGroup
from loraplex.engine.kv.storage.layer_state import FullAttention, SlidingWindow
from loraplex.engine.protocol import (
    BasePromptRef,
    FailureCode,
    FinishReason,
    GenerateRequest,
    PublishBasePrompt,
    RegisterAdapter,
    RetireBasePrompt,
    UnregisterAdapter,
)
from loraplex.engine.sequence import Sequence

# A little more than the longest request alone: 12 tokens of base prompt, 24 and 20 of output.
TIGHT = Setup(
    num_blocks=28, max_num_seqs=5, max_num_batched_tokens=9, max_logits_rows=4, load_delay=2
)
ADAPTERS = st.builds(adapter_ref, st.sampled_from([*FRONTIERS]), st.sampled_from(TENANTS))
REQUESTS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 24),
        "branch": st.sampled_from([24, 24, 14, 7, 0]),
        "family": st.sampled_from([1, 1, 2]),
        "tenant": st.sampled_from(["x", "x", "y", "z"]),
        "adapter": st.sampled_from([None, None, *FRONTIERS]),
        "max_tokens": st.integers(1, 20),
        "seed": st.integers(-3, 3),
    },
    optional={
        "priority": st.just(-1),
        "n": st.integers(2, 3),
        "temperature": st.just(1.0),
        "repetition_penalty": st.just(1.2),
        "ignore_eos": st.just(True),
        "stop": st.sampled_from([("e",), ("t s", "n"), ("the cat",)]),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
    },
)


@dataclass(frozen=True)
class Asked:
    request: GenerateRequest
    sequence: Sequence
    frontier: int


class EngineMachine(RuleBasedStateMachine):
    setup = TIGHT

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.whole = WholeEngine(
            self.setup, num_host_slots=12, folder=Path(self.folder.name), disk_bytes=4000
        )
        self.asked: dict[str, Asked] = {}
        self.aborted: set[str] = set()
        self.published: list[BasePromptRef] = []
        self.is_shared_out = False
        self.num_restarts = 0

    @initialize(length=st.integers(0, 12))
    def begin_with_a_base_prompt(self, length: int) -> None:
        if length > 0:
            self.publish(length, 1, version=0)

    @rule(wanted=st.lists(REQUESTS, min_size=1, max_size=3), num_steps=st.integers(0, 20))
    def add(self, wanted: list[dict[str, Any]], num_steps: int) -> None:
        for fields in wanted:
            self.ask(fields)
        self.step(num_steps)

    @precondition(lambda self: self.published)
    @rule(fields=REQUESTS, data=st.data(), num_steps=st.integers(0, 20))
    def add_behind_a_base_prompt(
        self, fields: dict[str, Any], data: st.DataObject, num_steps: int
    ) -> None:
        self.ask(fields, data.draw(st.sampled_from(self.published)))
        self.step(num_steps)

    def ask(self, fields: dict[str, Any], base_prompt: BasePromptRef | None = None) -> None:
        options = dict(fields)
        length, branch, family = (options.pop(name) for name in ("length", "branch", "family"))
        name = options.pop("adapter")
        request = generate_request(
            f"{len(self.asked)}",
            [family if i < branch else 10 * family for i in range(length)],
            namespace=f"of {fields['tenant']}",
            base_prompt=base_prompt,
            **options,
        )
        if name is not None:
            adapter = adapter_ref(name, fields["tenant"])
            request = msgspec.structs.replace(request, adapter=adapter)
        try:
            sequence = self.whole.add(request)
        except RequestRejected as rejection:
            self.is_refused_with(
                rejection,
                FailureCode.BUDGET_EXCEEDED,
                FailureCode.BASE_PROMPT_NOT_FOUND,  # it was given up, or retired
                FailureCode.ADAPTER_NOT_FOUND,  # it was unregistered
            )
        else:
            self.asked[request.request_id] = Asked(request, sequence, FRONTIERS.get(name, 0))

    @rule(num_steps=st.integers(1, 12), is_disk_stalled=st.booleans())
    def step(self, num_steps: int, is_disk_stalled: bool = False) -> None:
        for _ in range(num_steps):
            self.whole.step(is_disk_stalled=is_disk_stalled)

    @rule(ref=ADAPTERS)
    def unregister(self, ref: AdapterRef) -> None:
        """It is gone once nobody uses it any more."""
        self.whole.engine.submit(UnregisterAdapter(request_id="out", adapter=ref))

    @rule(ref=ADAPTERS, activation=st.sampled_from(Activation), data=st.data())
    def register(self, ref: AdapterRef, activation: Activation, data: st.DataObject) -> None:
        """To act from elsewhere, or behind another prompt, if it has been unregistered."""
        base_prompt = data.draw(st.sampled_from([None, *self.published]))
        self.whole.engine.submit(
            RegisterAdapter(
                request_id="in",
                tenant=ref.tenant,
                adapter_id=ref.adapter_id,
                source=Folder("toy"),
                activation=activation,
                base_prompt=base_prompt,
            )
        )

    @precondition(lambda self: len(self.asked) > 8 * (self.num_restarts + 1))
    @rule(is_orderly=st.booleans())
    def restart(self, is_orderly: bool) -> None:
        """Only the disk survives."""
        self.num_restarts += 1
        self.whole.restart(is_orderly=is_orderly)
        self.aborted |= self.asked.keys()
        self.published = []

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.whole.engine.abort(request_id)
        self.aborted.add(request_id)
        self.whole.check_books()

    @precondition(lambda self: len(self.published) < 2)
    @rule(length=st.integers(1, 12), family=st.integers(1, 2), version=st.integers(1, 9))
    def publish_another(self, length: int, family: int, version: int) -> None:
        self.publish(length, family, version)

    def publish(self, length: int, family: int, version: int) -> None:
        ref = BasePromptRef(prompt_id=f"p{length} {family}", version=version)
        command = PublishBasePrompt(
            request_id=f"publish {ref}",
            prompt_id=ref.prompt_id,
            version=version,
            token_ids=[family] * length,
        )
        try:
            self.whole.engine.submit(command)
        except RequestRejected as rejection:
            codes = FailureCode.BUDGET_EXCEEDED, FailureCode.INVALID_REQUEST
            self.is_refused_with(rejection, *codes)
        else:
            if ref not in self.published:
                self.published.append(ref)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.published))
        self.published.remove(ref)
        self.retire_prompt(ref)

    def retire_prompt(self, ref: BasePromptRef) -> None:
        command = RetireBasePrompt(
            request_id=f"retire {ref}", prompt_id=ref.prompt_id, version=ref.version
        )
        try:
            self.whole.engine.submit(command)
        except RequestRejected as rejection:  # it was given up before it was computed
            self.is_refused_with(rejection, FailureCode.BASE_PROMPT_NOT_FOUND)

    @rule(
        tenant=st.sampled_from(TENANTS),
        floor=st.integers(0, 14),
        room=st.none() | st.integers(0, 20),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
    )
    def set_share(self, tenant: str, floor: int, room: int | None, weight: float) -> None:
        self.is_shared_out = True
        try:
            self.whole.set_share(tenant, floor, None if room is None else floor + room, weight)
        except RequestRejected as rejection:
            self.is_refused_with(rejection, FailureCode.INVALID_REQUEST)

    @rule(borrowing=st.lists(REQUESTS, min_size=3, max_size=3), fields=REQUESTS)
    def claim_a_floor(self, borrowing: list[dict[str, Any]], fields: dict[str, Any]) -> None:
        """A tenant has work and a floor that others have borrowed."""
        for other in borrowing:
            self.ask(other | {"tenant": "x"})
        self.step(3)
        self.set_share("z", 14, None, 1.0)
        self.ask(fields | {"tenant": "z"})
        self.step(1)

    @staticmethod
    def is_refused_with(rejection: RequestRejected, *codes: FailureCode) -> None:
        assert rejection.code in codes

    def teardown(self) -> None:
        try:
            self.all_comes_to_its_end()
        finally:
            self.whole.engine.close()
            self.folder.cleanup()

    def all_comes_to_its_end(self) -> None:
        self.whole.run(max_steps=500 + 80 * len(self.asked))
        for ref in self.published:
            self.retire_prompt(ref)
        self.whole.run(max_steps=5)
        self.nothing_is_held()
        if not self.is_shared_out:
            assert all(asked.sequence.num_preemptions <= 2 for asked in self.asked.values())
        for request_id, asked in self.asked.items():
            self.answer_is_as_if_alone(request_id, asked)

    def nothing_is_held(self) -> None:
        self.whole.check_books()
        assert self.whole.kv.pool.num_free == TIGHT.num_blocks
        assert self.whole.slots.pool.num_references == 0
        assert self.whole.budgets.of(OPERATOR).held == 0

    def answer_is_as_if_alone(self, request_id: str, asked: Asked) -> None:
        failure = self.whole.failures.get(request_id)
        if failure is not None:
            assert failure.code is FailureCode.BUDGET_EXCEEDED
            assert self.is_shared_out
        sequence = asked.sequence
        whole_prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        alone = generate_like(asked.request, whole_prompt)
        answers = undisturbed(alone, sequence.adapter_start, asked.frontier, self.setup.groups)
        for index, expected in enumerate(answers):
            found = self.whole.answers.get((request_id, index), Answer())
            if found.finish_reason is None:
                assert request_id in self.aborted or failure is not None
            was_cut = found.finish_reason is FinishReason.LENGTH and len(found.token_ids) < len(
                expected.token_ids
            )
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
            if found.finish_reason is not None and not was_cut:
                assert found == expected
            assert not was_cut or self.is_shared_out


def generate_like(request: GenerateRequest, prompt: list[int]) -> GenerateRequest:
    """The same request without a base prompt, whose tokens are in `prompt`."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return GenerateRequest(**fields | {"prompt_token_ids": prompt, "base_prompt": None})


class SlidingFirstMachine(EngineMachine):
    """The layers with a window lie below, as in Gemma, so that these are shared by a frontier."""

    setup = replace(TIGHT, groups=[KVGroup((1,), FullAttention()), KVGroup((0,), SlidingWindow(6))])


EngineMachine.TestCase.settings = settings(max_examples=32, stateful_step_count=25)
SlidingFirstMachine.TestCase.settings = settings(max_examples=16, stateful_step_count=25)
TestEngineMachine = EngineMachine.TestCase
TestSlidingFirstMachine = SlidingFirstMachine.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("machine", [EngineMachine, SlidingFirstMachine])
def test_long_histories(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=50))
