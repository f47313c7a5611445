"""Compiling for TPUs that are not there, with the TPU compiler, which `make test-topology` installs."""

import importlib.util

import pytest
from golden import make_explain as golden

import strategies

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed; make test-topology"
)


@pytest.mark.parametrize("name", [name for name in strategies.names() if golden.lowers_for(name, golden.SLICE)])
def test_what_a_strategy_sends_on_tpus_is_the_golden_page(name: str):
  assert golden.page(name, golden.SLICE) == golden.file(name, golden.SLICE).read_text()
