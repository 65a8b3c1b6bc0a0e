"""The error that a user can cause."""


class CertifyError(Exception):
    """A sampler, an engine or an endpoint that does not fit; its message is one line that says what was wanted."""
