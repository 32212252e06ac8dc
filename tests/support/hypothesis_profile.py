"""Hypothesis as everyone here runs it: the same examples every time, and no clock."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "everyday",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("everyday")
