"""The key of vLLM's compiled graphs: our options are no part of it, everything else still is."""

from __future__ import annotations

import pytest

from pagedweight.serving.compile_key import leave_options_out
from pagedweight.serving.options import KEY, ServeOptions

pytestmark = pytest.mark.vllm


@pytest.fixture
def key():
    from vllm.config import VllmConfig

    leave_options_out()
    leave_options_out()
    return lambda **given: VllmConfig(**given).compute_hash()


def test_a_server_with_other_options_finds_the_same_graphs(key):
    plain = key(additional_config={KEY: {}})
    for options in (ServeOptions(bits=4), ServeOptions(memory=1 << 30, timeline="a")):
        assert key(additional_config=options.additional_config()) == plain


def test_what_is_not_ours_still_counts(key):
    from vllm.config import CompilationConfig

    ours = ServeOptions(bits=4).additional_config()
    users = [key(additional_config={**ours, "gdn": kind}) for kind in "ab"]
    assert len({*users, key(additional_config=ours)}) == 3
    other = CompilationConfig(custom_ops=["all"])
    assert key(additional_config=ours, compilation_config=other) != key(additional_config=ours)
    assert key(additional_config={"gdn": "a"}) != key(additional_config={"gdn": "b"})


def test_the_options_are_still_there_afterwards(key):
    from vllm.config import VllmConfig

    options = ServeOptions(bits=3)
    config = VllmConfig(additional_config=options.additional_config())
    config.compute_hash()
    assert ServeOptions.of(config.additional_config) == options
