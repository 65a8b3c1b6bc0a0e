"""Sandboxes of this machine, and a server of SandboxFusion's `/run_code` that tests start themselves."""

import contextlib
import functools
import http.server
import json
import subprocess
import sys
import tempfile
import threading

import pytest

from specrl_jax.errors import InputError
from specrl_jax.rewards.sandbox.choose import choose
from specrl_jax.rewards.sandbox.limits import MIB, Limits

LIMITS = Limits(seconds=2.0, memory=256 * MIB, processes=16, disk=4 * MIB)
LOCAL = ("bubblewrap", "landlock")


@functools.cache
def _found(mechanism):
    try:
        return choose(mechanism, "", limits=LIMITS), ""
    except InputError as error:
        return None, str(error)


def any_local():
    """Return the first mechanism that works here; skip the test where none does."""
    if not (found := next(filter(None, (_found(mechanism)[0] for mechanism in LOCAL)), None)):
        pytest.skip(" ".join(_found(mechanism)[1] for mechanism in LOCAL))
    return found


def chosen(mechanism):
    """Return a mechanism that has been tried here; skip the test where this machine lacks it."""
    found, reason = _found(mechanism)
    if found is None:
        pytest.skip(reason)
    return found


class RunCode(http.server.BaseHTTPRequestHandler):
    """Answers as SandboxFusion's server does; what it runs comes from tests of this project."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        broken = self.server.broken.pop(0) if self.server.broken else ""
        if broken.isdigit():
            self.send_error(int(broken))
            return
        answer = b"nonsense" if broken == "nonsense" else json.dumps(_run(asked, broken)).encode()
        self.send_response(200 if self.path == "/run_code" else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def _run(asked, broken):
    if broken:
        return {"status": broken, "message": "no pod is free", "compile_result": None, "run_result": None, "files": {}}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(asked["code"])
        file.flush()
        command = [sys.executable, "-I", file.name]
        try:
            ran = subprocess.run(
                command, input=asked["stdin"], capture_output=True, text=True, timeout=asked["run_timeout"]
            )
        except subprocess.TimeoutExpired as late:
            out = (late.stdout or b"").decode()
            result = {"status": "TimeLimitExceeded", "execution_time": asked["run_timeout"], "return_code": None}
            return {
                "status": "Failed",
                "message": "",
                "run_result": result | {"stdout": out, "stderr": ""},
                "files": {},
            }
    result = {"status": "Finished", "execution_time": 0.1, "return_code": ran.returncode}
    result |= {"stdout": ran.stdout, "stderr": ran.stderr}
    status = "Failed" if ran.returncode else "Success"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


@contextlib.contextmanager
def run_code_server():
    """Yield a server on a free port of the loopback address: `url`, `asked` (requests), `broken` (its next faults)."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RunCode) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.asked, server.broken = [], []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
