"""TLS for everything that goes over TCP: TLS 1.3, the server's certificate checked by whoever connects. Who a peer is remains the
business of `wire.auth`, inside. The Unix door of a holder does not leave the machine and has no need of it."""

import ssl
from pathlib import Path


class TlsError(ValueError):
    """One line: what was given, what is wrong with it."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """For whoever listens. ``certificate``: PEM, its chain behind it. Raises ``TlsError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections are kept, not resumed
    try:
        context.load_cert_chain(
            certificate, key, password=lambda: ""
        )  # an encrypted key is an error, not a question at a terminal
    except (OSError, ValueError) as error:
        reason = f"{certificate} and {key} are no certificate with its key, in PEM and not encrypted: {error}"
        raise TlsError(f"--tls-cert, --tls-key: {reason}") from error
    return context


def client_context(ca: Path | None = None) -> ssl.SSLContext:
    """For whoever connects: trusts ``ca`` (PEM; a server's own certificate will do), or the machine's authorities. Raises
    ``TlsError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        if ca is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        else:
            context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise TlsError(f"ca={ca}: no certificates in PEM to trust: {error}") from error
    return context


def own_context(certificate: Path) -> ssl.SSLContext:
    """For a holder that talks to the master of its own process: that certificate and no other, whatever name is in it."""
    context = client_context(certificate)
    context.check_hostname = False
    return context
