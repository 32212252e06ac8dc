"""Limits of a call: its sampling, its choices, and the fit of prompt and answer."""

import msgspec

from loraplex.engine.model_limits import ModelLimits
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.errors import Fault, InvalidRequest

MAX_CHOICES = 4096  # of one request, over all its prompts


def check_sampling(limits: ModelLimits, sampling: SamplingParams) -> None:
    """Raises InvalidRequest with every fault."""
    faults = limits.sampling_faults(sampling)
    if faults:
        raise InvalidRequest.of([Fault(*fault) for fault in faults])


def check_choices(num_prompts: int, n: int) -> None:
    """Raises InvalidRequest for more choices than one request may ask for."""
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"A request may ask for at most {MAX_CHOICES} choices in total, but {num_prompts} "
            f"prompts with n = {n} ask for {num_prompts * n}.",
            "n",
        )


def fit(
    limits: ModelLimits,
    param: str,
    token_ids: list[int],
    sampling: SamplingParams,
    default: int | None,
) -> SamplingParams:
    """Returns the sampling for one prompt, with `max_tokens` set if there is a default.

    Args:
        param: the field that holds the prompt, for errors.
        default: `max_tokens` of a request that names none; None: as many as fit.

    Raises:
        RequestRejected: if the prompt is empty, or prompt and answer do not fit.
    """
    num_wanted = max(sampling.max_tokens or sampling.min_tokens, 1)
    limits.check_prompt(token_ids, num_wanted, what=param, param=param)
    if sampling.max_tokens is not None or default is None:
        return sampling
    room = limits.max_model_len - len(token_ids)
    max_tokens = min(room, max(default, sampling.min_tokens))
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)
