"""Two hosts as namespaces: what one does the other does not see, and weights go from one to the other."""

import subprocess
import sys

import pytest

from experiments.robustness import hosts, two_hosts
from specrl_jax.errors import InputError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab():
    try:
        with hosts.two_hosts() as made:
            yield two_hosts.Lab(*made)
    except InputError as error:
        pytest.skip(str(error))


def printed(host, command):
    found = subprocess.run(host.command("sh", "-c", command), capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_each_has_a_name_processes_and_files_of_its_own(lab):
    first, second = lab.hosts
    assert [printed(host, "hostname") for host in lab.hosts] == ["hosta", "hostb"]
    printed(first, "echo a > /tmp/own; echo a > changed_here; echo a > /mnt/both; sleep 60 >/dev/null 2>&1 &")
    assert printed(second, "ls /tmp; test -e changed_here || echo no; cat /mnt/both") == "no\na"
    assert "sleep 60" in printed(first, "ps -ef") and "sleep 60" not in printed(second, "ps -ef")
    assert not (hosts.REPOSITORY / "changed_here").exists()


def test_weights_go_from_one_to_the_other_and_not_without_a_wire(lab):
    found = two_hosts.moves_weights(lab, (1,), 2)
    assert len(found["gb_per_s_1_mib"]) == 2 and all(0 < rate < 0.13 for rate in found["gb_per_s_1_mib"])
    connects = f"import socket; socket.create_connection(('{lab.hosts[1].address}', 9), timeout=3)"
    reaches = f'{sys.executable} -c "{connects}" 2>&1 | tail -1'
    assert "refused" in printed(lab.hosts[0], reaches)  # nobody listens there
    with lab.switch.without(lab.hosts[1]):
        assert "refused" not in printed(lab.hosts[0], reaches)
    assert "refused" in printed(lab.hosts[0], reaches)


def test_a_host_without_power_loses_its_processes_and_comes_back(lab):
    (program,) = (lab.hosts[1].begin(["-c", "import time; time.sleep(600)"]),)
    assert program.is_running()
    lab.hosts[1].cut_power()
    assert program.wait(20).status
    lab.hosts[1].start()
    lab.switch.connect(lab.hosts[1])
    assert printed(lab.hosts[1], "hostname; cat /mnt/both || true").startswith("hostb")
