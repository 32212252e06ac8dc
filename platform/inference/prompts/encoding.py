"""Renders and tokenises the prompts of a call; runs in a tokenizer thread."""

from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.bodies.sampling_fields import SamplingFields
from loraplex.platform.inference.bodies.schemas import ChatCompletionRequest, CompletionRequest
from loraplex.platform.inference.generation import Prompt
from loraplex.platform.inference.prompts.prompt_prefix import PromptPrefix
from loraplex.platform.inference.prompts.words import refuse_hidden_stops


def encode_chat(
    tokenizer: Tokenizer,
    body: ChatCompletionRequest,
    prefix: PromptPrefix | None,
    template: str | None,
    keep: int | None,
) -> Prompt:
    """Returns a chat as the chat template renders it, and as tokens.

    Args:
        template: of the request or the adapter; None: the model's own.
        keep: number of tokens to keep, at the end; None: all.

    Raises:
        InvalidRequest: if the template does not let the base prompt come first.
    """
    if body.skip_special_tokens is not False:
        refuse_hidden_stops(tokenizer, body.stop)
    own = [message.for_template() for message in body.messages]
    text = tokenizer.render_chat(
        own if prefix is None else prefix.chat(own),
        add_generation_prompt=body.add_generation_prompt is not False
        and not body.continue_final_message,
        variables=body.chat_template_kwargs,
        now=None if prefix is None else prefix.prompt.published_at,
        continues_last=body.continue_final_message is True,
        template=template,
    )
    adds_special = body.add_special_tokens is True
    if keep is not None:
        return Prompt(tokenizer.encode_end(text, keep, adds_special), "")
    token_ids = tokenizer.encode(text, adds_special)
    base = [] if prefix is None else prefix.prompt.token_ids
    if prefix is not None and token_ids[: len(base)] != base:
        raise InvalidRequest(
            f"With these messages and settings the chat template does not begin with the base "
            f"prompt '{prefix.prompt.name}'.",
            "messages",
        )
    return Prompt(token_ids, text)


def encode_prompts(
    tokenizer: Tokenizer, body: CompletionRequest, prefix: PromptPrefix | None, keep: int | None
) -> list[Prompt]:
    """Returns each prompt of a completion as tokens, with its text where the text is needed.

    Args:
        keep: number of tokens of each prompt to keep, at the end; None: all.

    Raises:
        InvalidRequest: for special tokens that are to come behind a base prompt.
    """
    if body.skip_special_tokens is not False:
        refuse_hidden_stops(tokenizer, body.stop)
    if prefix is not None:
        if body.add_special_tokens:
            raise InvalidRequest(
                f"add_special_tokens cannot be true with the base prompt "
                f"'{prefix.prompt.name}', which begins with them.",
                "add_special_tokens",
            )
        prompts = [Prompt(prefix.completion(tokenizer, own), "") for own in body.prompt]
    else:
        adds_special = body.add_special_tokens is not False
        prompts = [_encoded(tokenizer, own, adds_special, keep) for own in body.prompt]
    if not body.echo:
        return prompts
    return [_for_echo(tokenizer, prompt, body.logprobs is not None) for prompt in prompts]


def _encoded(
    tokenizer: Tokenizer, own: str | list[int], adds_special: bool, keep: int | None
) -> Prompt:
    if isinstance(own, list):
        return Prompt(own if keep is None else own[-keep:], "")
    if keep is None:
        return Prompt(tokenizer.encode(own, adds_special), own)
    return Prompt(tokenizer.encode_end(own, keep, adds_special), "")


def kept_tokens(
    limits: ModelLimits, prefix: PromptPrefix | None, body: SamplingFields, sampling: SamplingParams
) -> int | None:
    """Returns how many tokens of a prompt to keep; None: all.

    Raises:
        InvalidRequest: for a prompt with a base prompt, which is never cut.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is not None and prefix is not None:
        name = prefix.prompt.name
        raise InvalidRequest(
            f"truncate_prompt_tokens cannot be given with the base prompt '{name}'.",
            "truncate_prompt_tokens",
        )
    if wanted != -1:
        return wanted
    answer = max(sampling.max_tokens or sampling.min_tokens, 1)
    return max(1, limits.max_model_len - answer)


def _for_echo(tokenizer: Tokenizer, prompt: Prompt, has_logprobs: bool) -> Prompt:
    text = prompt.text or tokenizer.decode(prompt.token_ids)
    return Prompt(
        token_ids=prompt.token_ids,
        text=text,
        first_token=tokenizer.decode(prompt.token_ids[:1], skip_special_tokens=False),
        offsets=tuple(tokenizer.offsets_in(prompt.token_ids, text)) if has_logprobs else (),
    )
