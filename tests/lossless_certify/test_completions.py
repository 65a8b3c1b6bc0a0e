"""A real server of toy engines is certified; an answer that does not fit is refused in one line."""

import http.server
import json
import threading
import time

import pytest

from lossless_certify import CertifyError
from lossless_certify.completions import CompletionsClient, certify_endpoint
from lossless_certify.hall import ArgmaxDrafts, RightSampler
from tests.lossless_certify.test_engine import PROMPTS, SEEDED, toy_engine

ENGINES = {"speculative": toy_engine(RightSampler()), "biased": toy_engine(ArgmaxDrafts())}
TOKENS = "\ufffd\ufffdabcd"
RAW = {"broken": b"out of memory\nin line 2", "page": b"<html>", "error": b'{"error": 1}'}
RAW |= {"numbers": b'{"choices": [1, 2, 3]}', "nothing": b'{"choices": null}'}


class Completions(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(404 if self.path != "/v1/completions" else 503 if asked["model"] == "broken" else 200)
        self.end_headers()
        self.wfile.write(self.answer(asked["model"], asked))

    def answer(self, model, asked):
        if model in RAW:
            return RAW[model]
        time.sleep(0.5 * (model == "slow"))
        drawn = ENGINES.get(model, toy_engine())([asked["prompt"]], asked["n"], asked["seed"])[0]
        choices = [{"logprobs": None if model == "silent" else self.logprobs(x)} for x in drawn]
        return json.dumps({"choices": choices[: 1 if model == "few" else None]}).encode()

    def logprobs(self, x):
        tops = [{TOKENS[token]: logprob for token, logprob in place.items()} for place in x.top_logprobs]
        return {"tokens": [TOKENS[t] for t in x.tokens], "token_logprobs": x.logprobs, "top_logprobs": tops}

    def log_message(self, *values):
        pass


@pytest.fixture(scope="module")
def url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("distance", [0.2, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_server_is_certified(url, distance):
    how = {"plain_model": "plain", "prompts": PROMPTS[:1], "distance": distance, "options": SEEDED}
    right, biased = (certify_endpoint(url, model=model, **how) for model in ENGINES)
    assert right.passed and len(right.untested) == 1 and right.name == "speculative"
    assert {x.name.split(":")[0] for x in biased.failed} == {"speculation on and off", "top log-probs"}


REFUSED = {
    "broken": "HTTP 503, out of memory",
    "page": "'<html>', where JSON of completions was wanted",
    "error": '"error": 1}\', where JSON of completions was wanted',
    "numbers": "where JSON of completions was wanted",
    "nothing": "where JSON of completions was wanted",
    "silent": "a choice without log-probs, where tokens and token_logprobs were wanted",
    "few": "1 choices, where n = 3 were wanted",
    "slow": r"no answer in 0\.2 seconds, where a /v1/completions endpoint was wanted",
}


@pytest.mark.parametrize("model", REFUSED)
def test_an_answer_that_does_not_fit_is_refused(url, model):
    with pytest.raises(CertifyError, match=REFUSED[model]) as error:
        CompletionsClient(url + "/v1/", model, timeout=0.2 if model == "slow" else 60)(PROMPTS, 3, 0)
    assert "\n" not in str(error.value)


def test_a_missing_endpoint_is_named(url):
    for wrong, message in (
        (url + "/v2", "HTTP 404"),
        ("http://127.0.0.1:1", "refused, where a /v1"),
        ("x", "unknown url"),
    ):
        with pytest.raises(CertifyError, match=message):
            CompletionsClient(wrong, "plain")(PROMPTS, 3, 0)


def test_each_request_has_seeds_of_its_own_and_its_choices_their_place(url):
    drawn = CompletionsClient(url, "plain")(PROMPTS, 300, 7)
    assert drawn == CompletionsClient(url + "/v1/completions", "plain", workers=1)(PROMPTS, 300, 7)
    for prompt, completions in zip(PROMPTS, drawn):
        first = toy_engine()([prompt], 128, 7 + 300 * PROMPTS.index(prompt))[0]
        assert [x.tokens for x in completions[:128]] == [[TOKENS[t] for t in x.tokens] for x in first]
        assert [x.tokens for x in completions[:128]] != [x.tokens for x in completions[128:256]]
        assert all((x is None) == (t == TOKENS[0]) for c in completions for t, x in zip(c.tokens, c.logprobs))
        assert not any(TOKENS[0] in top for c in completions for top in c.top_logprobs)
