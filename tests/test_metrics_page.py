"""docs/metrics.md lists every metric that a run writes."""

import fnmatch
import json
import pathlib
import re

from tests.helpers.runs import finished_run

PAGE = pathlib.Path(__file__).parents[1] / "docs/metrics.md"


def test_every_metric_of_a_run_is_on_the_page(tmp_path_factory):
    listed = [re.sub(r"<\w+>", "*", name) for name in re.findall(r"`([\w/<>]+)`", PAGE.read_text())]
    workdir, _, _ = finished_run(tmp_path_factory)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    written = {name for row in rows for name in row}
    assert len(written) > 60
    exact = {name for name in listed if "*" not in name}
    patterns = [name for name in listed if "*" in name and not name.endswith("/*")]
    missing = {n for n in written - exact if not any(fnmatch.fnmatchcase(n, p) for p in patterns)}
    assert not missing
