"""Try a folder's tokenizer under limits: `python -m specrl_jax.data.tokenizer_trial FOLDER`.

What `specrl_jax.data.tokenizers.try_folder` runs. Ends with status 1 and one line where the folder is refused.
"""

import contextlib
import os
import resource
import sys

from specrl_jax.data.tokenizers import read_tokenizer
from specrl_jax.errors import InputError

MEMORY = 4 * 2**30  # bytes; Qwen3's takes 1/10
PROCESSOR = 60  # seconds: nothing goes on for ever, though the process that started this one may be killed
TEXT = "Answer briefly: what is 12 + 30?\n<think>\nsum\n</think>\n\n42"


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
