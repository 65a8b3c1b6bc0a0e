"""The newest metrics of a run under way, in Prometheus' text format at http://127.0.0.1:PORT/metrics."""

import math
import re
from collections.abc import Mapping, Sequence

import prometheus_client

from specrl_jax.errors import InputError
from specrl_jax.io.trackers import Tracker


class PrometheusPage(Tracker):
    """Serves the newest value of every metric to programs of this machine, until `close`.

    A gauge has the name of its metric after `specrl_`, with `_` for all but letters and digits: specrl_reward_mean.
    A value that is not finite is NaN.

    Raises InputError where the port cannot be had.
    """

    name = "prometheus"

    def __init__(self, port: int) -> None:
        self._registry, self._gauges = prometheus_client.CollectorRegistry(), dict[str, prometheus_client.Gauge]()
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            raise InputError(
                f"logging.prometheus_port={port}: {error.strerror}; needs a free port, or 0 for no page"
            ) from None

    def begin(self, kept: Sequence[Mapping[str, float]]) -> None:
        for row in kept:
            self.write(row, {})

    def write(self, row: Mapping[str, float | None], histograms: object) -> None:
        """Set the gauges of these metrics; None is a value that was not finite."""
        for metric, value in row.items():
            name = "specrl_" + re.sub("[^a-zA-Z0-9]", "_", metric)
            if name not in self._gauges:
                help = f"{metric} in docs/metrics.md"
                self._gauges[name] = prometheus_client.Gauge(name, help, registry=self._registry)
            self._gauges[name].set(math.nan if value is None else value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
