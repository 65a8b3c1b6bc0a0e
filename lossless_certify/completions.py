"""A client of an OpenAI-compatible /v1/completions endpoint, and the certification of one."""

import concurrent.futures
import dataclasses
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from lossless_certify.engine import OPTIONS, EngineOptions, certify_engine
from lossless_certify.errors import CertifyError
from lossless_certify.report import Certificate
from lossless_certify.texts import Completion

MOST = 128  # choices of one request
TOP = 20  # log-probs at each place
UNKNOWN = "\ufffd"  # in tokens that are not whole UTF-8: several look alike


def certify_endpoint(
    url: str,
    *,
    model: str,
    prompts: Sequence[str],
    plain_url: str | None = None,
    plain_model: str | None = None,
    options: EngineOptions = OPTIONS,
    client: Mapping[str, Any] | None = None,
    **how: Any,
) -> Certificate:
    """Certify an endpoint, as `certify_engine` an engine.

    Args:
      plain_url, plain_model: the same without speculation: another endpoint, another name at one endpoint, or both.
      client: further arguments of `CompletionsClient`.
      how: distance, seed, minutes and progress of `certify_engine`.
    """
    client = {"max_tokens": options.tokens} | dict(client or {})
    engine = CompletionsClient(url, model, **client)
    plain = CompletionsClient(plain_url or url, plain_model or model, **client) if plain_url or plain_model else None
    options = dataclasses.replace(options, name=model) if options.name == OPTIONS.name else options
    return certify_engine(engine, plain=plain, prompts=prompts, options=options, **how)


@dataclasses.dataclass(frozen=True)
class CompletionsClient:
    """An endpoint as a `Generate`. Its tokens are strings; one that is not whole UTF-8 has no log-prob."""

    url: str  # with or without /v1/completions
    model: str
    _: dataclasses.KW_ONLY
    timeout: float = 60  # seconds of a request
    api_key: str | None = None
    max_tokens: int = 3
    workers: int = 8  # requests at a time
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more of a request; they overrule

    def __call__(self, prompts: Sequence[str], n: int, seed: int) -> list[list[Completion]]:
        """Return n samples of each prompt; each request has a seed of its own, and no other within its choices.

        Raises:
          CertifyError: there is no such endpoint, or it answers something else.
        """
        requests = [
            {"prompt": prompt, "n": min(MOST, n - first), "seed": seed + i * n + first}
            for i, prompt in enumerate(prompts)
            for first in range(0, n, MOST)
        ]
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            answers = [x for of_request in pool.map(self.complete, requests) for x in of_request]
        return [answers[i * n : (i + 1) * n] for i in range(len(prompts))]

    def complete(self, request: Mapping[str, Any]) -> list[Completion]:
        """Return the choices of one request."""
        settings = {"max_tokens": self.max_tokens, "temperature": 1, "top_p": 1, "logprobs": TOP}
        answer, n = self._post({"model": self.model, **settings, **request, **self.fields}), request["n"]
        try:
            choices = json.loads(answer)["choices"]
            if len(choices) < n:
                raise CertifyError(f"{self.url}: {len(choices)} choices, where n = {n} were wanted")
            return [self._completion(choice.get("logprobs") or {}) for choice in choices[:n]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CertifyError(f"{self.url}: {answer[:60]!r}, where JSON of completions was wanted") from error

    def _completion(self, logprobs: Mapping[str, Any]) -> Completion:
        tokens, own, top = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
        if tokens is None or own is None:
            raise CertifyError(f"{self.url}: a choice without log-probs, where tokens and token_logprobs were wanted")
        own = [None if UNKNOWN in token else x for token, x in zip(tokens, own)]
        top = top and [{token: x for token, x in (place or {}).items() if UNKNOWN not in token} for place in top]
        return Completion(tokens, own, top)

    def _post(self, body: Mapping[str, Any]) -> str:
        address = self.url.rstrip("/").removesuffix("/completions").removesuffix("/v1") + "/v1/completions"
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            request = urllib.request.Request(
                address, json.dumps(body).encode(), {"Content-Type": "application/json"} | key
            )
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            first = error.read().decode(errors="replace").strip().partition("\n")[0]
            raise CertifyError(f"{self.url}: HTTP {error.code}, {first[:200]}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = f"no answer in {self.timeout:g} seconds" if isinstance(reason, TimeoutError) else reason
            raise CertifyError(f"{self.url}: {reason}, where a /v1/completions endpoint was wanted") from error
