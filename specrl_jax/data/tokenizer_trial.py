"""Try a folder's tokenizer under limits: `python -m specrl_jax.data.tokenizer_trial FOLDER`.

What `try_folder` runs. Ends with status 1 and one line where the folder is refused.
"""

import contextlib
import os
import resource
import subprocess
import sys

import tokenizers

from specrl_jax.errors import InputError
from specrl_jax.json_files import TOKENIZER_BYTES, read_text

KEY = "data.tokenizer: "
TRIAL_SECONDS = 30.0  # Qwen3's takes 2
MEMORY = 4 * 2**30  # bytes; Qwen3's takes 1/10
PROCESSOR = 60  # seconds: nothing goes on for ever, though the process that started this one may be killed
TEXT = "Answer briefly: what is 12 + 30?\n<think>\nsum\n</think>\n\n42"


def try_folder(folder: str, seconds: float = TRIAL_SECONDS) -> None:
    """Load a folder's tokenizer and use it in a process of its own, under limits: its file is a stranger's.

    Raises InputError.
    """
    command = [sys.executable, "-m", "specrl_jax.data.tokenizer_trial", folder]
    # One thread each: what threads reserve would count against the memory limit.
    single = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | single | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{KEY}{folder}: the tokenizer did not end within {seconds:g} s") from None
    if done.returncode == 1 and done.stdout.startswith(KEY):
        raise InputError(done.stdout.strip())
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1][:200]
        raise InputError(f"{KEY}{folder}: the tokenizer ends the process that tries it: {last}")


def read_tokenizer(path: str) -> tokenizers.Tokenizer:
    """Read a tokenizer.json. Raises InputError, also for one that would change or shorten texts."""
    text = read_text(path, TOKENIZER_BYTES, KEY)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{KEY}cannot read {path}: {' '.join(str(error).split())}") from None
    if not tokenizer.get_vocab_size():
        raise InputError(f"{KEY}{path} has no tokens")
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise InputError(f"{KEY}{path}: model.dropout={dropout}: null is needed, else ids are drawn at random")
    # Options of batches, which transformers does not take from the file either.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def attempt(folder: str) -> str:
    """Return why the folder is refused; '' where it is not."""
    try:
        tokenizer = read_tokenizer(os.path.join(folder, "tokenizer.json"))
    except InputError as error:
        return str(error)
    with contextlib.suppress(Exception):  # a row that it cannot encode is named where it is read
        tokenizer.encode(TEXT)
    return ""


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR))
    if reason := attempt(sys.argv[1]):
        print(reason)
        sys.exit(1)
