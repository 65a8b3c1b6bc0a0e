"""The page for Prometheus: a real server, scraped as Prometheus does."""

import math
import socket
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specrl_jax.errors import InputError
from specrl_jax.io.metrics import MetricsWriter
from specrl_jax.io.prometheus import PrometheusPage
from specrl_jax.io.trackers import Trackers
from tests.helpers.runs import arguments, start_process


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scrape(port):
    """Return {gauge: value} of the page."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} <= {"gauge"}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_page_has_the_newest_values_until_it_is_closed(tmp_path):
    port = free_port()
    page = PrometheusPage(port)
    assert scrape(port) == {}
    kept = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward/mean": 0.5}]
    trackers = Trackers()
    trackers.add(page)
    writer = MetricsWriter(str(tmp_path), kept, trackers)
    assert scrape(port) == {"specrl_step": 1.0, "specrl_eval_accuracy": 0.25, "specrl_reward_mean": 0.5}
    writer.write({"step": 2, "reward/mean": 0.75, "reward/part/a-b.c": 1.0, "draft/loss": math.nan})
    found = scrape(port)
    assert math.isnan(found.pop("specrl_draft_loss"))
    assert found == {
        "specrl_step": 2.0,
        "specrl_eval_accuracy": 0.25,
        "specrl_reward_mean": 0.75,
        "specrl_reward_part_a_b_c": 1.0,
    }
    writer.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_only_this_machine_reaches_it_and_a_port_in_use_is_named():
    port = free_port()
    page = PrometheusPage(port)
    try:
        with pytest.raises(InputError, match=rf"^logging\.prometheus_port={port}: Address already in use"):
            PrometheusPage(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)  # of this machine too, but another address
    finally:
        page.close()


@pytest.mark.slow
def test_a_run_under_way_is_scraped(tmp_path):
    port = free_port()
    overrides = [
        f"--config.logging.prometheus_port={port}",
        "--config.steps=100000",
        "--config.checkpoint.every=100000",
    ]
    process = start_process(arguments(*overrides, workdir=tmp_path))
    try:
        found = {}
        while found.get("specrl_step", 0) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.5)
            try:
                found = scrape(port)
            except urllib.error.URLError:  # it is not open yet
                continue
        assert found["specrl_time_total"] > 0 and "specrl_eval_accuracy" in found
    finally:
        process.terminate()
        process.communicate()
