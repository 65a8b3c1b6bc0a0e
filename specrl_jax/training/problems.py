"""Which problems a config trains and validates on."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

from specrl_jax.config import DataConfig, EvalConfig
from specrl_jax.core import InputError
from specrl_jax.data.prompts import PromptFormat, Reader, Schema, find_schemas, split_paths
from specrl_jax.data.sources import ProblemStream, Source
from specrl_jax.data.tasks import Problem, TaskSource
from specrl_jax.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Problems:
    """Read when they are first asked for. Reading raises InputError for a file or row that cannot be used."""

    data: DataConfig
    eval: EvalConfig
    tokenizer: Tokenizer
    max_prompt_tokens: int
    seed: int

    def stream(self, batch_size: int) -> ProblemStream:
        """Training problems without end."""
        return ProblemStream(self.train, batch_size, self.seed, self.data.weights)

    @functools.cached_property
    def train(self) -> list[Source]:
        """One source a file, or the built-in task."""
        if not self.data.path:
            return [TaskSource(self.data.task, "train", self.seed)]
        return [*self._read("data", split_paths(self.data.path, "data.path"))]

    @functools.cached_property
    def validation(self) -> dict[str, list[Problem]]:
        """The fixed validation sets by name: that of the file (see `set_names`), or of the built-in task."""
        sets: dict[str, Sequence[Problem]]
        if self.eval.path:
            paths = split_paths(self.eval.path, "eval.path")
            sets = dict(zip(set_names(paths), self._read("eval", paths)))
        else:
            e = self.eval
            task, key = (e.task, "eval.task") if e.task else (self.data.task, "data.task")
            sets = {task: TaskSource(task, "validation", self.seed, key=key)}
        return {name: [s[i] for i in range(min(self.eval.problems, len(s)))] for name, s in sets.items()}

    @functools.cached_property
    def reports(self) -> list[str]:
        """A line for each file that was read: what was kept of it, and what was left out."""
        return []

    def _read(self, section: str, paths: Sequence[str]) -> Iterator[list[Problem]]:
        """The problems of each file. To train on, a prompt counts once in all of them; validation sets stay whole."""
        d, e, validates, answers = self.data, self.eval, section == "eval", {}
        schemas, schema_key = (e.schema, "eval.schema") if validates and e.schema else (d.schema, "data.schema")
        template, key = (e.template, "eval.template") if validates and e.template else (d.template, "data.template")
        reader = Reader(
            self.tokenizer,
            PromptFormat(template, d.chat, d.system, d.thinking, key),
            self.max_prompt_tokens,
            d.skip_malformed,
            d.skip_long,
            f"{section}.path",
        )
        keys = Schema(d.prompt_key, d.answer_key, d.answer_after)
        for path, schema in zip(paths, find_schemas(schemas, keys, len(paths), schema_key)):
            problems, counts = reader.read(path, schema, None if validates else answers)
            self.reports.append(counts.line(path))
            yield problems


def set_names(paths: Sequence[str]) -> list[str]:
    """Names of validation sets: those of their files without ending, "test"; where several have one, with the folder's
    before it, "gsm8k_test". Raises InputError where that does not tell them apart.
    """
    stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    folders = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
    names = [stem if stems.count(stem) == 1 else f"{folder}_{stem}" for folder, stem in zip(folders, stems)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"eval.path: two files are called '{repeated[0]}'")
    return names
