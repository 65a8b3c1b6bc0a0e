"""Which problems a config trains and validates on."""

import dataclasses
import functools
import os
from collections.abc import Sequence

from specrl_jax.core import BadInput
from specrl_jax.data.prompts import PromptFormat, Reader, Schema, find_schemas, split_paths
from specrl_jax.data.sources import ProblemStream, Source
from specrl_jax.data.tasks import Problem, TaskSource
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.training.settings import DataSettings, EvalSettings


@dataclasses.dataclass(frozen=True)
class Problems:
    """Read when they are first asked for. Reading raises BadInput for a file or row that cannot be used."""

    data: DataSettings
    eval: EvalSettings
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
        return [*self._read("data", self.data.path, self.data.schema, self.data.template).values()]

    @functools.cached_property
    def validation(self) -> dict[str, list[Problem]]:
        """The fixed validation sets by name: that of the file without its ending, or of the built-in task."""
        if self.data.path and not self.eval.path and not self.eval.task:
            raise BadInput("eval.path: prompts come from data.path, so a file to validate on is needed here")
        if self.eval.path:
            template = self.eval.template or self.data.template
            sets: dict[str, Sequence[Problem]] = self._read(
                "eval", self.eval.path, self.eval.schema or self.data.schema, template
            )
        else:
            task = self.eval.task or self.data.task
            sets = {task: TaskSource(task, "validation", self.seed)}
        return {name: [s[i] for i in range(min(self.eval.problems, len(s)))] for name, s in sets.items()}

    @functools.cached_property
    def reports(self) -> list[str]:
        """A line for each file that was read: what was kept of it, and what was left out."""
        return []

    def _read(self, section: str, paths: str, schemas: str, template: str) -> dict[str, list[Problem]]:
        d = self.data
        reader = Reader(
            self.tokenizer,
            PromptFormat(template, d.chat, d.system, d.thinking),
            self.max_prompt_tokens,
            d.skip_malformed,
            d.skip_long,
            f"{section}.path",
        )
        found = [*split_paths(paths)]
        keys = Schema(d.prompt_key, d.answer_key, d.answer_after)
        named_by = "eval" if section == "eval" and self.eval.schema else "data"
        sets = {}
        for path, schema in zip(found, find_schemas(schemas, keys, len(found), f"{named_by}.schema")):
            name = os.path.splitext(os.path.basename(path))[0]
            if name in sets:
                raise BadInput(f"{section}.path: two files are called '{name}'")
            sets[name], counts = reader.read(path, schema)
            self.reports.append(counts.line(path))
        return sets
