"""What a model cannot take is refused in words that clients know."""

import pytest

from loraplex.engine.errors import RequestRejected
from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.protocol import FailureCode
from loraplex.engine.sampling_params import SamplingParams

LIMITS = ModelLimits(max_model_len=16, vocab_size=100, max_num_seqs=4)


@pytest.mark.parametrize(("length", "num_wanted"), [(15, 1), (1, 15)])
def test_prompt_and_answer_may_fill_the_context(length: int, num_wanted: int) -> None:
    LIMITS.check_prompt([5] * length, num_wanted, param="prompt")


def test_a_prompt_that_is_too_long_is_refused_in_openais_words() -> None:
    with pytest.raises(RequestRejected) as refusal:
        LIMITS.check_prompt([5] * 15, 2, what="messages", param="messages")

    assert refusal.value.code is FailureCode.CONTEXT_LENGTH_EXCEEDED
    assert refusal.value.message.startswith("This model's maximum context length is 16 tokens.")
    assert "17 tokens (15 in the messages, 2 in the completion)" in refusal.value.message


@pytest.mark.parametrize(
    ("token_ids", "said"),
    [([], "has no tokens"), ([-1], "between 0 and 99, got -1"), ([5, 100], "got 100")],
)
def test_what_is_no_prompt_is_refused(token_ids: list[int], said: str) -> None:
    with pytest.raises(RequestRejected, match=said) as refusal:
        LIMITS.check_prompt(token_ids, param="prompt")

    assert (refusal.value.code, refusal.value.param) == (FailureCode.INVALID_REQUEST, "prompt")


def test_all_faults_of_the_sampling_are_named() -> None:
    sampling = SamplingParams(n=5, stop_token_ids=(100,), logit_bias={7: 1.0, 200: 1.0})

    with pytest.raises(RequestRejected) as refusal:
        LIMITS.check_sampling(sampling)

    assert [name for name, _ in LIMITS.sampling_faults(sampling)] == [
        "n",
        "stop_token_ids",
        "logit_bias",
    ]
    assert (refusal.value.param, len(refusal.value.faults)) == ("n", 3)
