"""Whatever happens around a request, it gets the answer that it would have got alone."""

from typing import Any

import pytest
from support.engine.kv import FULL
from support.engine.scheduling import SchedulerHarness, Setup, generate_request, undisturbed
from support.models.word_tokenizer import EOS

from loraplex.engine.sequence import SequenceStatus

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.4,
    },
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "choices": {"n": 3, "temperature": 1.0, "seed": 3, "logprobs": 0},
    "min_tokens": {"min_tokens": 6, "logit_bias": {EOS: 20.0}},
    "adapter": {"adapter": "a"},
}


def answers_of(harness: SchedulerHarness, request_id: str, num_choices: int = 1) -> list[Any]:
    return [harness.answers[request_id, i] for i in range(num_choices)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_prefill_chunks_cannot_be_seen(kind: str, chunk: int) -> None:
    request = generate_request("r", PROMPT, **KINDS[kind])
    num_choices = request.sampling.n
    harness = SchedulerHarness(
        Setup(max_num_batched_tokens=max(chunk, num_choices), max_num_seqs=num_choices)
    )
    harness.add(request)

    harness.run()

    assert answers_of(harness, "r", num_choices) == undisturbed(request)


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_at_any_step_cannot_be_seen(kind: str) -> None:
    request = generate_request("r", PROMPT, max_tokens=10, **KINDS[kind])
    alone = undisturbed(request, groups=FULL)

    for step in range(1, 13):
        harness = SchedulerHarness(Setup(block_size=1, max_num_batched_tokens=8, groups=FULL))
        harness.add(request)
        for _ in range(step):
            harness.step()
        was_running = bool(harness.scheduler.running)
        harness.take_memory()
        harness.step()
        harness.give_memory_back()
        harness.run()
        assert bool(harness.scheduler.num_preemptions) == was_running
        assert answers_of(harness, "r", request.sampling.n) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_cannot_be_seen(kind: str) -> None:
    requests = [generate_request("r", PROMPT, **KINDS[kind])]
    requests += [
        generate_request(f"{i}", PROMPT[: i + 3], temperature=1.0, seed=i, adapter="ab"[i % 2])
        for i in range(4)
    ]
    harness = SchedulerHarness(Setup(num_blocks=30, max_num_batched_tokens=11))
    for request in requests:
        harness.add(request)

    harness.run()

    for request in requests:
        found = answers_of(harness, request.request_id, request.sampling.n)
        assert found == undisturbed(request)


@pytest.mark.parametrize("priority", [0, -1])
def test_a_long_prompt_does_not_hold_up_those_who_decode(priority: int) -> None:
    harness = SchedulerHarness(Setup(max_num_batched_tokens=8))
    harness.add(generate_request("quick", PROMPT[:3], max_tokens=20, ignore_eos=True))
    harness.step()
    harness.add(generate_request("long", [1] * 60, priority=priority))

    for num_tokens in range(2, 8):
        harness.step()
        assert len(harness.answers["quick", 0].token_ids) == num_tokens


def test_a_shared_prompt_is_computed_once_for_all_choices() -> None:
    harness = SchedulerHarness()
    harness.add(generate_request("r", PROMPT, n=4, temperature=1.0, seed=1, max_tokens=2))

    computed = []
    while harness.scheduler.running or harness.scheduler.waiting:
        computed.append(harness.step().num_tokens)

    assert computed == [len(PROMPT), 4]


def test_sampled_choices_differ_and_greedy_ones_are_equal() -> None:
    sampled = undisturbed(generate_request("r", PROMPT, n=4, temperature=1.0, seed=1))
    greedy = undisturbed(generate_request("r", PROMPT, n=4))

    assert len({answer.text for answer in sampled}) == 4
    assert len({answer.text for answer in greedy}) == 1


def test_the_whole_input_must_fit_before_a_request_begins() -> None:
    harness = SchedulerHarness(Setup(num_blocks=24, max_num_batched_tokens=8, groups=FULL))
    harness.add(generate_request("first", [1] * 40))
    harness.add(generate_request("second", [2] * 60))
    harness.add(generate_request("third", [3] * 8))

    harness.step()

    assert [s.request_id for s in harness.scheduler.running] == ["first"]
    assert [s.request_id for s in harness.scheduler.waiting] == ["second", "third"]


def test_what_others_still_need_for_their_input_is_not_promised_twice() -> None:
    harness = SchedulerHarness(
        Setup(num_blocks=24, max_num_batched_tokens=8, max_logits_rows=4, groups=FULL)
    )
    harness.add(generate_request("first", [1] * 40, prompt_logprobs=0))
    harness.add(generate_request("second", [2] * 60))

    harness.step()

    assert [s.request_id for s in harness.scheduler.running] == ["first"]
    harness.run()
    assert harness.scheduler.num_preemptions == 0


def test_nobody_begins_in_a_step_in_which_another_gave_way() -> None:
    harness = SchedulerHarness(Setup(block_size=1, groups=FULL))
    harness.add(generate_request("first", PROMPT))
    harness.add(generate_request("second", PROMPT[::-1]))
    harness.step()
    harness.take_memory()
    harness.add(generate_request("small", [5], priority=-1))

    harness.step()

    assert [s.request_id for s in harness.scheduler.running] == ["first"]


def test_short_memory_costs_few_preemptions() -> None:
    harness = SchedulerHarness(Setup(num_blocks=20, max_num_batched_tokens=8, groups=FULL))
    requests = [
        generate_request(f"{i}", [i] * 20, max_tokens=30, ignore_eos=True) for i in range(6)
    ]
    for request in requests:
        harness.add(request)

    harness.run()

    assert 0 < harness.scheduler.num_preemptions <= 2 * len(requests)
    for request in requests:
        alone = undisturbed(request, groups=FULL)
        assert answers_of(harness, request.request_id) == alone


def test_the_last_to_come_gives_way() -> None:
    harness = SchedulerHarness(Setup(block_size=1, groups=FULL))
    first = harness.add(generate_request("first", PROMPT))
    last = harness.add(generate_request("last", PROMPT[::-1]))
    harness.step()
    harness.take_memory()

    harness.step()

    assert (first.num_preemptions, last.num_preemptions) == (0, 1)
    assert (first.status, last.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)


def test_a_less_urgent_request_gives_way_even_if_it_came_first() -> None:
    harness = SchedulerHarness(Setup(block_size=1, groups=FULL))
    first = harness.add(generate_request("first", PROMPT, priority=1))
    urgent = harness.add(generate_request("urgent", PROMPT[::-1], priority=0))
    harness.step()
    harness.take_memory()

    harness.step()

    assert (first.num_preemptions, urgent.num_preemptions) == (1, 0)


def test_urgent_requests_begin_first_and_equals_in_order_of_arrival() -> None:
    harness = SchedulerHarness(Setup(max_num_seqs=1, max_num_batched_tokens=64))
    for name, priority in (("c", 0), ("d", 0), ("e", 5), ("a", -1)):
        harness.add(generate_request(name, PROMPT, max_tokens=2, priority=priority))

    harness.run()

    assert [request_id for request_id, _ in harness.answers] == ["a", "c", "d", "e"]


def test_choices_count_towards_the_number_of_sequences() -> None:
    harness = SchedulerHarness(Setup(max_num_seqs=4))
    for name in ("a", "b"):
        harness.add(generate_request(name, PROMPT, n=3, temperature=1.0))

    harness.step()

    assert {s.request_id for s in harness.scheduler.running} == {"a"}


def test_a_prefix_that_two_bring_together_is_computed_once() -> None:
    harness = SchedulerHarness()
    first, second = (generate_request(f"r{i}", [*PROMPT, i]) for i in (1, 2))
    harness.add(first)
    harness.add(second)

    harness.run()

    assert harness.num_cached == {"r1": 0, "r2": 8}
    assert answers_of(harness, "r2") == undisturbed(second)


def test_who_shares_nothing_does_not_wait_for_a_prefix_to_be_computed() -> None:
    harness = SchedulerHarness()
    for request_id, prompt in (("first", PROMPT), ("same", PROMPT), ("other", PROMPT[::-1])):
        harness.add(generate_request(request_id, prompt))

    output = harness.step()

    assert [item.sequence.request_id for item in output.scheduled] == ["first", "other"]


def test_another_namespace_does_not_wait_for_a_prefix_to_be_computed() -> None:
    harness = SchedulerHarness()
    harness.add(generate_request("ours", PROMPT))
    harness.add(generate_request("theirs", PROMPT, namespace="another"))

    output = harness.step()

    assert [item.sequence.request_id for item in output.scheduled] == ["ours", "theirs"]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    harness = SchedulerHarness(Setup(block_size=1, groups=FULL))
    harness.add(generate_request("cold", PROMPT[:6], max_tokens=1))
    harness.run()
    harness.add(generate_request("warm", PROMPT, max_tokens=4))
    harness.step()

    harness.take_memory()
    harness.step()
    harness.give_memory_back()
    harness.run()

    assert harness.scheduler.num_preemptions == 1
    assert harness.num_cached == {"cold": 0, "warm": 6}


def test_prompt_logprobs_of_many_share_one_steps_rows() -> None:
    harness = SchedulerHarness(Setup(max_logits_rows=10))
    for i in range(4):
        harness.add(generate_request(f"{i}", [i] * 12, prompt_logprobs=0))

    while harness.scheduler.waiting or harness.scheduler.running:
        alive = [*harness.scheduler.running, *harness.scheduler.waiting]
        owing = [sequence for sequence in alive if sequence.owes_prompt_logprobs]
        output = harness.step()
        spent = [i.num_tokens for i in output.scheduled if i.sequence in owing]
        assert sum(spent) <= 10 + len(spent)  # one more each, so that nobody stands still


def test_every_prompt_token_but_the_first_has_a_logprob_even_if_its_prefix_is_cached() -> None:
    harness = SchedulerHarness(Setup(max_num_batched_tokens=8, max_logits_rows=3))
    for name in ("cold", "warm"):
        harness.add(generate_request(name, PROMPT, prompt_logprobs=0))
        harness.run()

    cold, warm = (harness.answers[name, 0].prompt_logprobs for name in ("cold", "warm"))
    assert cold == warm
    assert cold is not None
    assert cold[0] is None
    assert [entry.token_id for entry in cold[1:] if entry] == PROMPT[1:]


def test_a_prompt_of_one_token_has_one_empty_prompt_logprob() -> None:
    answer = undisturbed(generate_request("r", [3], prompt_logprobs=1))[0]

    assert answer.prompt_logprobs == [None]


def test_an_activated_adapter_leaves_the_prompt_before_it_to_the_base() -> None:
    base = generate_request("base", PROMPT)
    activated = generate_request("activated", PROMPT, adapter="a")
    harness = SchedulerHarness()
    harness.add(base)
    harness.run()
    harness.add(activated, adapter_start=6)

    harness.run()

    assert harness.num_cached["activated"] == 4
    assert answers_of(harness, "activated") == undisturbed(activated, adapter_start=6)
    assert answers_of(harness, "activated") != undisturbed(activated)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["greedy", "choices", "adapter"])
