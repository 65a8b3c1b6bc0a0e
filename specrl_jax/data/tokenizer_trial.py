"""Try a folder's tokenizer and chat template under limits: `python -m specrl_jax.data.tokenizer_trial FOLDER`.

What `specrl_jax.data.tokenizers.try_folder` runs. Ends with status 1 and one line where the folder is refused. A
template that rejects these conversations may accept others, so only what it takes of time and memory is judged.
"""

import resource
import sys

from specrl_jax.data.tokenizers import HFTokenizer, Messages
from specrl_jax.errors import InputError

MEMORY = 4 * 2**30  # bytes; Qwen3's takes 1/10
PROCESSOR = 60  # seconds: nothing goes on for ever, though the process that started this one may be killed
USER, SYSTEM = {"role": "user", "content": "What is 12 + 30?\n"}, {"role": "system", "content": "Answer briefly."}
ASSISTANT = {"role": "assistant", "content": "<think>\nsum\n</think>\n\n42"}
CONVERSATIONS: tuple[Messages, ...] = ([USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER])


def attempt(folder: str) -> str:
    """Return why the folder is refused; '' where it is not."""
    try:
        tokenizer = HFTokenizer(folder)
    except InputError as error:
        return str(error)
    for messages in CONVERSATIONS:
        for thinking in (True, False):
            try:
                tokenizer.encode(tokenizer.apply_chat_template(messages, thinking))
            except InputError as error:
                if isinstance(error.__cause__, MemoryError):
                    return f"data.tokenizer: {folder}: the chat template needs more than {MEMORY >> 30} GiB"
    return ""


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR))
    if reason := attempt(sys.argv[1]):
        print(reason)
        sys.exit(1)
