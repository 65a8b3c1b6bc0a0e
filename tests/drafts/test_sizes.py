"""What heads are priced as, against their parameter specs."""

import pytest

from specrl_jax.drafts import eagle3
from specrl_jax.drafts.sizes import head_parameters, priced_head
from specrl_jax.models import decoder
from specrl_jax.models.layers import count_params


@pytest.mark.parametrize("name, draft_vocab", [("nano", 32), ("tiny", 32), ("qwen3_8b", 32_000)])
def test_head_parameters_equal_the_heads_specs(name, draft_vocab):
    h = priced_head("eagle3", decoder.preset(name), draft_vocab, slots=0, layers=1)
    assert head_parameters(h) == count_params(eagle3.Eagle3Draft(h).specs) - 4 * h.embed  # its norms
