"""Damaged checkpoints: each is named, the run goes on from the one before, and ends bit-equal to an undamaged run.

A run of three steps with a checkpoint each is made once. For each damage its last checkpoint is damaged in a copy,
which is resumed in a child that has the programs compiled (resume.py); a few are resumed by the command itself. Damage
of a file that nothing is read from must leave the run bit-equal without a word.
"""

import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

from experiments.robustness.faults.catalogue import Ended, Finding, finish, main_py, start
from experiments.robustness.same_run import REWARD, overrides

STEPS = 3
SETTINGS = overrides("suffix", "sync", {}) | {
    "steps": STEPS,
    "eval.every": 0,
    "eval.problems": 2,
    "eval.samples": 1,
}
FLIPS = 6  # in each of the two largest files of data

Damage = Callable[[pathlib.Path], None]  # of the folder checkpoints/


def flip(path: pathlib.Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << (len(data) % 8)
    path.write_bytes(data)


def damages_of(name: str, size: int, flips: int) -> Iterator[tuple[str, Damage]]:
    """Yield damages of one file of the last checkpoint."""

    def of(change: Callable[[pathlib.Path], object]) -> Damage:
        def damage(folder: pathlib.Path) -> None:
            change(folder / str(STEPS) / name)

        return damage

    for i in range(flips):
        place = (i + 0.5) / flips
        yield f"one bit flipped at {place:.0%} of {name}", of(lambda path, place=place: flip(path, place))  # type: ignore[misc]
    yield f"{name} cut in half", of(lambda path: os.truncate(path, size // 2))
    yield f"{name} zeroed", of(lambda path: path.write_bytes(bytes(size)))
    yield f"{name} deleted", of(lambda path: path.unlink())


def half_written(folder: pathlib.Path) -> None:
    """Leave what a copy leaves that was cut off: half of the files."""
    files = sorted(path for path in (folder / str(STEPS)).rglob("*") if path.is_file())
    for path in files[: len(files) // 2]:
        path.unlink()


def empty(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / str(STEPS))
    (folder / str(STEPS)).mkdir()


def a_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / str(STEPS))
    (folder / str(STEPS)).write_text("a file where a folder should be")


def under_another_number(folder: pathlib.Path) -> None:
    """Put the checkpoint before in this one's place: nothing of it is damaged, but it is not this step's."""
    shutil.rmtree(folder / str(STEPS))
    shutil.copytree(folder / str(STEPS - 1), folder / str(STEPS))


def killed_save(folder: pathlib.Path) -> None:
    shutil.copytree(folder / "1", folder / f"{STEPS + 1}.orbax-checkpoint-tmp")


def all_damages(checkpoint: pathlib.Path) -> dict[str, Damage]:
    """Return each damage by its name."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    by_size = sorted(files, key=lambda path: -path.stat().st_size)
    found: dict[str, Damage] = {}
    for path in files:
        name, size = str(path.relative_to(checkpoint)), path.stat().st_size
        several = damages_of(name, size, FLIPS if path in by_size[:2] else 1)
        # Of orbax's marks, and of data that it has merged into other files, one damage each: nothing is read from them.
        idle = name.endswith("commit_success.txt") or ("ocdbt.process" in name and path not in by_size[:4])
        found |= dict(itertools.islice(several, 1 if idle else None))
    for item in sorted(path.name for path in checkpoint.iterdir() if path.is_dir()):
        found[f"all of {item} deleted"] = lambda folder, item=item: shutil.rmtree(folder / str(STEPS) / item)  # type: ignore[misc]
    found |= {
        "an empty folder": empty,
        "half of the files": half_written,
        "a file in its place": a_file,
        "the checkpoint before in its place": under_another_number,
        "an empty later folder": lambda folder: (folder / str(STEPS + 1)).mkdir(),
        "a later folder of a stranger": lambda folder: (folder / "99" / "models").mkdir(parents=True),
        "a save that was killed": killed_save,
    }
    return found


def both_damaged(folder: pathlib.Path) -> None:
    empty(folder)
    flip(folder / str(STEPS - 1) / "values" / "metadata", 0.5)


def none_whole(folder: pathlib.Path) -> None:
    for step in range(1, STEPS + 1):
        flip(folder / str(step) / "values" / "metadata", 0.5)


def findings(folder: pathlib.Path) -> Iterator[Finding]:
    """Yield what happened to each damage."""
    (folder / "specrl_checksum.py").write_text(REWARD)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(folder / "cache")
    environment = {"PYTHONPATH": str(folder), "JAX_COMPILATION_CACHE_DIR": cache, "XLA_FLAGS": ""}
    whole = folder / "whole"
    command = lambda workdir: main_py("configs/rlzero_tiny.py:smoke", workdir, SETTINGS)  # noqa: E731
    made = finish(start(command(whole), environment), 300)
    if made.status:
        yield Finding("the run that is damaged", "failed", made.stderr[-300:])
        return
    damages = all_damages(whole / "checkpoints" / str(STEPS)) | {"the last two": both_damaged}
    damages["each one"] = none_whole
    workdirs = {name: folder / str(i) for i, name in enumerate(damages)}
    for name, workdir in workdirs.items():
        shutil.copytree(whole, workdir)
        damages[name](workdir / "checkpoints")
    program = [sys.executable, "-m", "experiments.robustness.faults.resume", str(whole), *map(str, workdirs.values())]
    ended = finish(start(program, environment), 600)
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"said"')]
    for i, name in enumerate(damages):
        yield judged(name, results[i] if i < len(results) else None, ended)
    yield from by_the_command(folder, whole, command, environment)


def judged(name: str, result: dict | None, ended: Ended) -> Finding:
    if result is None:
        return Finding(name, "failed", f"the child ended with status {ended.status}: {ended.stderr[-300:]}")
    if name == "each one":
        good = "no checkpoint is whole" in result["error"]
        return Finding(name, "refused" if good else "failed", result["error"] or "it went on")
    said = "; ".join(result["said"]) or "not a word: nothing is read from it"
    if result["error"] or result["different"] or ended.traceback:
        why = result["error"] or "; ".join(result["different"]) or "a traceback"
        return Finding(name, "failed", f"{said}: {why}", bit_equal=not result["error"] and not result["different"])
    return Finding(name, "survived", said, bit_equal=True)


def by_the_command(
    folder: pathlib.Path, whole: pathlib.Path, command: Callable[[pathlib.Path], list[str]], environment: dict[str, str]
) -> Iterator[Finding]:
    """Yield two damages as a user meets them, and the refusal of a checkpoint of another model."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for i, (tried, damage) in enumerate({"half of the files": half_written, "each one": none_whole}.items()):
            workdir = pathlib.Path(name) / str(i)
            shutil.copytree(whole, workdir)
            damage(workdir / "checkpoints")
            ended = finish(start(command(workdir), environment))
            lines = [line for line in ended.stdout.splitlines() if line.startswith("checkpoint ")]
            if damage is none_whole:
                good = ended.status == 1 and "no checkpoint is whole" in ended.error and not ended.traceback
                outcome = "refused" if good else "failed"
            else:
                good = ended.status == 0 and len(lines) == 1 and not ended.traceback
                outcome = "survived" if good else "failed"
            said = "; ".join(lines) or ended.error or ended.stderr[-300:]
            yield Finding(f"{tried}, by the command", outcome, said)  # type: ignore[arg-type]
