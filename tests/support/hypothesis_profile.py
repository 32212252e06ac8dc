"""Hypothesis as everyone here runs it: the same examples every time, and no clock.

`--hypothesis-profile=search` looks for new examples instead, and makes what it finds small.
"""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "everyday",
    derandomize=True,
    deadline=None,
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],  # to shrink takes minutes where a machine fails
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search",
    settings.get_profile("everyday"),
    derandomize=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
settings.load_profile("everyday")
