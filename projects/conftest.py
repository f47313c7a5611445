"""Projects are tested with what all tests have: simulated devices, one compilation cache, and memory that is freed."""

from tests.conftest import little_memory, same_cache  # noqa: F401  # fixtures of each test
