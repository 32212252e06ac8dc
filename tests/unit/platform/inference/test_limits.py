"""What one request may ask for."""

import pytest

from loraplex.platform.errors import InvalidRequest
from loraplex.platform.inference.limits import MAX_CHOICES, check_choices


def test_a_request_may_ask_for_so_many_choices_over_all_its_prompts() -> None:
    check_choices(MAX_CHOICES // 64, 64)

    with pytest.raises(InvalidRequest, match="4096 choices in total, but 256 prompts with n = 64"):
        check_choices(256, 64)
