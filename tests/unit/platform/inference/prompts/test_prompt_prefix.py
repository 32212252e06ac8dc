"""What a call's base prompt is put before, and what begins with it already."""

import pytest
from support.models.tokenizers import write_tokenizer

from loraplex.engine.protocol import BasePromptRef
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.catalog.base_prompts import BasePrompt, PromptSource
from loraplex.platform.inference.prompts.prompt_prefix import PromptPrefix

TEXT = "Lamps are never lent."
SYSTEM = {"role": "system", "content": TEXT}
ASK = {"role": "user", "content": "May I?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def prefix(tokenizer: Tokenizer, *, is_named: bool) -> PromptPrefix:
    """With a prompt that is a text to completions and a message to chats."""
    ref = BasePromptRef(prompt_id="bpr_1", version=1)
    source = PromptSource(TEXT, (SYSTEM,))
    return PromptPrefix(BasePrompt("rules", 0, source, ref, tokenizer.encode(TEXT)), is_named)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("own", ["", " May I?", "Lamps"])
def test_a_prompt_is_put_before_what_does_not_begin_with_it(
    tokenizer: Tokenizer, is_named: bool, own: str
) -> None:
    call = prefix(tokenizer, is_named=is_named)
    token_ids = tokenizer.encode(own, add_special_tokens=False)

    expected = [*tokenizer.encode(TEXT), *token_ids]
    assert call.completion(tokenizer, own) == expected
    assert call.completion(tokenizer, token_ids) == expected
    assert call.chat([ASK]) == [SYSTEM, ASK]


def test_a_models_own_prompt_is_not_put_before_what_begins_with_it(tokenizer: Tokenizer) -> None:
    call = prefix(tokenizer, is_named=False)
    whole = [*tokenizer.encode(TEXT), *tokenizer.encode(" May I?", add_special_tokens=False)]

    assert call.completion(tokenizer, f"{TEXT} May I?") == whole
    assert call.completion(tokenizer, whole) == whole
    assert call.chat([SYSTEM, ASK]) == [SYSTEM, ASK]


def test_a_prompt_that_is_named_is_put_before_in_any_case(tokenizer: Tokenizer) -> None:
    call = prefix(tokenizer, is_named=True)
    base = tokenizer.encode(TEXT)

    assert call.completion(tokenizer, base) == [*base, *base]
    assert call.completion(tokenizer, TEXT) == [*base, *tokenizer.encode(TEXT, False)]
    assert call.chat([SYSTEM, ASK]) == [SYSTEM, SYSTEM, ASK]


def test_a_chat_that_begins_with_the_prompt_in_parts_is_left_alone() -> None:
    own = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    source = PromptSource(messages=({"role": "system", "content": "Be brief."},))
    prompt = BasePrompt("p", 0, source, BasePromptRef(prompt_id="p", version=1), [])

    assert PromptPrefix(prompt, is_named=False).chat(own) == own
