"""No luck in tests: property tests try the same examples on every run, on every machine."""

from hypothesis import settings

settings.register_profile("headrace", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("headrace")
