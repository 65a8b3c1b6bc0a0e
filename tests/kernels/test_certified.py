"""The library's verification under the certifier that any engine can call: every rule, the reference and the kernels.

False alarms of each test: 1e-6. Found with chance 0.99: a total variation of 0.04 ("quick") or 0.01.
"""

import pytest

from lossless_certify import certify_sampler
from lossless_certify.cases import Case
from lossless_certify.certify import compare_case
from lossless_certify.statistics import Rates
from specrl_jax.decoding import certified
from specrl_jax.decoding.certified import CertifiedSampler
from tests.helpers.interpreted import KERNELS
from tests.helpers.long import long_but

RULES = ("rejection", "block", "coupled")
LEVELS = ("quick", "default")


def assert_lossless(report):
    assert report.passed and all("known for the rules" in line for line in report.untested), report.to_markdown()


@pytest.mark.parametrize(
    ("rule", "level"), long_but([("block", "quick")], RULES, LEVELS, slow=[(rule, "quick") for rule in RULES])
)
def test_the_reference_is_lossless(rule, level):
    assert_lossless(certify_sampler(getattr(certified, rule), level=level, seed=1))


@pytest.mark.parametrize("rule", RULES)
def test_nothing_drafted_is_plain_sampling(rule):
    case = Case("nothing drafted", k=0, blocks=3, drafts="likeliest")
    options = {"distance": 0.04, "rates": Rates(1e-6), "seed": 1}
    (result,) = compare_case(getattr(certified, rule), case, None, **options)
    assert result.passed, result.statistic


@pytest.mark.parametrize("rule", long_but([], RULES, slow=["block"]))
def test_the_tiled_verification_with_interpreted_tpu_kernels_is_lossless(rule):
    """By time, at 0.3 ms a row: a total variation of about 0.15. A row of the GPU's interpreter takes 0.2 s, so its
    tokens are compared with the reference's (test_verify_kernels.py)."""
    sampler = CertifiedSampler(rule, KERNELS["tpu"], max_rows=1024)
    assert_lossless(certify_sampler(sampler, minutes=1, seed=1))
