"""A client of SandboxFusion (https://github.com/bytedance/SandboxFusion) and of what speaks its `/run_code`."""

import http.client
import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request

from specrl_jax.rewards.sandbox import alone
from specrl_jax.rewards.sandbox.bundle import bundle
from specrl_jax.rewards.sandbox.limits import MIB, Limits, Ran, Run, SandboxError

ATTEMPTS, BUSY = 3, (429, 502, 503, 504)  # HTTP statuses of a server that may answer later
WAIT = 10.0  # seconds beside a program's own


class HttpSandbox:
    """Programs on a server that `url` names, with or without its `/run_code`."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.limits = limits

    def run(self, task: Run, seconds: float) -> Ran:
        if not (task.call or task.tests):
            ran, _ = self._run(task.program, task.stdin, seconds)
            return ran
        # Not in the file, which the program can read, but in the standard input, which is empty by then.
        mark = secrets.token_hex(16)
        job = {"program": task.program, "call": task.call, "arguments": task.arguments}
        job |= {"tests": task.tests, "check": task.check, "mark": mark}
        ran, out = self._run(bundle(alone), json.dumps(job), seconds)
        _, marked, after = out.rpartition("\n" + mark)
        try:
            return ran._replace(result=json.loads(after) if marked else None)
        except (ValueError, RecursionError):
            return ran

    def close(self) -> int:
        """Do nothing: each program has a request of its own."""
        return 0

    def _run(self, code: str, stdin: str, seconds: float) -> tuple[Ran, str]:
        asked = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self.limits.memory // MIB,
            "files": {},
            "fetch_files": [],
        }
        answer = self._ask(json.dumps(asked).encode(), seconds + WAIT)
        match answer:
            case {"status": "Success" | "Failed", "run_result": {"status": str(status)} as found}:
                code_of, out, err = found.get("return_code"), found.get("stdout") or "", found.get("stderr") or ""
                if isinstance(out, str) and isinstance(err, str) and isinstance(code_of, int | None):
                    cause = "time" if status == "TimeLimitExceeded" else ""
                    cause = cause or ("output" if len(out) > self.limits.output else "")
                    ended = code_of if isinstance(code_of, int) and status == "Finished" else 1
                    return Ran(ended, out, err[-2000:], result=None, cause=cause), out
        message = answer.get("message", "") if isinstance(answer, dict) else ""
        raise SandboxError(f"{self.url}: no answer of /run_code {str(message)[:100]}".strip())

    def _ask(self, asked: bytes, seconds: float) -> object:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(self.url, asked, headers)
        most = 8 * self.limits.output + MIB  # JSON may write a character as six
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=seconds) as response:
                    return json.loads(response.read(most))
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or attempt == ATTEMPTS:
                    raise SandboxError(f"{self.url}: HTTP status {error.code}") from None
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                raise SandboxError(f"{self.url}: {' '.join(str(error).split())[:200]}") from None
            time.sleep(attempt)
        raise AssertionError  # the last attempt returned or raised


def is_url(name: str) -> bool:
    """Return whether a value of reward.sandbox is the URL of a server."""
    parts = urllib.parse.urlsplit(name)
    return parts.scheme in ("http", "https") and bool(parts.hostname)
