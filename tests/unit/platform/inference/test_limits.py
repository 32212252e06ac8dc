"""What one request may ask for."""

import pytest

from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.limits import MAX_CHOICES, Limits


def test_a_request_may_ask_for_so_many_choices_over_all_its_prompts() -> None:
    Limits.check_choices(MAX_CHOICES // 64, 64)

    with pytest.raises(InvalidRequest, match="4096 choices in all, but 256 prompts with n = 64"):
        Limits.check_choices(256, 64)
