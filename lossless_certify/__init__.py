"""Certify that speculative decoding is lossless: that what an engine emits is distributed as the target's own samples.

    python -m lossless_certify sampler MODULE:NAME

NumPy and SciPy alone. `certify_sampler` takes a verification as an object (`Sampler`), `certify_engine` a whole engine
as a function of prompts; `hall` has samplers with known faults, which the checks must find.
"""

from lossless_certify.block import Block, DraftRows, Sampler
from lossless_certify.certify import certify_sampler
from lossless_certify.errors import CertifyError
from lossless_certify.report import Certificate, Result

__all__ = ["Block", "Certificate", "CertifyError", "DraftRows", "Result", "Sampler", "certify_sampler"]
__version__ = "0.1.0"
