"""Variables that begin with FOREBAY_ and are nobody's settings: what Kubernetes injects for services."""

import pytest

from forebay.models.errors import ModelError
from forebay.models.resolve import resolve_model
from forebay.settings import SettingsError, resolve, unknown_variables


def injected(service: str, port: int) -> dict[str, str]:
    """As kubelet writes them for a service (its name in capitals, - as _)."""
    tcp = f"{service}_PORT_{port}_TCP"
    return {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": str(port),
        f"{service}_SERVICE_PORT_HTTP": str(port),
        f"{service}_SERVICE_PORT_METRICS_2": "9090",
        f"{service}_PORT": f"tcp://10.0.0.1:{port}",
        tcp: f"tcp://10.0.0.1:{port}",
        f"{tcp}_PROTO": "tcp",
        f"{tcp}_PORT": str(port),
        f"{tcp}_ADDR": "10.0.0.1",
        f"{service}_PORT_53_UDP": "udp://10.0.0.1:53",
        f"{service}_PORT_53_UDP_PROTO": "udp",
    }


@pytest.mark.parametrize("service", ["FOREBAY", "FOREBAY_STORE", "FOREBAY_PORT", "FOREBAY_A_B"])
def test_a_services_variables_set_nothing(service: str) -> None:
    assert resolve({}, environment=injected(service, 9000)) == resolve({}, environment={})
    assert unknown_variables(injected(service, 9000)) == []


def test_an_address_of_version_6_is_one_too() -> None:
    assert resolve({}, environment={"FOREBAY_PORT": "tcp://[fd00::1]:8000"}).port == 8000


def test_a_home_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ModelError, match="~nobody-here/m: there is no such home directory"):
        resolve_model("~nobody-here/m")


def test_settings_beside_them_count() -> None:
    said = injected("FOREBAY", 9000) | {"FOREBAY_PORT": "8123", "FOREBAY_PAGE_SIZE": "32"}
    settings = resolve({}, environment=said)
    assert (settings.port, settings.page_size) == (8123, 32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FOREBAY_PORT", "tcp://10.0.0.1"),
        ("FOREBAY_PORT", "http://10.0.0.1:8000"),
        ("FOREBAY_PORT", "80000"),
        ("FOREBAY_PORT", ""),
        ("FOREBAY_PAGE_SIZE", "tcp://10.0.0.1:8000"),
        ("FOREBAY_STORE_PORT", "8000"),
        ("FOREBAY_SERVICE", "10.0.0.1"),
        ("FOREBAY_PORT_8000", "tcp://10.0.0.1:8000"),
    ],
)
def test_a_real_mistake_is_still_one(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        resolve({}, environment={name: value})