def test_an_abort_gives_everything_back_at_once(kind: str, steps: int) -> None:
    harness = SchedulerHarness(Setup(max_num_batched_tokens=4, max_num_seqs=4))
    harness.add(generate_request("r", PROMPT, **KINDS[kind]))
    for _ in range(steps):
        harness.step()

    harness.scheduler.abort("r")

    assert not harness.scheduler.running
    assert not harness.scheduler.waiting
    harness.check_nothing_is_held()


def test_an_abort_of_a_preempted_or_loading_request_leaves_nothing() -> None:
    harness = SchedulerHarness(Setup(block_size=1, load_delay=3))
    harness.add(generate_request("preempted", PROMPT))
    harness.add(generate_request("loading", PROMPT, adapter="a"))
    harness.step()
    harness.take_memory()
    harness.step()
    harness.give_memory_back()

    harness.scheduler.abort("preempted")
    harness.scheduler.abort("loading")

    assert not harness.scheduler.waiting
    harness.check_nothing_is_held()


def test_an_abort_leaves_the_others_alone() -> None:
    stays = generate_request("stays", PROMPT, n=2, temperature=1.0, seed=5)
    harness = SchedulerHarness()
    harness.add(stays)
    harness.add(generate_request("goes", PROMPT, n=2, temperature=1.0, seed=6))
    harness.step()

    harness.scheduler.abort("goes")
    harness.scheduler.abort("unknown")
    harness.run()

    assert answers_of(harness, "stays", 2) == undisturbed(stays)


def test_more_adapters_than_slots_all_get_their_turn() -> None:
    harness = SchedulerHarness(Setup(num_slots=1, load_delay=2))
    requests = [
        generate_request(f"{i}", PROMPT, adapter="abc"[i % 3], max_tokens=4) for i in range(9)
    ]
    for request in requests:
        harness.add(request)

    harness.run()

    for request in requests:
        assert answers_of(harness, request.request_id) == undisturbed(request)
    harness.check_nothing_is_held()


def test_the_base_model_waits_for_no_adapter() -> None:
    harness = SchedulerHarness(Setup(num_slots=1, load_delay=100))
    harness.add(generate_request("loading", PROMPT, adapter="a"))
    harness.add(generate_request("base", PROMPT))

    harness.step()

    assert [key for key, _ in harness.answers] == ["base"]


def test_an_adapter_changes_the_answer() -> None:
    texts = {
        undisturbed(generate_request("r", PROMPT, adapter=adapter))[0].text
        for adapter in (None, "a", "b")
    }

    assert len(texts) == 3
